"""The folder of a log: one file that grows, sealed ones beside it, and a lock that keeps processes apart.

    log.jsonl                                    the file that grows
    log-20261116T030000.123456Z-1a2b.jsonl.gz    sealed: nobody appends to it any more
    log.lock                                     held while appending, sealing and erasing

An append is one write at the end, synced. One that fails is cut off again; one that was killed leaves a piece of a
line, which its digest gives away (see `record.whole`), and the next append starts on a new line. Sealing, compressing
and erasing write a new file, sync it and rename it: at every moment each record is there exactly once, or erased.
"""

from __future__ import annotations

import fcntl
import gzip
import io
import logging
import os
import secrets
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from rag_explain.errors import FormatError, LogError
from rag_explain.log.record import head, whole

_LOGGER = logging.getLogger(__name__)
_CURRENT = "log.jsonl"
_TIME = "%Y%m%dT%H%M%S.%fZ"
_LOCK_SECONDS = 30.0
_CHUNK = 1 << 20


class Folder:
    """Where a log lives.

    Args:
        path: a folder (made when something is written), or one `.jsonl` or `.jsonl.gz` file, which can only be read.
        max_bytes: the growing file is sealed before it gets larger than this.
        max_age: ... and when its first record is older than this.
        retention: sealed files older than this are deleted; None keeps them for ever.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_bytes: int = 16 << 20,
        max_age: timedelta | None = timedelta(days=1),
        retention: timedelta | None = None,
    ) -> None:
        self.path = Path(path)
        self.max_bytes = max_bytes
        self.max_age = max_age
        self.retention = retention

    @property
    def current(self) -> Path:
        """The file that grows."""
        return self.path / _CURRENT

    # ------------------------------------------------------------------ writing

    def append(self, lines: Sequence[bytes]) -> None:
        """Add whole records at the end, all or none, on disk when this returns."""
        data = b"".join(line + b"\n" for line in lines)
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            with self.locked():
                if self._is_full(len(data)):
                    self._seal()
                self._write(data)
        except OSError as error:
            raise LogError(f"the log {self.path} cannot be written: {error.strerror or error}") from error

    def _write(self, data: bytes) -> None:
        new = not self.current.exists()
        handle = os.open(self.current, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            size = os.fstat(handle).st_size
            if size and os.pread(handle, 1, size - 1) != b"\n":
                data = b"\n" + data  # somebody was killed here: leave the piece on a line of its own
            try:
                left = memoryview(data)
                while left:
                    left = left[os.write(handle, left) :]
                os.fsync(handle)
            except OSError:
                os.ftruncate(handle, size)  # a full disk must not leave half a record
                raise
        finally:
            os.close(handle)
        if new:
            _sync_folder(self.path)

    def _is_full(self, coming: int) -> bool:
        try:
            size = self.current.stat().st_size
        except FileNotFoundError:
            return False
        if size and size + coming > self.max_bytes:
            return True
        return bool(size and self.max_age is not None and self._age() > self.max_age)

    def _age(self) -> timedelta:
        with self.current.open("rb") as file:
            first = next((line for line in _complete(file) if whole(line)), None)
        if first is None:
            return timedelta(0)
        return datetime.now(UTC) - datetime.fromisoformat(head(first)["time"])

    def _seal(self) -> None:
        """Rename the growing file and compress it; a crash in between leaves a readable file."""
        name = f"log-{datetime.now(UTC).strftime(_TIME)}-{secrets.token_hex(2)}.jsonl"
        sealed = self.path / name
        self.current.rename(sealed)
        _sync_folder(self.path)
        try:
            self._tidy()
        except OSError as error:  # compressing is a comfort, and the disk may be full: the next seal tries again
            _LOGGER.warning("a sealed file of the log could not be compressed: %s", error.strerror or error)

    def _tidy(self) -> None:
        for leftover in self.path.glob("*.tmp"):
            leftover.unlink()
        for plain in self.path.glob("log-*.jsonl"):
            packed = plain.with_name(plain.name + ".gz")
            if not packed.exists():
                with plain.open("rb") as file:
                    _replace(packed, _chunks(file))
            plain.unlink()
        if self.retention is not None:
            limit = (datetime.now(UTC) - self.retention).strftime(_TIME)
            for packed in self.path.glob("log-*.jsonl.gz"):
                if packed.name[len("log-") :] < limit:
                    packed.unlink()
        _sync_folder(self.path)

    def rewrite(self, change: Callable[[bytes], bytes | None]) -> int:
        """Pass every record through `change`; None removes it. How many were changed. Lines that are no record go."""
        if not self.path.is_dir():
            raise LogError(f"{self.path} is not the folder of a log: only there can records be erased")
        changed = 0
        try:
            with self.locked():
                for path in [*self._sealed(), self.current]:
                    if path.exists():
                        changed += _rewrite(path, change)
                self._tidy()
        except OSError as error:
            raise LogError(f"the log {self.path} cannot be rewritten: {error.strerror or error}") from error
        return changed

    # ------------------------------------------------------------------ reading

    def lines(self, since: datetime | None = None) -> Iterator[bytes]:
        """Every complete line, oldest file first; damaged ones too (`record.whole` tells them apart).

        `since` leaves out the sealed files that cannot hold anything recorded at that time or later.
        """
        if self.path.is_file():
            with _opened(self.path) as file:
                yield from _complete(file)
            return
        if not self.path.is_dir():
            raise LogError(f"there is no log at {self.path}")
        with self.locked(shared=True):  # or the file that grows could be sealed between looking and opening
            sealed = self._sealed()
            current = self.current.open("rb") if self.current.exists() else io.BytesIO()
        with current:
            for path in sealed:
                if since is None or path.name[len("log-") :] >= since.strftime(_TIME):
                    with suppress(FileNotFoundError), _opened(path) as file:  # retention may have been faster
                        yield from _complete(file)
            yield from _complete(current)

    def _sealed(self) -> list[Path]:
        """Oldest first. A file that was compressed but not yet removed counts once."""
        packed = {path.name.removesuffix(".gz") for path in self.path.glob("log-*.jsonl.gz")}
        plain = [path for path in self.path.glob("log-*.jsonl") if path.name not in packed]
        return sorted([*self.path.glob("log-*.jsonl.gz"), *plain])

    # ------------------------------------------------------------------ the lock

    @contextmanager
    def locked(self, *, shared: bool = False) -> Iterator[None]:
        """Alone in the folder, or with other readers. Opened anew each time: a forked process must not inherit it."""
        flags = os.O_RDONLY if shared else os.O_RDWR
        try:
            handle = os.open(self.path / "log.lock", flags | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            if not shared:
                raise
            yield  # a copy on a read-only disk: nobody writes there
            return
        try:
            _wait_for(handle, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, self.path)
            yield
        finally:
            os.close(handle)


def _wait_for(handle: int, kind: int, path: Path) -> None:
    deadline = time.monotonic() + _LOCK_SECONDS
    pause = 0.0005
    while True:
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise LogError(f"another process has held the log {path} for {_LOCK_SECONDS:.0f} s") from None
            time.sleep(pause)
            pause = min(0.02, pause * 2)


def _rewrite(path: Path, change: Callable[[bytes], bytes | None]) -> int:
    """How many records changed. The old file is replaced by a synced new one, or left alone.

    Pieces of killed writes go too, since what was to be erased may stand in one.
    """
    kept: list[bytes] = []
    changed = pieces = 0
    with _opened(path) as file:
        for raw in file:
            line = raw.removesuffix(b"\n")
            if line == raw or not whole(line):
                pieces += 1
                continue
            new = change(line)
            changed += new != line
            if new is not None:
                kept.append(new + b"\n")
    if changed or pieces:
        _replace(path, kept)
    return changed


def _replace(path: Path, chunks: Sequence[bytes] | Iterator[bytes]) -> None:
    """Write beside, sync, rename."""
    beside = path.with_name(path.name + ".tmp")
    handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "wb") as raw:
        if path.suffix == ".gz":
            with gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed:
                for chunk in chunks:
                    packed.write(chunk)
        else:
            raw.writelines(chunks)
        raw.flush()
        os.fsync(raw.fileno())
    beside.replace(path)
    _sync_folder(path.parent)


def _chunks(file: io.BufferedIOBase) -> Iterator[bytes]:
    while chunk := file.read(_CHUNK):
        yield chunk


@contextmanager
def _opened(path: Path) -> Iterator[io.BufferedIOBase]:
    if path.suffix == ".gz":
        with gzip.open(path, "rb") as packed:
            yield packed
    else:
        with path.open("rb") as file:
            yield file


def _complete(file: io.BufferedIOBase) -> Iterator[bytes]:
    """The lines that end; what a writer is writing at this moment, or never finished, is not one."""
    try:
        for line in file:
            if line.endswith(b"\n") and len(line) > 1:
                yield line[:-1]
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise FormatError(f"a sealed file of the log is damaged: {error}") from error


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
