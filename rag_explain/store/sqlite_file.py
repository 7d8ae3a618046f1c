"""One SQLite file that several processes read and write, and that may be damaged or not a store at all.

The file lies in a folder of its own and is readable by its owner only. Connections are pooled, are never used across a
fork, and are closed when the file was replaced. A file that is damaged or is not a store is renamed (set aside), and a
new one begun: what it held can be computed again.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock

from rag_explain.errors import StoreError
from rag_explain.store.codec import MAX_BYTES

T = TypeVar("T")

log = logging.getLogger("rag_explain.store")

APPLICATION_ID = 0x52584631  # "RXF1"
SCHEMA_VERSION = 2
FILE = "factors.sqlite"
SET_ASIDE = "factors.sqlite.damaged"
_LOCK = "factors.lock"
_PAGE = 16_384
_POOL = 8
_READ_PATIENCE = 2.0  # seconds: after that, computing the factors is quicker than waiting for them
_BESIDE = ("-journal", "-wal", "-shm")  # what SQLite puts beside its file
_SCHEMA = {
    "rows": "CREATE TABLE rows (key BLOB PRIMARY KEY, data BLOB NOT NULL)",
    # Apart from the rows, because SQLite rewrites a whole row, with its data, to change one of its columns.
    "uses": "CREATE TABLE uses (key BLOB PRIMARY KEY, used INTEGER, size INTEGER) WITHOUT ROWID",
    "uses_by_age": "CREATE INDEX uses_by_age ON uses (used)",
    "documents": "CREATE TABLE documents (owner BLOB, key BLOB, PRIMARY KEY (owner, key)) WITHOUT ROWID",
    "documents_by_key": "CREATE INDEX documents_by_key ON documents (key)",
    "epoch": "CREATE TABLE epoch (value INTEGER NOT NULL)",
}
_PRAGMAS = ("trusted_schema=OFF", "cell_size_check=ON", "mmap_size=0", "secure_delete=ON", "synchronous=FULL")
_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_DAMAGE = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_UNREADABLE = _DAMAGE | {sqlite3.SQLITE_TOOBIG, 0}  # 0: Python could not make a value of it
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
    fields = [line.split(" ") for line in lines]
    kinds = {f"{one[1].rstrip('/')}/".replace("\\040", " "): one[2] for one in fields if len(one) > 2}
    above = [mount for mount in kinds if f"{folder.resolve()}/".startswith(mount)]
    return kinds[max(above, key=len)].startswith(_NETWORK) if above else False


class ForeignFile(sqlite3.DatabaseError):
    """The file is a healthy database, but not a store of this format."""


def is_busy(error: sqlite3.Error) -> bool:
    """Whether another process held the file for too long."""
    return _code(error) in _BUSY


def is_unreadable(error: sqlite3.Error) -> bool:
    """Whether what the file holds is the cause, rather than the machine or another process."""
    return _code(error) in _UNREADABLE


def _is_bad(error: sqlite3.Error) -> bool:
    """Whether the file as a whole is the cause, and should be set aside."""
    return isinstance(error, ForeignFile) or _code(error) in _DAMAGE


def _code(error: sqlite3.Error) -> int:
    """SQLite's primary result code, or 0 where Python raised without one."""
    return int(getattr(error, "sqlite_errorcode", 0) or 0) & 0xFF


