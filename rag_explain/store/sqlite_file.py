"""One SQLite file that several processes read and write, and that may be damaged or not a store at all.

The file lies in a folder of its own and is readable by its owner only. It is opened and checked for each use, in
0.2 ms: no connection outlives a fork or a file that was replaced. A file that is damaged or is not a store is renamed
(set aside), and a new one begun: what it held can be computed again.
"""

import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import TypeVar

from filelock import FileLock

from rag_explain.errors import StoreError, in_words
from rag_explain.store.codec import MAX_BYTES

T = TypeVar("T")

log = logging.getLogger("rag_explain.store")

_APPLICATION_ID = 0x52584631  # "RXF1"
_SCHEMA_VERSION = 3
_FILE = "factors.sqlite"
_SET_ASIDE = "factors.sqlite.damaged"
_LOCK = "factors.lock"
_READ_PATIENCE = 2.0  # seconds: after that, computing the factors is quicker than waiting for them
_PAUSE = 10.0  # seconds for which a file that stayed locked is not read again
_NAP = 0.015  # seconds between two attempts at a locked file: SQLite's own naps grow, and miss the gaps
_SCHEMA = {
    "rows": "CREATE TABLE rows (key BLOB PRIMARY KEY, data BLOB NOT NULL)",
    # Apart from the rows, because SQLite rewrites a whole row, with its data, to change one of its columns.
    "uses": "CREATE TABLE uses (key BLOB PRIMARY KEY, used INTEGER, size INTEGER) WITHOUT ROWID",
    "uses_by_age": "CREATE INDEX uses_by_age ON uses (used)",
    "documents": "CREATE TABLE documents (owner BLOB, key BLOB, PRIMARY KEY (owner, key)) WITHOUT ROWID",
    "documents_by_key": "CREATE INDEX documents_by_key ON documents (key)",
    "models": "CREATE TABLE models (fingerprint TEXT, name TEXT, data BLOB, PRIMARY KEY (fingerprint, name))",
    "epoch": "CREATE TABLE epoch (value INTEGER NOT NULL)",
}
# All that a file holds but the indexes that SQLite makes for itself.
_FOUND = "SELECT name, sql FROM sqlite_master WHERE (type IN ('table', 'index') AND name GLOB 'sqlite_*') IS NOT TRUE"
_NEW = f"""
    PRAGMA page_size=16384; PRAGMA auto_vacuum=INCREMENTAL;
    BEGIN IMMEDIATE;
    {"; ".join(_SCHEMA.values())};
    INSERT INTO epoch VALUES (random());
    PRAGMA application_id={_APPLICATION_ID}; PRAGMA user_version={_SCHEMA_VERSION};
    COMMIT;
"""
_PRAGMAS = ("trusted_schema=OFF", "cell_size_check=ON", "mmap_size=0", "secure_delete=ON", "synchronous=FULL")
_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_DAMAGE = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}  # the file as a whole is set aside


class ForeignFile(sqlite3.DatabaseError):
    """The file is a healthy database, but not a store of this format."""

    sqlite_errorcode = sqlite3.SQLITE_NOTADB


def is_unreadable(error: sqlite3.Error) -> bool:
    """Whether what the file holds is the cause, rather than the machine or another process."""
    return _code(error) in _DAMAGE | {sqlite3.SQLITE_TOOBIG, 0}  # 0: Python could not make a value of it


def _code(error: sqlite3.Error) -> int:
    """SQLite's primary result code, or 0 where Python raised without one."""
    return int(getattr(error, "sqlite_errorcode", 0) or 0) & 0xFF


