"""How Postgres is asked: by a `psycopg.Connection`, or a SQLAlchemy `Engine` or `AsyncEngine`.

Each question is a transaction of its own, which only reads and is over when the answer is there. Values stand as %s.
"""

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

Row = tuple[Any, ...]
# Whatever the level of the engine itself is; rows come in pages.
_OPTIONS = {"isolation_level": "READ COMMITTED", "postgresql_readonly": True, "yield_per": 500}


def reading(handle: object) -> Callable[[Any, str, Row], list[Row]] | None:
    """What asks by such a handle; None for anything else, connections to other databases included."""
    for name, kind, read in _KINDS:
        module = sys.modules.get(name)  # a handle cannot be there before its library is loaded
        if module is not None and isinstance(handle, getattr(module, kind)):
            dialect = getattr(handle, "dialect", None)  # of nothing else: any attribute of a store may be asked here
            return read if getattr(dialect, "name", "postgresql") == "postgresql" else None
    return None


def quoted(name: str | None) -> str:
    """A name as it stands in a question, whatever is in it."""
    return '"' + str(name).replace('"', '""').replace("%", "%%") + '"'


def would_block_loop(handle: object) -> bool:
    """Whether waiting for an answer here stops all else in a loop, for one who has chosen never to wait there."""
    try:
        return asyncio.get_running_loop() is not None and hasattr(handle, "sync_engine")
    except RuntimeError:
        return False


def _by_connection(handle: Any, sql: str, values: Row) -> list[Row]:
    """Inside the transaction that the connection is in, if it is in one, which is left as it was."""
    row_factory = sys.modules["psycopg"].rows.tuple_row
    with handle.transaction(force_rollback=True):
        handle.execute("SET TRANSACTION READ ONLY")
        with handle.cursor(f"rag_explain_{uuid4().hex}", row_factory=row_factory) as cursor:
            return list(cursor.execute(sql, values))


def _by_engine(handle: Any, sql: str, values: Row) -> list[Row]:
    with handle.connect() as connection:
        return _answer(connection, sql, values)


def _by_async_engine(handle: Any, sql: str, values: Row) -> list[Row]:
    """On a connection, in a loop and in a thread of its own: those of the engine belong to a loop that may be busy, may
    have ended, or may be waiting for this very answer."""
    sync = handle.sync_engine

    async def answer() -> list[Row]:
        own = type(handle)(sys.modules["sqlalchemy"].Engine(sync.pool.recreate(), sync.dialect, sync.url))
        try:
            async with own.connect() as connection:
                rows: list[Row] = await connection.run_sync(_answer, sql, values)
                return rows
        finally:
            await own.dispose()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, answer()).result()


def _answer(connection: Any, sql: str, values: Row) -> list[Row]:
    if connection.dialect.paramstyle == "numeric_dollar":  # asyncpg
        sql %= tuple(f"${number}" for number in range(1, len(values) + 1))
    return [tuple(row) for row in connection.execution_options(**_OPTIONS).exec_driver_sql(sql, values)]


_KINDS = (
    ("psycopg", "Connection", _by_connection),
    ("sqlalchemy", "Engine", _by_engine),
    ("sqlalchemy.ext.asyncio", "AsyncEngine", _by_async_engine),
)
