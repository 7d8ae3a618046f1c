"""A Postgres with pgvector for the tests of one process, started when it is first asked for."""

from __future__ import annotations

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
    """The server, in a folder of its own. It stops with the process too, where no fixture has stopped it before."""
    try:
        with warnings.catch_warnings():  # platformdirs: XDG_RUNTIME_DIR is not set where no one is logged in
            warnings.filterwarnings("ignore", "XDG_RUNTIME_DIR is not set")
            from pgserver import get_server
        import psycopg

        server = get_server(tempfile.mkdtemp(prefix="rag_explain"), cleanup_mode="delete")
        with psycopg.connect(server.get_uri(), autocommit=True) as connection:
            connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
    except ImportError as error:
        raise SkipTest(f"{error.name} is not installed") from error
    except Exception as error:
        raise SkipTest(f"no Postgres starts here: {type(error).__name__}: {error}") from error
    return server


def url(driver: str | None = None) -> str:
    """Where the server is, for a driver of SQLAlchemy; None: for psycopg itself."""
    told: str = _server().get_uri()
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
    if _server.cache_info().currsize:
        _server().cleanup()
        _server.cache_clear()