class SqliteFile:
    """The file `folder`/factors.sqlite, with the arguments of `Disk`. Trouble with it is a `StoreError`."""

    def __init__(self, folder: str | Path, *, timeout: float = 10.0, readonly: bool = False) -> None:
        self.folder = Path(folder).absolute()
        self.path = self.folder / _FILE
        self.set_aside = self.folder / _SET_ASIDE
        self._timeout = timeout
        self._resume = 0.0
        self._closed = False
        if not readonly:
            self._make_folder()
        effective = os.access in os.supports_effective_ids
        with in_words(StoreError, f"the store {self.folder} cannot be opened"):  # by a user who may not look into it
            paths = [self.folder, *filter(Path.exists, [self.path])]
        self.writable = all(os.access(path, os.W_OK, effective_ids=effective) for path in paths)
        self.readonly = readonly or not self.writable
        if not self.readonly:
            self._prepare()

    def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """`work` on one state of the file, which no other process changes meanwhile."""
        if time.monotonic() < self._resume:
            raise StoreError(f"the store {self.folder} was locked a moment ago and is left alone for now")
        with self._named_errors("cannot be read", pause=_PAUSE):
            return self._patiently(min(self._timeout, _READ_PATIENCE), work, "BEGIN")

    def write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """`work` inside a write transaction: all of it is on disk when this returns, or none of it.

        A file that turns out to be damaged is set aside, and the work is done on a new one.
        """
        if self.readonly:
            raise StoreError(f"the store {self.folder} cannot be written to")
        patience = f"PRAGMA busy_timeout={int(self._timeout * 1000)}"  # for the readers to finish
        attempt = partial(self._patiently, self._timeout, work, "BEGIN IMMEDIATE", patience)
        inode = _inode(self.path)
        with self._named_errors("failed"):
            try:
                return attempt()
            except sqlite3.Error as error:
                if _code(error) not in _DAMAGE:
                    raise
                self._prepare(bad=inode)
            return attempt()

    def close(self) -> None:
        """Refuse every further use."""
        self._closed = True

    @contextmanager
    def _named_errors(self, trouble: str, pause: float = 0.0) -> Iterator[None]:
        """SQLite's errors as `StoreError`, with the folder and what happened; a locked file is not read for a pause."""
        try:
            yield
        except sqlite3.Error as error:
            trouble += f": {error}"
            if _code(error) in _BUSY:
                trouble = "stayed locked by another process"
                self._resume = max(self._resume, time.monotonic() + pause)
            raise StoreError(f"the store {self.folder} {trouble}") from error

    def _patiently(self, seconds: float, work: Callable[[sqlite3.Connection], T], *begin: str) -> T:
        """`work` in a transaction on a connection of its own, tried again while other processes hold the file."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                with self._connection() as connection, connection:  # commits, or rolls back
                    for statement in begin:
                        connection.execute(statement)
                    return work(connection)
            except sqlite3.Error as error:
                if _code(error) not in _BUSY or time.monotonic() > deadline:
                    raise

    def _connection(self) -> closing[sqlite3.Connection]:
        if self._closed:
            raise StoreError(f"the store {self.folder} is closed")
        if not self.readonly:
            if not self.path.exists():  # it was removed after this store was opened
                self._prepare()
            return closing(_open(self.path.as_uri() + "?mode=rw"))
        if not self.path.exists():
            empty = _open("file::memory:", check=False)
            empty.executescript(";".join(_SCHEMA.values()))
            return closing(empty)
        try:
            return closing(_open(self.path.as_uri() + "?mode=ro"))
        except sqlite3.OperationalError as error:
            if _code(error) in _BUSY:
                raise
        # A killed process left a journal, which only a writer may play back: what it had half written will not decode.
        return closing(_open(self.path.as_uri() + "?immutable=1"))

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"a store is a folder, and {self.folder} cannot be made one: {error.strerror}") from error

    def _prepare(self, bad: int | None = None) -> None:
        """Leave a store at `path`: make one where there is none, and where the file is bad or not a store.

        `bad` is the file that failed: another process may have replaced it since, and the new one must stay.
        """
        self._make_folder()
        try:
            # On a file of its own, never on the database, whose locks SQLite owns.
            with FileLock(self.folder / _LOCK, timeout=60, mode=0o600):
                if self.path.exists():
                    self._adopt(bad)
                if not self.path.exists():
                    self._create()
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"the store {self.folder} cannot be opened: {error}") from error

    def _adopt(self, bad: int | None) -> None:
        """Check that the file is a store. If it has a write-ahead log, which would keep erased bytes, that goes."""
        try:
            if bad is not None and _inode(self.path) == bad:
                raise ForeignFile("it cannot be read or written")
            connection = _open(self.path.as_uri() + "?mode=rw", self._timeout)
            with closing(connection), suppress(sqlite3.OperationalError):  # another process is using the file: as it is
                connection.execute("PRAGMA journal_mode=DELETE").fetchall()
        except sqlite3.Error as error:
            if _code(error) not in _DAMAGE:
                raise
            os.replace(self.path, self.set_aside)
            log.warning("the store %s starts anew: %s; the old file is kept as %s", self.folder, error, _SET_ASIDE)

    def _create(self) -> None:
        """Make the file under another name and rename it once it is complete: no process ever opens half of it."""
        new = self.folder / f"{_FILE}.new"
        # Of a new file that was not finished, or of a file that was removed or set aside.
        for path, suffix in product((new, self.path), ("", "-journal", "-wal", "-shm")):
            Path(f"{path}{suffix}").unlink(missing_ok=True)
        # What SQLite makes beside the file has the rights of the file.
        os.close(os.open(new, os.O_CREAT | os.O_EXCL, 0o600))
        with closing(_open(new.as_uri() + "?mode=rw", check=False)) as connection:
            connection.executescript(_NEW)
        os.replace(new, self.path)


def _open(uri: str, timeout: float = _NAP, *, check: bool = True) -> sqlite3.Connection:
    """A connection to a file that was checked to be a store, unless it is a new one."""
    connection = sqlite3.connect(uri, timeout=timeout, uri=True, isolation_level=None)
    # The file may be hostile: its schema runs nothing, and no length in it makes SQLite allocate more than a row has.
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_BYTES)
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    connection.setlimit(sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH, 0)
    try:
        for pragma in _PRAGMAS:
            connection.execute(f"PRAGMA {pragma}").fetchall()
        if check:
            _check(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _check(connection: sqlite3.Connection) -> None:
    """Refuse a database that holds anything but a store's own tables: no trigger and no view is ever run."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if connection.execute("PRAGMA application_id").fetchone()[0] != _APPLICATION_ID:
        raise ForeignFile("it is not a store of rag_explain")
    if version > _SCHEMA_VERSION:
        raise StoreError(f"the store was made by a newer rag_explain (format {version}): update, or give another path")
    if version < _SCHEMA_VERSION:
        raise ForeignFile(f"it was made by an older rag_explain (format {version})")
    found = dict(connection.execute(_FOUND))
    if found != _SCHEMA:
        odd = sorted(map(str, found.keys() ^ _SCHEMA.keys())) or ["a changed table"]
        raise ForeignFile(f"its schema is not that of a store: {', '.join(odd)[:200]}")


def _inode(path: Path) -> int | None:
    """The number that tells a file from another one that took its name."""
    with suppress(OSError):
        return os.stat(path).st_ino
    return None
