"""A Postgres with pgvector for the tests of one process, started when it is first asked for."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import SkipTest

import pytest


@cache
def _server() -> Any:
    """The server, in a folder of its own, or why there is none. It stops with the process at the latest."""
    folder = tempfile.mkdtemp(prefix="rag_explain")
    try:
        with warnings.catch_warnings():  # platformdirs: XDG_RUNTIME_DIR is not set where no one is logged in
            warnings.filterwarnings("ignore", "XDG_RUNTIME_DIR is not set")
            from pgserver import get_server
        import psycopg

        server = get_server(folder, cleanup_mode="delete")
        with psycopg.connect(server.get_uri(), autocommit=True) as connection:
            connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
    except Exception as error:
        shutil.rmtree(folder, ignore_errors=True)
        return f"{error.name} is not installed" if isinstance(error, ImportError) else f"no Postgres starts: {error!r}"
    return server


def url(driver: str | None = None) -> str:
    """Where the server is, for a driver of SQLAlchemy; None: for psycopg itself."""
    server = _server()
    if isinstance(server, str):
        raise SkipTest(server)
    told: str = server.get_uri()
    return told if driver is None else told.replace("postgresql", f"postgresql+{driver}", 1)


@contextmanager
def engine(driver: str = "psycopg", **options: Any) -> Iterator[Any]:
    """A SQLAlchemy Engine."""
    from sqlalchemy import create_engine

    made = create_engine(url(driver), **options)
    try:
        yield made
    finally:
        made.dispose()


def async_engine(driver: str = "asyncpg", **options: Any) -> Any:
    """A SQLAlchemy AsyncEngine, which may be used in one loop after another: it keeps no connections."""
    from sqlalchemy import NullPool
    from sqlalchemy.ext.asyncio import create_async_engine

    return create_async_engine(url(driver), poolclass=NullPool, **options)


@pytest.fixture(scope="session", autouse=True)
def stopped_postgres() -> Iterator[None]:
    """Stops the server at the end of a session, if one was started."""
    yield
    if _server.cache_info().currsize and not isinstance(_server(), str):
        _server().cleanup()
    _server.cache_clear()
