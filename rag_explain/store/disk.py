"""The disk tier: rows of bytes in one SQLite file, shared by processes, within a size limit.

A row is on disk when `put` returns. Deleted bytes are overwritten with zeros.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from rag_explain.errors import StoreError
from rag_explain.store.sqlite_file import SqliteFile, is_busy, is_unreadable
from rag_explain.store.tier import Row, Tier, chunks

DEFAULT_DISK_BYTES = 10 * 2**30
_CHUNK = 200  # keys in one statement, rows in one transaction
_PAUSE = 10.0  # seconds for which a file that stayed locked is not asked again
_TOUCHES = 10_000  # uses remembered between two writes


class _Unreadable(StoreError):
    """What the file holds cannot be read; other rows of it may be."""


class Disk(Tier):
    """Rows in `folder`/factors.sqlite.

    Args:
        max_bytes: the rows that were used longest ago go when the file would grow beyond this.
        timeout: seconds to wait for other processes' writes.
        journal: SQLite's journal mode; None chooses by version and filesystem.
        readonly: open only to read: nothing is made or changed in the folder.
    """

    name = "disk"

    def __init__(
        self,
        folder: str | Path,
        *,
        max_bytes: int = DEFAULT_DISK_BYTES,
        timeout: float = 10.0,
        journal: str | None = None,
        readonly: bool = False,
    ) -> None:
        self._file = SqliteFile(folder, timeout=timeout, journal=journal, readonly=readonly)
        self.folder = self._file.folder
        self.readonly = self._file.readonly
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._touched: dict[bytes, int] = {}  # rows that were read since the last write, and when
        self._resume = 0.0

    # ------------------------------------------------------------------ rows

    def has(self, keys: Sequence[bytes]) -> set[bytes]:
        return self._select("SELECT key FROM uses WHERE key IN", keys)

    def get(self, keys: Sequence[bytes]) -> dict[bytes, Row]:
        """The rows that can be read; a row that SQLite cannot read is a miss."""
        found: dict[bytes, Row] = {}
        for chunk in chunks(keys, _CHUNK):
            try:
                found |= self._get(chunk)
            except _Unreadable:
                if len(keys) == 1:
                    raise
                for key in chunk:
                    with suppress(_Unreadable):
                        found |= self._get([key])
        now = int(time.time() * 1000)
        with self._lock:
            if len(self._touched) < _TOUCHES:
                self._touched.update(dict.fromkeys(found, now))
        return found

    def put(self, rows: Sequence[Row]) -> None:
        """Write the rows, in transactions of at most 200 rows."""
        for chunk in chunks(rows, _CHUNK):
            self._file.write(partial(self._put, rows=chunk))

    def link(self, links: Sequence[tuple[bytes, Sequence[bytes]]]) -> None:
        known = "SELECT 1 FROM documents WHERE owner = ? AND key = ?"
        pairs = [(owner, key) for key, owners in links for owner in owners if not self._read(known, [owner, key])]
        insert = "INSERT OR IGNORE INTO documents SELECT ?, key FROM uses WHERE key = ?"
        if pairs:  # a look is much cheaper than a write that changes nothing
            self._file.write(lambda connection: connection.executemany(insert, pairs))

    def delete(self, key: bytes) -> None:
        self._file.write(lambda connection: _delete(connection, [key], "rows", "uses"))

    # ------------------------------------------------------------------ erasing

    def owned_by(self, owners: Sequence[bytes]) -> set[bytes]:
        return self._select("SELECT key FROM documents WHERE owner IN", owners)

    def forget(self, owners: Sequence[bytes], keys: Collection[bytes]) -> None:
        """Erase these rows, and any file that was set aside: it might hold them too."""

        def erase(connection: sqlite3.Connection) -> None:
            _delete(connection, keys, "rows", "uses", "documents")
            for chunk in chunks(owners, _CHUNK):
                connection.execute(f"DELETE FROM documents WHERE owner IN {_marks(chunk)}", chunk)
            connection.execute("UPDATE epoch SET value = random()")

        self._file.write(erase)
        with self._lock:
            for key in keys:
                self._touched.pop(key, None)
        self._file.empty_log()
        self._file.erase_set_aside()
        left = self.has(list(keys)) | self.owned_by(owners)
        if left:
            raise StoreError(f"{len(left)} rows came back while they were being erased: forget them again")

    def epoch(self) -> object:
        """Something that changes whenever a process forgets anything here, and when the file begins anew."""
        return self._read("SELECT value FROM epoch LIMIT 1", [])

    def prune(self, max_bytes: int) -> int:
        """Drop the rows that were used longest ago, and give the space back to the filesystem; how many went."""
        gone = self._file.write(lambda connection: self._evict(connection, max_bytes))
        self._file.give_back()
        return gone

    # ------------------------------------------------------------------ looking after it

    def scan(self) -> Iterator[Row]:
        last = b""
        while found := self._read("SELECT key FROM uses WHERE key > ? ORDER BY key LIMIT 100", [last]):
            for (key,) in found:
                last = key
                row = Row(key, b"")
                with suppress(_Unreadable):
                    row = self._get([key]).get(key, row)
                yield row

    def info(self) -> dict[str, Any]:
        counts = "SELECT count(*), coalesce(sum(size), 0), (SELECT count(DISTINCT owner) FROM documents) FROM uses"
        rows, size, documents = (self._read(counts, []) or [(0, 0, 0)])[0]
        path = self._file.path
        return {
            "folder": str(self.folder),
            "rows": rows,
            "bytes": size,
            "file_bytes": path.stat().st_size if path.exists() else 0,
            "max_bytes": self._max_bytes,
            "documents": documents,
            "set_aside": [path.name for path in self._file.set_aside()],
            "readonly": not self._file.writable,
            "journal": self._file.journal,
            "sqlite": sqlite3.sqlite_version,
        }

    def close(self) -> None:
        """Write down when rows were last used, and close the file."""
        if self._touched and not self.readonly:
            with suppress(StoreError):  # nothing is lost but the order in which rows are dropped
                self._file.write(self._touch)
        self._file.close()

    # ------------------------------------------------------------------ inside a transaction

    def _put(self, connection: sqlite3.Connection, rows: Sequence[Row]) -> None:
        now = int(time.time() * 1000)
        connection.executemany("INSERT OR REPLACE INTO rows VALUES (?, ?)", [(row.key, row.data) for row in rows])
        uses = [(row.key, now, len(row.data)) for row in rows]
        connection.executemany("INSERT OR REPLACE INTO uses VALUES (?, ?, ?)", uses)
        owned = [(owner, row.key) for row in rows for owner in row.owners]
        connection.executemany("INSERT OR IGNORE INTO documents VALUES (?, ?)", owned)
        self._touch(connection)
        self._evict(connection, self._max_bytes)

    def _touch(self, connection: sqlite3.Connection) -> None:
        with self._lock:
            touched, self._touched = self._touched, {}
        connection.executemany("UPDATE uses SET used = ? WHERE key = ?", [(at, key) for key, at in touched.items()])

    def _evict(self, connection: sqlite3.Connection, max_bytes: int) -> int:
        """Drop the rows used longest ago until the pages in use take at most `max_bytes`."""
        gone = 0
        while (excess := _bytes_in_use(connection) - max_bytes) > 0:
            oldest: list[bytes] = []
            for key, size in connection.execute("SELECT key, size FROM uses ORDER BY used, key LIMIT ?", [_CHUNK]):
                oldest.append(key)
                excess -= size
                if excess <= 0:
                    break
            if not oldest:
                break
            _delete(connection, oldest, "rows", "uses", "documents")
            gone += len(oldest)
        return gone

    # ------------------------------------------------------------------ reading

    def _get(self, keys: Sequence[bytes]) -> dict[bytes, Row]:
        owners: dict[bytes, list[bytes]] = {}
        for key, owner in self._read(f"SELECT key, owner FROM documents WHERE key IN {_marks(keys)}", keys):
            owners.setdefault(key, []).append(owner)
        rows = self._read(f"SELECT key, data FROM rows WHERE key IN {_marks(keys)}", keys)
        return {key: Row(key, data, tuple(owners.get(key, ()))) for key, data in rows}

    def _select(self, statement: str, values: Iterable[bytes]) -> set[bytes]:
        """What a SELECT of one column finds for these values, which may be too many for one statement."""
        return {row[0] for chunk in chunks(values, _CHUNK) for row in self._read(f"{statement} {_marks(chunk)}", chunk)}

    def _read(self, statement: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        if time.monotonic() < self._resume:
            raise StoreError(f"the store {self.folder} was locked a moment ago and is left alone for now")
        try:
            return self._file.read(statement, values)
        except sqlite3.Error as error:
            kind = _Unreadable if is_unreadable(error) else StoreError
            if is_busy(error):
                self._resume = time.monotonic() + _PAUSE
            raise kind(f"the store {self.folder} cannot be read: {error}") from error


def _delete(connection: sqlite3.Connection, keys: Iterable[bytes], *tables: str) -> None:
    for chunk in chunks(keys, _CHUNK):
        for table in tables:
            connection.execute(f"DELETE FROM {table} WHERE key IN {_marks(chunk)}", chunk)


def _bytes_in_use(connection: sqlite3.Connection) -> int:
    pages, free, size = (
        connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * size)


def _marks(values: Sequence[Any]) -> str:
    return f"({','.join('?' * len(values))})"
