"""One SQLite file that several processes read and write, that may be damaged, and that may not be ours.

The file lives in a folder of its own, so that a damaged one can be set aside without touching anything of the
caller's. Connections are pooled, never cross a fork, and notice when the file under them was replaced.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from rag_explain.errors import StoreError
from rag_explain.store.codec import MAX_BYTES

T = TypeVar("T")

log = logging.getLogger(__name__)

APPLICATION_ID = 0x52584631  # "RXF1"
SCHEMA_VERSION = 1
FILE = "factors.sqlite"
DAMAGED = "factors.sqlite.damaged"
_LOCK = "factors.lock"
_PAGE = 16_384
_POOL = 8
_READ_PATIENCE = 2.0  # seconds: whoever searches would rather compute than wait
_SUFFIXES = ("", "-journal", "-wal", "-shm")
_SCHEMA = {
    "rows": "CREATE TABLE rows (key BLOB PRIMARY KEY, data BLOB NOT NULL)",
    # Apart from the rows, because SQLite rewrites a whole row, with its data, to change one of its columns.
    "uses": "CREATE TABLE uses (key BLOB PRIMARY KEY, used INTEGER, size INTEGER) WITHOUT ROWID",
    "uses_by_age": "CREATE INDEX uses_by_age ON uses (used)",
    "documents": "CREATE TABLE documents (owner BLOB, key BLOB, PRIMARY KEY (owner, key)) WITHOUT ROWID",
    "documents_by_key": "CREATE INDEX documents_by_key ON documents (key)",
    "quarantine": "CREATE TABLE quarantine (key BLOB PRIMARY KEY, data BLOB, reason TEXT, found INTEGER)",
    "state": "CREATE TABLE state (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
}
_PRAGMAS = ("trusted_schema=OFF", "cell_size_check=ON", "mmap_size=0", "secure_delete=ON", "synchronous=FULL")
_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_CIRCUMSTANCES = _BUSY | {
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_PROTOCOL,
    sqlite3.SQLITE_READONLY,
}
_DAMAGE = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_NETWORK = ("nfs", "cifs", "smb", "9p", "fuse", "lustre", "ceph", "afs", "gpfs", "beegfs", "glusterfs")
_inherited: list[object] = []  # connections of a parent process: closing them here would drop its locks


def journal_mode(version: tuple[int, ...] = sqlite3.sqlite_version_info, *, network: bool = False) -> str:
    """WAL where its reset bug is fixed (3.51.3, 3.50.7, 3.44.6), and never on a network filesystem."""
    fixed = version >= (3, 51, 3) or (3, 50, 7) <= version < (3, 51) or (3, 44, 6) <= version < (3, 45)
    return "WAL" if fixed and not network else "DELETE"


def on_network(folder: Path, mounts: str = "/proc/self/mounts") -> bool:
    """Whether `folder` lies on a network filesystem, as far as the system tells."""
    try:
        lines = Path(mounts).read_text("utf-8", "replace").splitlines()
    except OSError:
        return False
    place = str(folder.resolve())
    best, kind = -1, ""
    for line in lines:
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        mount = fields[1].replace("\\040", " ")
        if len(mount) > best and (place == mount or place.startswith(mount.rstrip("/") + "/")):
            best, kind = len(mount), fields[2]
    return kind.startswith(_NETWORK)


def error_code(error: sqlite3.Error) -> int:
    """SQLite's primary result code, or 0 where Python raised without one."""
    return int(getattr(error, "sqlite_errorcode", 0) or 0) & 0xFF


class ForeignFile(sqlite3.DatabaseError):
    """The file is a healthy database, but not one that this library made."""


def is_busy(error: sqlite3.Error) -> bool:
    """Whether another process held the file for too long."""
    return error_code(error) in _BUSY


def is_circumstance(error: sqlite3.Error) -> bool:
    """Whether the machine or another process is to blame, rather than what the file holds."""
    return error_code(error) in _CIRCUMSTANCES


def at_fault(error: sqlite3.Error) -> bool:
    """Whether the file as a whole is to blame, and should be set aside."""
    return isinstance(error, ForeignFile) or error_code(error) in _DAMAGE


