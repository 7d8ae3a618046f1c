"""Milvus Lite: Milvus in a file, served by threads of this process."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def milvus_file(folder: Path) -> Iterator[str]:
    """Where a Milvus is; its server is stopped in the end."""
    from milvus_lite.server_manager import server_manager_instance

    uri = str(folder / "milvus.db")
    yield uri
    server_manager_instance.release_server(uri)


@contextmanager
def old_connection(alias: str, uri: str) -> Iterator[None]:
    """The connection of pymilvus's old way, by which langchain-milvus looks at its collection.

    langchain-milvus 0.3 takes it that each client has one, which they have not from pymilvus 2.6.10 on.
    """
    from pymilvus import connections

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* is an ORM-style PyMilvus API")
        is_new = not connections.has_connection(alias)
        if is_new:
            connections.connect(alias, uri=uri)
        yield
        if is_new:
            connections.disconnect(alias)