class SqliteFile:
    """Pooled connections to `folder`/factors.sqlite. Raises `StoreError`; while reading, `sqlite3.Error` too.

    Args:
        timeout: seconds to wait for another process's write before giving up.
        journal: SQLite's journal mode; None chooses by version and filesystem.
        readonly: open only to read: no file and no folder is made.
    """

    def __init__(
        self, folder: str | Path, *, timeout: float = 10.0, journal: str | None = None, readonly: bool = False
    ) -> None:
        self.folder = Path(folder).absolute()
        self.path = self.folder / FILE
        self._timeout = timeout
        self._lock = threading.Lock()
        self._idle: list[sqlite3.Connection] = []
        self._inode: tuple[int, int] | None = None  # of the file that the idle connections have open
        self._pid = os.getpid()
        self._closed = False
        if not readonly:
            self._make_folder()
        self.writable = _writable(self.folder, self.path)
        self.readonly = readonly or not self.writable
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
        inode = _inode(self.path)
        with self._named_errors():
            try:
                return self._transaction(work)
            except sqlite3.Error as error:
                if not _is_bad(error):
                    raise
            self._prepare(bad=inode)
            return self._transaction(work)

    def _transaction(self, work: Callable[[sqlite3.Connection], T]) -> T:
        with self._connection() as connection:
            _patiently(connection, self._timeout, lambda: connection.execute("BEGIN IMMEDIATE"))
            connection.execute(f"PRAGMA busy_timeout={int(self._timeout * 1000)}")
            with connection:  # commits, or rolls back
                return work(connection)

    def give_back(self) -> None:
        """Return free pages to the filesystem."""
        with self._named_errors(), self._connection() as connection:
            # Not execute: it would take one step of a statement that frees one page per step.
            connection.executescript("PRAGMA incremental_vacuum")

    def empty_log(self) -> None:
        """Bring what a write-ahead log holds into the file and empty it: erased bytes must not stay."""
        with self._named_errors(), self._connection() as connection:
            busy = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        if busy:
            raise StoreError(f"readers kept the log of {self.folder} from being emptied: forget again later")

    def close(self) -> None:
        """Close the connections; those in use are closed when they come back."""
        with self._lock:
            self._closed = True
            self._drain()

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """SQLite's errors as `StoreError`, with the folder and what happened."""
        try:
            yield
        except sqlite3.Error as error:
            locked = f"stayed locked by another process for {self._timeout:g} s"
            raise StoreError(f"the store {self.folder} {locked if is_busy(error) else f'failed: {error}'}") from error

    # ------------------------------------------------------------------ connections

    @contextmanager
    def _connection(self, patience: float | None = None) -> Iterator[sqlite3.Connection]:
        connection, inode = self._take(self._timeout if patience is None else patience)
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        with self._lock:
            if not self._closed and inode == self._inode and self._pid == os.getpid() and len(self._idle) < _POOL:
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
            inode = _inode(self.path)
            if inode != self._inode:
                self._drain()
                self._inode = inode
            if self._idle:
                return self._idle.pop(), inode
        if inode is None and not self.readonly:
            self._prepare()  # the file was removed after this store was opened
            return self._take(patience)
        return self._open_readonly(patience) if self.readonly else _open(self.path, "mode=rw", patience), inode

    def _drain(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle = []

    def _open_readonly(self, patience: float) -> sqlite3.Connection:
        """A connection that makes no file, as SQLite does even to read a file in WAL mode.

        Without its log, such a file is complete, and no process is writing to it: it can be read as it lies there.
        """
        if not _in_wal_mode(self.path) or Path(f"{self.path}-wal").exists():
            try:
                return _open(self.path, "mode=ro", patience)
            except sqlite3.OperationalError as error:
                if is_busy(error):
                    raise
        return _open(self.path, "immutable=1", patience)

    # ------------------------------------------------------------------ making it, and setting it aside

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"a store is a folder, and {self.folder} cannot be made one: {error.strerror}") from error

    def _prepare(self, bad: tuple[int, int] | None = None) -> None:
        """Leave a store at `path`: make one where there is none, and where the file is bad or not a store.

        `bad` is the file that failed: another process may have replaced it since, and the new one must stay.
        """
        self._make_folder()
        try:
            # On a file of its own, never on the database, whose locks SQLite owns.
            with FileLock(self.folder / _LOCK, timeout=60, mode=0o600):
                if bad is not None and _inode(self.path) == bad:
                    self._set_aside("it cannot be read or written")
                try:
                    if self.path.exists():
                        self._adopt()
                except sqlite3.Error as error:
                    if not _is_bad(error):
                        raise
                    self._set_aside(str(error))
                if not self.path.exists():
                    self._create()
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"the store {self.folder} cannot be opened: {error}") from error

    def _adopt(self) -> None:
        """Check that the file is a store, and bring it into the journal mode."""
        with closing(_open(self.path, "mode=rw", self._timeout)) as connection:
            if connection.execute("PRAGMA journal_mode").fetchone()[0].upper() != self.journal:
                connection.execute("PRAGMA busy_timeout=500")
                with suppress(sqlite3.OperationalError):  # another process uses the file in its own mode: it may
                    connection.execute(f"PRAGMA journal_mode={self.journal}").fetchall()

    def _create(self) -> None:
        """Make the file under another name and rename it once it is complete: no process ever opens half of it."""
        new = self.folder / f"{FILE}.new"
        new.unlink(missing_ok=True)
        for suffix in _BESIDE:  # of a new file that was not finished, or of a file that was removed
            Path(f"{new}{suffix}").unlink(missing_ok=True)
            Path(f"{self.path}{suffix}").unlink(missing_ok=True)
        # What SQLite makes beside the file has the rights of the file.
        os.close(os.open(new, os.O_CREAT | os.O_EXCL, 0o600))
        with closing(_open(new, "mode=rw", self._timeout, check=False)) as connection:
            connection.execute(f"PRAGMA page_size={_PAGE}")
            connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
            connection.execute(f"PRAGMA journal_mode={self.journal}").fetchall()
            connection.execute("BEGIN IMMEDIATE")
            for statement in _SCHEMA.values():
                connection.execute(statement)
            connection.execute("INSERT INTO epoch VALUES (random())")
            connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
            connection.execute("COMMIT")
        os.replace(new, self.path)

    def _set_aside(self, reason: str) -> None:
        """Rename the file, in place of one that was set aside before."""
        with self._lock:
            self._drain()  # where open files cannot be renamed
        self.erase_set_aside()
        for suffix in ("", *_BESIDE):
            with suppress(FileNotFoundError):
                os.replace(f"{self.path}{suffix}", self.folder / f"{SET_ASIDE}{suffix}")
        log.warning("the store %s starts anew: %s; the old file is kept as %s", self.folder, reason, SET_ASIDE)

    def set_aside(self) -> list[Path]:
        """The file that was set aside in this folder, with what SQLite had put beside it."""
        return [path for suffix in ("", *_BESIDE) if (path := self.folder / f"{SET_ASIDE}{suffix}").exists()]

    def erase_set_aside(self) -> None:
        """Remove what was set aside."""
        for path in self.set_aside():
            path.unlink(missing_ok=True)