class SqliteFile:
    """Pooled connections to `folder`/factors.sqlite. Raises `StoreError`; while reading, `sqlite3.Error` too.

    Args:
        timeout: seconds to wait for another process's write before giving up.
        journal: SQLite's journal mode; None chooses by version and filesystem.
    """

    def __init__(self, folder: str | Path, *, timeout: float = 10.0, journal: str | None = None) -> None:
        self.folder = Path(folder).absolute()
        self.path = self.folder / FILE
        self._timeout = timeout
        self._lock = threading.Lock()
        self._idle: list[sqlite3.Connection] = []
        self._inode: tuple[int, int] | None = None  # device and inode that the idle connections have open
        self._pid = os.getpid()
        self._closed = False
        if self.folder.exists() and not self.folder.is_dir():
            raise StoreError(f"{self.folder} is a file: a store is a folder, give the path of one or of a new one")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"the store's folder cannot be made: {error}") from error
        self.readonly = not _writable(self.folder, self.path)
        self.journal = journal or journal_mode(network=on_network(self.folder))
        if not self.readonly:
            self._prepare()

    # ------------------------------------------------------------------ using it

    def read(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """What a SELECT finds; nothing where a read-only store has no file."""
        if self.readonly and not self.path.exists():
            return []
        with self._connection(min(self._timeout, _READ_PATIENCE)) as connection:
            return _patiently(connection, _READ_PATIENCE, lambda: connection.execute(statement, values).fetchall())

    def write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """`work` inside a write transaction: all of it is on disk when this returns, or none of it.

        A file that turns out to be damaged is set aside, and the work is done on a new one.
        """
        if self.readonly:
            raise StoreError(f"the store {self.folder} cannot be written to")
        file = _identity(self.path)
        try:
            try:
                return self._transaction(work)
            except sqlite3.Error as error:
                if not at_fault(error):
                    raise
                self._prepare(bad=file)
                return self._transaction(work)
        except sqlite3.Error as error:
            if is_busy(error):
                reason = f"stayed locked by another process for {self._timeout:g} s"
            else:
                reason = f"failed: {error}"
            raise StoreError(f"the store {self.folder} {reason}") from error

    def _transaction(self, work: Callable[[sqlite3.Connection], T]) -> T:
        with self._connection() as connection:
            _patiently(connection, self._timeout, lambda: connection.execute("BEGIN IMMEDIATE"))
            connection.execute(f"PRAGMA busy_timeout={int(self._timeout * 1000)}")
            try:
                result = work(connection)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    with suppress(sqlite3.Error):  # the first error says what happened; closing rolls back as well
                        connection.execute("ROLLBACK")
                raise
            return result

    def give_back(self) -> None:
        """Return free pages to the filesystem."""
        try:
            with self._connection() as connection:
                # Not execute: it would take one step of a statement that frees one page per step.
                connection.executescript("PRAGMA incremental_vacuum")
        except sqlite3.Error as error:
            raise StoreError(f"the store {self.folder} failed: {error}") from error

    def empty_log(self) -> None:
        """Bring what a write-ahead log holds into the file and empty it: erased bytes must not stay."""
        try:
            with self._connection() as connection:
                busy = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        except sqlite3.Error as error:
            raise StoreError(f"the store {self.folder} failed: {error}") from error
        if busy:
            raise StoreError(f"readers kept the log of {self.folder} from being emptied: forget again later")

    def close(self) -> None:
        """Close the connections; those in use are closed when they come back."""
        with self._lock:
            self._closed = True
            self._drain()

    # ------------------------------------------------------------------ connections

    @contextmanager
    def _connection(self, patience: float | None = None) -> Iterator[sqlite3.Connection]:
        connection, file = self._take(self._timeout if patience is None else patience)
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        with self._lock:
            if not self._closed and file == self._inode and self._pid == os.getpid() and len(self._idle) < _POOL:
                self._idle.append(connection)
                return
        connection.close()

    def _take(self, patience: float) -> tuple[sqlite3.Connection, tuple[int, int] | None]:
        with self._lock:
            if self._closed:
                raise StoreError(f"the store {self.folder} is closed")
            if self._pid != os.getpid():
                _inherited.extend(self._idle)
                self._idle, self._pid = [], os.getpid()
            file = _identity(self.path)
            if file != self._inode:
                self._drain()
                self._inode = file
            if self._idle:
                return self._idle.pop(), file
        if file is None and not self.readonly:
            self._prepare()  # somebody removed the file while we ran
            return self._take(patience)
        return self._connect(patience), file

    def _drain(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle = []

    def _connect(self, patience: float) -> sqlite3.Connection:
        """A connection to a file that has been seen to be ours."""
        if not self.readonly:
            connection = _open(self.path, "mode=rw", patience)
        else:
            try:
                connection = _open(self.path, "mode=ro", patience)
            except sqlite3.OperationalError:
                # WAL wants to write beside the file even to read it; here nobody else can write either.
                connection = _open(self.path, "immutable=1", patience)
        try:
            _check(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    # ------------------------------------------------------------------ making it, and setting it aside

    def _prepare(self, bad: tuple[int, int] | None = None) -> None:
        """Leave a file of ours at `path`: make one where there is none, set aside what is bad or not ours.

        `bad` is the file that failed: another process may have replaced it by now, and the new one must stay.
        """
        try:
            with _locked(self.folder / _LOCK):
                if bad is not None and _identity(self.path) == bad:
                    self._set_aside("it cannot be read or written")
                try:
                    self._create()
                except sqlite3.Error as error:
                    if not at_fault(error):
                        raise
                    self._set_aside(str(error))
                    self._create()
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"the store {self.folder} cannot be opened: {error}") from error

    def _create(self) -> None:
        """Open the file, or make it. Nobody else makes it meanwhile: we hold the lock."""
        with closing(_open(self.path, "mode=rwc", self._timeout)) as connection:
            new = _empty(connection)
            if new:
                connection.execute(f"PRAGMA page_size={_PAGE}")
                connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
            if connection.execute("PRAGMA journal_mode").fetchone()[0].upper() != self.journal:
                connection.execute("PRAGMA busy_timeout=500")
                with suppress(sqlite3.OperationalError):  # another process uses it in its own mode: that one serves
                    connection.execute(f"PRAGMA journal_mode={self.journal}").fetchall()
                connection.execute(f"PRAGMA busy_timeout={int(self._timeout * 1000)}")
            if new:
                connection.execute("BEGIN IMMEDIATE")
                for statement in _SCHEMA.values():
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
                connection.execute("COMMIT")
            _check(connection)

    def _set_aside(self, reason: str) -> None:
        for suffix in _SUFFIXES:
            with suppress(FileNotFoundError):
                os.replace(f"{self.path}{suffix}", self.folder / f"{DAMAGED}{suffix}")
        log.warning(
            "the store %s was damaged (%s) and starts anew; the old file is kept as %s: "
            "`rag-explain store verify` takes over what can still be read",
            *(self.folder, reason, DAMAGED),
        )


def damaged_files(folder: Path) -> list[Path]:
    """What was set aside in this folder."""
    return [path for suffix in _SUFFIXES if (path := folder / f"{DAMAGED}{suffix}").exists()]


def open_damaged(folder: Path) -> sqlite3.Connection:
    """The file that was set aside, to be read as far as it goes."""
    # SQLite refuses a file that is shorter than its header says, unless its schema may be repaired.
    connection = _open(folder / DAMAGED, "mode=rw", 5.0, "writable_schema=ON", "query_only=ON")
    try:
        _check(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _open(path: Path, options: str, timeout: float, *first: str) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"{path.as_uri()}?{options}", timeout=timeout, uri=True, isolation_level=None, check_same_thread=False
    )
    # The file may be hostile: its schema runs nothing, and no declared length makes us allocate more than a
    # row may have.
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_BYTES)
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    connection.setlimit(sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH, 0)
    try:
        for pragma in (*first, *_PRAGMAS):
            connection.execute(f"PRAGMA {pragma}").fetchall()
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()  # now, not later, it has to be readable
    except BaseException:
        connection.close()
        raise
    return connection


def _patiently(connection: sqlite3.Connection, seconds: float, call: Callable[[], T]) -> T:
    """`call`, as soon as other processes let it: in short naps, since SQLite's own sleep through the gaps."""
    connection.execute("PRAGMA busy_timeout=15")
    deadline = time.monotonic() + seconds
    while True:
        try:
            return call()
        except sqlite3.Error as error:
            if not is_busy(error) or time.monotonic() > deadline:
                raise


def _check(connection: sqlite3.Connection) -> None:
    """Refuse a database that holds anything but our own tables: no trigger and no view is ever run."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        raise ForeignFile("it is not a store of rag_explain")
    if version > SCHEMA_VERSION:
        raise StoreError(f"the store was made by a newer rag_explain (format {version}): update, or give another path")
    found = {
        name: sql
        for kind, name, sql in connection.execute("SELECT type, name, sql FROM sqlite_master")
        if not (kind in ("table", "index") and isinstance(name, str) and name.startswith("sqlite_"))
    }
    if found != _SCHEMA:
        odd = sorted(map(str, found.keys() ^ _SCHEMA.keys())) or ["a changed table"]
        raise ForeignFile(f"its schema is not that of a store: {', '.join(odd)[:200]}")


def _empty(connection: sqlite3.Connection) -> bool:
    return bool(connection.execute("SELECT count(*) = 0 FROM sqlite_master").fetchone()[0])


def _writable(folder: Path, path: Path) -> bool:
    effective = os.access in os.supports_effective_ids
    return all(os.access(p, os.W_OK, effective_ids=effective) for p in (folder, path) if p == folder or p.exists())


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock between processes, on a file of its own: never on the database, whose locks SQLite owns."""
    with open(path, "a") as file:
        deadline = time.monotonic() + 60
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise StoreError(f"{path} stayed locked by another process for 60 s") from None
                time.sleep(0.02)
        yield
