"""The disk tier: rows of bytes in one SQLite file, shared by processes, within a size limit.

A row is on disk when `put` returns. Deleted bytes are overwritten with zeros.
"""

import sqlite3
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rag_explain.errors import StoreError
from rag_explain.store.sqlite_file import SqliteFile, is_unreadable
from rag_explain.store.tier import Row, Tier

DEFAULT_DISK_BYTES = 10 * 2**30
_EVICTED = 200  # rows that are dropped between two looks at the file's size
_SCANNED = 16  # rows that are in memory at a time while all are read
_TOUCHES = 10_000  # uses remembered between two writes
_BYTES_IN_USE = (
    "SELECT (page_count - freelist_count) * page_size FROM pragma_page_count, pragma_freelist_count, pragma_page_size"
)


class Disk(Tier):
    """Rows in `folder`/factors.sqlite. Those used longest ago go when the file would grow beyond `max_bytes`.

    `timeout` is in seconds, for other processes' writes. With `readonly` nothing is made or changed in the folder.
    """

    name = "disk"

    def __init__(
        self, folder: str | Path, *, max_bytes: int = DEFAULT_DISK_BYTES, timeout: float = 10.0, readonly: bool = False
    ) -> None:
        self._file = SqliteFile(folder, timeout=timeout, readonly=readonly)
        self.folder = self._file.folder
        self.readonly = self._file.readonly
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._touched: dict[bytes, int] = {}  # rows that were read since the last write, and when

    def has(self, keys: Sequence[bytes]) -> set[bytes]:
        return set(self._select("SELECT key FROM uses WHERE key = ?", keys))

    def get(self, keys: Sequence[bytes]) -> dict[bytes, Row]:
        found = self._get(keys)
        with self._lock:
            if len(self._touched) < _TOUCHES:
                self._touched |= dict.fromkeys(found, int(time.time() * 1000))
        return found

    def put(self, rows: Sequence[Row]) -> None:
        """Write the rows in one transaction."""

        def insert(connection: sqlite3.Connection) -> None:
            connection.executemany("INSERT OR REPLACE INTO rows VALUES (?, ?)", [(row.key, row.data) for row in rows])
            uses = [(row.key, int(time.time() * 1000), len(row.data)) for row in rows]
            connection.executemany("INSERT OR REPLACE INTO uses VALUES (?, ?, ?)", uses)
            owned = [(owner, row.key) for row in rows for owner in row.owners]
            connection.executemany("INSERT OR IGNORE INTO documents VALUES (?, ?)", owned)
            self._touch(connection)
            _evict(connection, self._max_bytes)

        self._file.write(insert)

    def link(self, links: Sequence[tuple[bytes, Sequence[bytes]]]) -> None:
        known = "SELECT 1 FROM documents WHERE owner = ? AND key = ?"
        insert = "INSERT OR IGNORE INTO documents SELECT ?, key FROM uses WHERE key = ?"
        pairs = [(owner, key) for key, owners in links for owner in owners]
        new = self._file.read(lambda c: [pair for pair in pairs if not c.execute(known, pair).fetchone()])
        if new:  # a look is much cheaper than a write that changes nothing
            self._file.write(lambda connection: connection.executemany(insert, new))

    def delete(self, key: bytes) -> None:
        self._file.write(lambda connection: _delete(connection, [key], "rows", "uses"))

    def owned_by(self, owners: Sequence[bytes]) -> set[bytes]:
        return set(self._select("SELECT key FROM documents WHERE owner = ?", owners))

    def forget(self, owners: Sequence[bytes], keys: Collection[bytes]) -> None:
        """Erase these rows, and any file that was set aside: it might hold them too."""

        def erase(connection: sqlite3.Connection) -> None:
            self._touch(connection)  # these keys are not remembered either
            _delete(connection, keys, "rows", "uses", "documents")
            connection.executemany("DELETE FROM documents WHERE owner = ?", [(owner,) for owner in owners])
            connection.execute("UPDATE epoch SET value = random()")

        self._file.write(erase)
        self._file.set_aside.unlink(missing_ok=True)
        left = self.has(list(keys)) | self.owned_by(owners)
        if left:
            raise StoreError(f"{len(left)} rows came back while they were being erased: forget them again")

    def probes(self, fingerprint: str) -> list[bytes]:
        return self._select("SELECT data FROM models WHERE fingerprint = ?", [fingerprint])

    def add_probes(self, fingerprint: str, name: str, data: bytes) -> None:
        insert = "INSERT OR IGNORE INTO models VALUES (?, ?, ?)"
        self._file.write(lambda connection: connection.execute(insert, (fingerprint, name, data)))

    def epoch(self) -> object:
        """Something that changes whenever a process forgets anything here, and when the file begins anew."""
        return self._file.read(lambda connection: connection.execute("SELECT value FROM epoch LIMIT 1").fetchall())

    def prune(self, max_bytes: int) -> int:
        """Drop the rows that were used longest ago, and give the space back to the filesystem; how many went."""
        gone = self._file.write(lambda connection: _evict(connection, max_bytes))
        # Not execute: it would take one step of a statement that frees one page per step.
        self._file.write(lambda connection: connection.executescript("PRAGMA incremental_vacuum"))
        return gone

    def scan(self) -> Iterator[Row]:
        following = f"SELECT key FROM uses WHERE key > ? ORDER BY key LIMIT {_SCANNED}"
        last = b""
        while keys := self._select(following, [last]):
            rows = self._get(keys)
            yield from (rows.get(key, Row(key, b"")) for key in keys)
            last = keys[-1]

    def info(self) -> dict[str, Any]:
        counts = "SELECT count(*), coalesce(sum(size), 0), (SELECT count(DISTINCT owner) FROM documents) FROM uses"
        rows, size, documents = self._file.read(lambda connection: connection.execute(counts).fetchone())
        path, set_aside = self._file.path, self._file.set_aside
        return {
            "folder": str(self.folder),
            "rows": rows,
            "bytes": size,
            "file_bytes": path.stat().st_size if path.exists() else 0,
            "max_bytes": self._max_bytes,
            "documents": documents,
            "set_aside": [set_aside.name] if set_aside.exists() else [],
            "readonly": not self._file.writable,
        }

    def close(self) -> None:
        """Write down when rows were last used."""
        if self._touched and not self.readonly:
            with suppress(StoreError):  # nothing is lost but the order in which rows are dropped
                self._file.write(self._touch)
        self._file.close()

    def _touch(self, connection: sqlite3.Connection) -> None:
        with self._lock:
            touched, self._touched = self._touched, {}
        connection.executemany("UPDATE uses SET used = ? WHERE key = ?", [(at, key) for key, at in touched.items()])

    def _get(self, keys: Sequence[bytes]) -> dict[bytes, Row]:
        def select(connection: sqlite3.Connection) -> dict[bytes, Row]:
            return {key: row for key in keys if (row := _row(connection, key)) is not None}

        return self._file.read(select)

    def _select(self, statement: str, values: Iterable[bytes | str]) -> list[bytes]:
        """What a SELECT of one column finds for each of these values."""
        return self._file.read(lambda c: [found for value in values for (found,) in c.execute(statement, [value])])