def _open(path: Path, options: str, timeout: float, *, check: bool = True) -> sqlite3.Connection:
    """A connection to a file that was checked to be a store, unless it is a new one."""
    connection = sqlite3.connect(
        f"{path.as_uri()}?{options}", timeout=timeout, uri=True, isolation_level=None, check_same_thread=False
    )
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


def _patiently(connection: sqlite3.Connection, seconds: float, call: Callable[[], T]) -> T:
    """`call`, tried every 15 ms while other processes hold the file: SQLite's own naps grow, and miss the gaps."""
    connection.execute("PRAGMA busy_timeout=15")
    deadline = time.monotonic() + seconds
    while True:
        try:
            return call()
        except sqlite3.Error as error:
            if not is_busy(error) or time.monotonic() > deadline:
                raise


def _check(connection: sqlite3.Connection) -> None:
    """Refuse a database that holds anything but a store's own tables: no trigger and no view is ever run."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        raise ForeignFile("it is not a store of rag_explain")
    if version > SCHEMA_VERSION:
        raise StoreError(f"the store was made by a newer rag_explain (format {version}): update, or give another path")
    if version < SCHEMA_VERSION:
        raise ForeignFile(f"it was made by an older rag_explain (format {version})")
    found = {
        name: sql
        for kind, name, sql in connection.execute("SELECT type, name, sql FROM sqlite_master")
        if not (kind in ("table", "index") and isinstance(name, str) and name.startswith("sqlite_"))
    }
    if found != _SCHEMA:
        odd = sorted(map(str, found.keys() ^ _SCHEMA.keys())) or ["a changed table"]
        raise ForeignFile(f"its schema is not that of a store: {', '.join(odd)[:200]}")


def _writable(folder: Path, path: Path) -> bool:
    effective = os.access in os.supports_effective_ids
    return all(os.access(p, os.W_OK, effective_ids=effective) for p in (folder, path) if p == folder or p.exists())


def _in_wal_mode(path: Path) -> bool:
    """By the file's header. Closing the file drops this process's own locks on it: ask only where it cannot write."""
    try:
        with open(path, "rb") as file:
            return file.read(20)[18:] == b"\2\2"
    except OSError:
        return False  # SQLite will say what is wrong with it


def _inode(path: Path) -> tuple[int, int] | None:
    """Device and inode, which tell a file from another one that took its name."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino
