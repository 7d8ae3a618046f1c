"""The disk tier: rows of bytes in one SQLite file, shared by processes, within a size limit.

A row is on disk when `put` returns. Rows that turn out to be damaged go to quarantine, where they can be
looked at; a damaged file is set aside as a whole (see `sqlite_file`). Deleted bytes are overwritten with zeros.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

from rag_explain.errors import StoreError
from rag_explain.store.sqlite_file import ForeignFile, SqliteFile, damaged_files, is_busy, is_circumstance, open_damaged
from rag_explain.store.tier import Row, chunks

log = logging.getLogger(__name__)

DEFAULT_LIMIT = 10 * 2**30
_CHUNK = 200  # keys in one statement, rows in one transaction
_QUARANTINED = 16  # damaged rows that are kept to be looked at
_HOPELESS = 1000  # unreadable rows in a row, after which a damaged file is given up
_PAUSE = 10.0  # seconds for which a file that stayed locked is not asked again
_TOUCHES = 10_000  # uses remembered between two writes


class _Unreadable(StoreError):
    """What the file holds cannot be read; other rows of it may be."""


class Disk:
    """Rows in `folder`/factors.sqlite.

    Args:
        max_bytes: the rows that were used longest ago go when the file would grow beyond this.
        timeout: seconds to wait for other processes' writes.
        journal: SQLite's journal mode; None chooses by version and filesystem.
    """

    name = "disk"

    def __init__(
        self,
        folder: str | Path,
        *,
        max_bytes: int = DEFAULT_LIMIT,
        timeout: float = 10.0,
        journal: str | None = None,
    ) -> None:
        self._file = SqliteFile(folder, timeout=timeout, journal=journal)
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._touched: dict[bytes, int] = {}
        self._resume = 0.0

    @property
    def folder(self) -> Path:
        """Where the file is."""
        return self._file.folder

    @property
    def readonly(self) -> bool:
        """Whether rows can only be read here."""
        return self._file.readonly

    # ------------------------------------------------------------------ rows

    def has(self, keys: Sequence[bytes]) -> set[bytes]:
        """Those of the keys that are kept, without reading their data."""
        found: set[bytes] = set()
        for chunk in chunks(keys, _CHUNK):
            found.update(row[0] for row in self._read(f"SELECT key FROM uses WHERE key IN {_marks(chunk)}", chunk))
        return found

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
        """Give rows that are kept already more owners."""
        known = "SELECT 1 FROM documents WHERE owner = ? AND key = ?"
        pairs = [(owner, key) for key, owners in links for owner in owners if not self._read(known, [owner, key])]
        if not pairs:
            return  # a look is much cheaper than a write that changes nothing

        def insert(connection: sqlite3.Connection) -> None:
            connection.executemany(
                "INSERT OR IGNORE INTO documents SELECT ?, key FROM uses WHERE key = ?",
                pairs,
            )

        self._file.write(insert)

    def quarantine(self, key: bytes, reason: str) -> None:
        """Move a damaged row out of the way; the newest 16 are kept."""

        def move(connection: sqlite3.Connection) -> None:
            connection.execute(
                "INSERT OR REPLACE INTO quarantine SELECT key, data, ?, ? FROM rows WHERE key = ?",
                (reason, int(time.time()), key),
            )
            connection.execute(
                "DELETE FROM quarantine WHERE key NOT IN (SELECT key FROM quarantine ORDER BY found DESC LIMIT ?)",
                (_QUARANTINED,),
            )
            connection.execute("DELETE FROM rows WHERE key = ?", (key,))
            connection.execute("DELETE FROM uses WHERE key = ?", (key,))

        self._file.write(move)

    # ------------------------------------------------------------------ erasing

    def owned_by(self, owners: Sequence[bytes]) -> set[bytes]:
        """The keys of the rows that one of these documents owns."""
        found: set[bytes] = set()
        for chunk in chunks(owners, _CHUNK):
            found.update(
                row[0] for row in self._read(f"SELECT key FROM documents WHERE owner IN {_marks(chunk)}", chunk)
            )
        return found

    def forget(self, owners: Sequence[bytes], keys: Collection[bytes]) -> None:
        """Erase these rows, and any file that was set aside: it might hold them too."""

        def erase(connection: sqlite3.Connection) -> None:
            for chunk in chunks(keys, _CHUNK):
                for table in ("rows", "uses", "quarantine", "documents"):
                    connection.execute(f"DELETE FROM {table} WHERE key IN {_marks(chunk)}", chunk)
            for chunk in chunks(owners, _CHUNK):
                connection.execute(f"DELETE FROM documents WHERE owner IN {_marks(chunk)}", chunk)
            connection.execute(
                "INSERT INTO state VALUES ('forgets', 1) ON CONFLICT (name) DO UPDATE SET value = value + 1"
            )

        self._file.write(erase)
        with self._lock:
            for key in keys:
                self._touched.pop(key, None)
        self._file.empty_log()
        for path in damaged_files(self.folder):
            path.unlink(missing_ok=True)
        left = self.has(list(keys)) | self.owned_by(owners)
        if left:
            raise StoreError(f"{len(left)} rows came back while they were being erased: forget them again")

    def forgets(self) -> int:
        """How often anybody has forgotten anything here."""
        found = self._read("SELECT value FROM state WHERE name = 'forgets'", [])
        return int(found[0][0]) if found else 0

    def prune(self, max_bytes: int) -> int:
        """Drop the rows that were used longest ago, and give the space back to the filesystem."""
        gone = self._file.write(lambda connection: self._evict(connection, max_bytes))
        self._file.give_back()
        return gone

    # ------------------------------------------------------------------ looking after it

    def scan(self) -> Iterator[Row]:
        """Every row with its documents; one that cannot be read comes with no data."""
        last = b""
        while found := self._read("SELECT key FROM uses WHERE key > ? ORDER BY key LIMIT 100", [last]):
            for (key,) in found:
                last = key
                row = Row(key, b"")
                with suppress(_Unreadable):
                    row = self._get([key]).get(key, row)
                yield row

    def take_over(self) -> int:
        """Copy what can be read of a file that was set aside, and remove it; how many rows came over."""
        if not damaged_files(self.folder):
            return 0
        rows: list[Row] = []
        count = 0
        try:
            with closing(open_damaged(self.folder)) as connection:
                for row in _salvage(connection):
                    rows.append(row)
                    if len(rows) == _CHUNK:
                        self.put(rows)
                        count, rows = count + len(rows), []
        except ForeignFile:
            return 0  # somebody else's: neither read nor removed
        except sqlite3.Error as error:
            log.info("nothing more can be read of the file that was set aside: %s", error)
        self.put(rows)
        for path in damaged_files(self.folder):
            path.unlink(missing_ok=True)
        return count + len(rows)

    def info(self) -> dict[str, Any]:
        """What there is, as plain data."""
        totals = self._read("SELECT count(*), coalesce(sum(size), 0) FROM uses", [])
        documents = self._read("SELECT count(DISTINCT owner) FROM documents", [])
        quarantined = self._read("SELECT count(*) FROM quarantine", [])
        path = self._file.path
        return {
            "folder": str(self.folder),
            "rows": totals[0][0] if totals else 0,
            "bytes": totals[0][1] if totals else 0,
            "file_bytes": path.stat().st_size if path.exists() else 0,
            "max_bytes": self._max_bytes,
            "documents": documents[0][0] if documents else 0,
            "quarantined": quarantined[0][0] if quarantined else 0,
            "set_aside": [path.name for path in damaged_files(self.folder)],
            "readonly": self.readonly,
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
        connection.executemany(
            "INSERT OR REPLACE INTO uses VALUES (?, ?, ?)", [(row.key, now, len(row.data)) for row in rows]
        )
        connection.executemany(
            "INSERT OR IGNORE INTO documents VALUES (?, ?)",
            [(owner, row.key) for row in rows for owner in row.owners],
        )
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
            for table in ("rows", "uses", "documents"):
                connection.execute(f"DELETE FROM {table} WHERE key IN {_marks(oldest)}", oldest)
            gone += len(oldest)
        return gone

    def _get(self, keys: Sequence[bytes]) -> dict[bytes, Row]:
        owners: dict[bytes, list[bytes]] = {}
        for key, owner in self._read(f"SELECT key, owner FROM documents WHERE key IN {_marks(keys)}", keys):
            owners.setdefault(key, []).append(owner)
        rows = self._read(f"SELECT key, data FROM rows WHERE key IN {_marks(keys)}", keys)
        return {key: Row(key, data, tuple(owners.get(key, ()))) for key, data in rows}

    def _read(self, statement: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        if time.monotonic() < self._resume:
            raise StoreError(f"the store {self.folder} was locked a moment ago and is left alone for now")
        try:
            return self._file.read(statement, values)
        except sqlite3.Error as error:
            kind = StoreError if is_circumstance(error) else _Unreadable
            if is_busy(error):
                self._resume = time.monotonic() + _PAUSE
            raise kind(f"the store {self.folder} cannot be read: {error}") from error


def _bytes_in_use(connection: sqlite3.Connection) -> int:
    pages, free, size = (
        connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * size)


def _salvage(connection: sqlite3.Connection) -> Iterator[Row]:
    """The rows of a damaged file, one by one, stepping over those that SQLite cannot read."""
    at, failures = 0, 0
    while failures < _HOPELESS:
        try:
            found = connection.execute(
                "SELECT rowid, key, data FROM rows WHERE rowid > ? ORDER BY rowid LIMIT 1", [at]
            ).fetchone()
        except sqlite3.Error:
            at, failures = at + 1, failures + 1
            continue
        if found is None:
            return
        (at, key, data), failures = found, 0
        with suppress(sqlite3.Error):  # a row whose owners are lost could never be forgotten: it stays behind
            owners = connection.execute("SELECT owner FROM documents WHERE key = ?", [key]).fetchall()
            yield Row(key, data, tuple(row[0] for row in owners))


def _marks(values: Sequence[Any]) -> str:
    return f"({','.join('?' * len(values))})"