def _row(connection: sqlite3.Connection, key: bytes) -> Row | None:
    """The row under a key; without data if SQLite cannot read it, to be found damaged."""
    try:
        found = connection.execute("SELECT data FROM rows WHERE key = ?", [key]).fetchone()
        owners = connection.execute("SELECT owner FROM documents WHERE key = ?", [key]).fetchall()
    except sqlite3.Error as error:
        if not is_unreadable(error):
            raise
        return Row(key, b"")
    return None if found is None else Row(key, found[0], tuple(owner for (owner,) in owners))


def _delete(connection: sqlite3.Connection, keys: Iterable[bytes], *tables: str) -> None:
    for table in tables:
        connection.executemany(f"DELETE FROM {table} WHERE key = ?", [(key,) for key in keys])


def _evict(connection: sqlite3.Connection, max_bytes: int) -> int:
    """Drop the rows used longest ago until the pages in use take at most `max_bytes`; how many went."""
    gone = 0
    while (excess := connection.execute(_BYTES_IN_USE).fetchone()[0] - max_bytes) > 0:
        oldest: list[bytes] = []
        for key, size in connection.execute("SELECT key, size FROM uses ORDER BY used, key LIMIT ?", [_EVICTED]):
            oldest.append(key)
            excess -= size
            if excess <= 0:
                break
        if not oldest:
            break
        _delete(connection, oldest, "rows", "uses", "documents")
        gone += len(oldest)
    return gone
