"""The folder of a log: one file that grows, sealed ones beside it, and a lock that keeps writers apart.

An append is one write at the end, synced. One that fails is cut off again; one that was killed leaves a piece of a
line, which its digest gives away (see `record.whole`), and the next append starts on a new line. Sealing, compressing
and erasing write a new file, sync it and rename it: at every moment each record is there exactly once, or erased.
Readers take no lock and write nothing.
"""

from __future__ import annotations

import gzip
import io
import logging
import os
import secrets
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from filelock import FileLock, Timeout

from rag_explain.errors import FormatError, LogError
from rag_explain.log.record import summary, whole

_LOGGER = logging.getLogger("rag_explain.log")
_SEALED_AT = "log-%Y%m%dT%H%M%S.%fZ"  # how the name of a sealed file begins: names sort by time
_LOCK_SECONDS = 30.0
_LOCK_POLL_SECONDS = 0.005
_DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error)  # of a compressed file


class Folder:
    """Where a log lives; `ExplanationLog` explains the settings. One file of a log can be read, but not written."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_bytes: int = 16 << 20,
        max_age: timedelta | None = timedelta(days=1),
        retention: timedelta | None = None,
    ) -> None:
        self.path = Path(path)
        self.current = self.path / "log.jsonl"  # the file that grows
        self.max_bytes = max_bytes
        self.max_age = max_age
        self.retention = retention

    # ------------------------------------------------------------------ writing

    def append(self, lines: Sequence[bytes]) -> None:
        """Add whole records at the end, all or none, on disk when this returns."""
        data = b"".join(line + b"\n" for line in lines)
        with self._locked("written"):
            if self._is_full(len(data)):
                self._seal()
            self._write(data)

    def _write(self, data: bytes) -> None:
        is_new = not self.current.exists()
        with open(self.current, "ab+", buffering=0, opener=_private) as file:
            size = file.seek(0, os.SEEK_END)
            if size:
                file.seek(size - 1)
                if file.read(1) != b"\n":
                    data = b"\n" + data  # a writer was killed here: leave the piece on a line of its own
            try:
                left = memoryview(data)
                while left:
                    left = left[file.write(left) :]
                os.fsync(file.fileno())
            except OSError:
                file.truncate(size)  # a full disk must not leave half a record
                raise
        if is_new:
            _sync_folder(self.path)

    def _is_full(self, coming: int) -> bool:
        if not self.current.exists() or (size := self.current.stat().st_size) == 0:
            return False
        if self.max_age is None or size + coming > self.max_bytes:
            return size + coming > self.max_bytes
        with self.current.open("rb") as file:
            first = next((line for line in _complete(file) if whole(line)), None)
        try:
            return first is not None and datetime.now(UTC) - summary(first).time > self.max_age
        except FormatError:  # another version wrote it: its records stay in a file of their own
            return True

    def _seal(self) -> None:
        """Rename the growing file and compress it; a crash in between leaves a readable file."""
        name = datetime.now(UTC).strftime(_SEALED_AT)
        self.current.rename(self.path / f"{name}-{secrets.token_hex(2)}.jsonl")
        _sync_folder(self.path)
        try:
            self._tidy()
        except OSError as error:  # compressing is a comfort, and the disk may be full: the next seal tries again
            _LOGGER.warning("a sealed file of the log could not be compressed: %s", error.strerror or error)

    def _tidy(self) -> None:
        for leftover in self.path.glob("*.tmp"):
            leftover.unlink()
        for plain in self.path.glob("log-*.jsonl"):
            packed = _packed(plain)
            if not packed.exists():
                with plain.open("rb") as file:
                    _replace(packed, file)
            plain.unlink()
        if self.retention is not None:
            limit = (datetime.now(UTC) - self.retention).strftime(_SEALED_AT)
            for packed in self.path.glob("log-*.jsonl.gz"):
                if packed.name < limit:
                    packed.unlink()
        _sync_folder(self.path)

    def rewrite(self, change: Callable[[bytes], bytes | None]) -> int:
        """Pass every record through `change`; None removes it. How many were changed. Lines that are no record go."""
        if not self.path.is_dir():
            raise LogError(f"{self.path} is not the folder of a log: only there can records be erased")
        with self._locked("rewritten"):
            self._tidy()
            paths = [*map(_packed, self._sealed()), self.current]
            return sum(_rewrite(path, change) for path in paths if path.exists())

    @contextmanager
    def _locked(self, done: str) -> Iterator[None]:
        """The only writer. A new lock object each time: a forked process must not inherit a held one."""
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            with FileLock(self.path / "log.lock", mode=0o600).acquire(_LOCK_SECONDS, _LOCK_POLL_SECONDS):
                yield
        except Timeout:
            raise LogError(f"another process has held the log {self.path} for {_LOCK_SECONDS:.0f} s") from None
        except OSError as error:
            raise LogError(f"the log {self.path} cannot be {done}: {error.strerror or error}") from error

    # ------------------------------------------------------------------ reading

    def lines(self, since: datetime | None = None) -> Iterator[bytes]:
        """Every complete line, oldest file first; damaged ones too (`record.whole` tells them apart).

        `since` leaves out the sealed files that cannot hold anything recorded at that time or later.
        """
        if not self.path.exists():
            raise LogError(f"there is no log at {self.path}")
        sealed, current = self._snapshot() if self.path.is_dir() else ([], _opened(self.path))
        if since is not None:
            sealed = [path for path in sealed if path.name >= since.strftime(_SEALED_AT)]
        with current:
            for path in sealed:
                # The compressed file is there before the plain one goes: a third look finds what was compressed after
                # the first. Retention may have deleted both.
                with _opened(_packed(path), path, _packed(path)) as file:
                    yield from _complete(file)
            yield from _complete(current)

    def _snapshot(self) -> tuple[list[Path], io.BufferedIOBase]:
        """The sealed files, and the growing one, opened: together they hold every record once.

        If the growing file was sealed meanwhile, the list of sealed files has changed and both are taken again. If it
        is sealed afterwards, the opened file is still the same one.
        """
        while True:
            sealed = self._sealed()
            current = _opened(self.current)
            if self._sealed() == sealed:
                return sealed, current
            current.close()

    def _sealed(self) -> list[Path]:
        """The sealed files by their names before compression, oldest first. During sealing a file may exist twice."""
        found = [*self.path.glob("log-*.jsonl"), *self.path.glob("log-*.jsonl.gz")]
        return sorted({path.with_name(path.name.removesuffix(".gz")) for path in found})


def _packed(path: Path) -> Path:
    return path.with_name(path.name + ".gz")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _rewrite(path: Path, change: Callable[[bytes], bytes | None]) -> int:
    """How many records changed. Pieces of killed writes go too, since what was to be erased may stand in one."""
    with _opened(path) as file:
        try:
            lines = file.readlines()
        except _DAMAGE as error:
            raise FormatError(f"{path.name} of the log is damaged and cannot be rewritten: {error}") from error
    old = [line[:-1] for line in lines if line.endswith(b"\n") and whole(line[:-1])]
    new = [change(line) for line in old]
    kept = [line + b"\n" for line in new if line is not None]
    if kept != lines:
        _replace(path, kept)
    return sum(before != after for before, after in zip(old, new, strict=True))


def _replace(path: Path, chunks: Iterable[bytes]) -> None:
    """Write beside, sync, rename."""
    beside = path.with_name(path.name + ".tmp")
    with open(beside, "wb", opener=_private) as raw:
        is_packed = path.suffix == ".gz"
        with gzip.GzipFile("", "wb", fileobj=raw, mtime=0) if is_packed else nullcontext(raw) as file:
            file.writelines(chunks)
        raw.flush()
        os.fsync(raw.fileno())
    beside.replace(path)
    _sync_folder(path.parent)


def _opened(*paths: Path) -> io.BufferedIOBase:
    """The first of these files that exists; an empty one where none does."""
    for path in paths:
        with suppress(FileNotFoundError):
            return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")
    return io.BytesIO()


def _complete(file: io.BufferedIOBase) -> Iterator[bytes]:
    """The lines that end; what a writer is writing at this moment, or never finished, is not one."""
    try:
        for line in file:
            if line.endswith(b"\n") and len(line) > 1:
                yield line[:-1]
    except _DAMAGE as error:
        raise FormatError(f"a sealed file of the log is damaged: {error}") from error


def _sync_folder(path: Path) -> None:
    """Make a rename last through a crash."""
    if os.name != "nt":  # Windows can sync no folders
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
