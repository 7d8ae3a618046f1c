"""The folder of a log: one file that grows, sealed ones beside it, and a lock that keeps writers apart.

    log.jsonl                                    the file that grows
    log-20261116T030000.123456Z-1a2b.jsonl.gz    sealed: it is never appended to again
    log.lock                                     held while appending, sealing and erasing

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
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

from filelock import FileLock, Timeout

from rag_explain.errors import FormatError, LogError
from rag_explain.log.record import summary, whole

_LOGGER = logging.getLogger("rag_explain.log")
_CURRENT = "log.jsonl"
_TIME = "%Y%m%dT%H%M%S.%fZ"
_LOCK_SECONDS = 30.0
_LOCK_POLL_SECONDS = 0.005
_CHUNK = 1 << 20


class Folder:
    """Where a log lives; `ExplanationLog` explains the settings.

    Args:
        path: a folder (made when something is written), or one `.jsonl` or `.jsonl.gz` file, which can only be read.
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
            with self._locked():
                if self._is_full(len(data)):
                    self._seal()
                self._write(data)
        except OSError as error:
            raise LogError(f"the log {self.path} cannot be written: {error.strerror or error}") from error

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
        try:
            size = self.current.stat().st_size
        except FileNotFoundError:
            return False
        return size > 0 and (size + coming > self.max_bytes or self._is_old())

    def _is_old(self) -> bool:
        if self.max_age is None:
            return False
        with self.current.open("rb") as file:
            first = next((line for line in _complete(file) if whole(line)), None)
        return first is not None and datetime.now(UTC) - summary(first).time > self.max_age

    def _seal(self) -> None:
        """Rename the growing file and compress it; a crash in between leaves a readable file."""
        name = f"log-{datetime.now(UTC).strftime(_TIME)}-{secrets.token_hex(2)}.jsonl"
        self.current.rename(self.path / name)
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
                    _replace(packed, iter(lambda: file.read(_CHUNK), b""))
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
            with self._locked():
                self._tidy()
                for path in [*map(_packed, self._sealed()), self.current]:
                    if path.exists():
                        changed += _rewrite(path, change)
        except OSError as error:
            raise LogError(f"the log {self.path} cannot be rewritten: {error.strerror or error}") from error
        return changed

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """The only writer. A new lock object each time: a forked process must not inherit a held one."""
        try:
            with FileLock(self.path / "log.lock", mode=0o600).acquire(_LOCK_SECONDS, _LOCK_POLL_SECONDS):
                yield
        except Timeout:
            raise LogError(f"another process has held the log {self.path} for {_LOCK_SECONDS:.0f} s") from None

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
        sealed, current = self._snapshot()
        with current:
            for path in sealed:
                if since is None or path.name[len("log-") :] >= since.strftime(_TIME):
                    with _opened_sealed(path) as file:
                        yield from _complete(file)
            yield from _complete(current)

    def _snapshot(self) -> tuple[list[Path], io.BufferedIOBase]:
        """The sealed files, and the growing one, opened: together they hold every record once.

        If the growing file was sealed meanwhile, the list of sealed files has changed and both are taken again. If it
        is sealed afterwards, the opened file is still the same one.
        """
        while True:
            sealed = self._sealed()
            try:
                current: io.BufferedIOBase = self.current.open("rb")
            except FileNotFoundError:
                current = io.BytesIO()
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


def _replace(path: Path, chunks: Iterable[bytes]) -> None:
    """Write beside, sync, rename."""
    beside = path.with_name(path.name + ".tmp")
    with open(beside, "wb", opener=_private) as raw:
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


def _opened(path: Path) -> io.BufferedIOBase:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _opened_sealed(path: Path) -> io.BufferedIOBase:
    """A sealed file, compressed or not; empty where retention has deleted it since the folder was listed.

    The compressed file is there before the plain one goes, so a third look finds what was compressed after the first.
    """
    for existing in (_packed(path), path, _packed(path)):
        try:
            return _opened(existing)
        except FileNotFoundError:
            continue
    return io.BytesIO()


def _complete(file: io.BufferedIOBase) -> Iterator[bytes]:
    """The lines that end; what a writer is writing at this moment, or never finished, is not one."""
    try:
        for line in file:
            if line.endswith(b"\n") and len(line) > 1:
                yield line[:-1]
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise FormatError(f"a sealed file of the log is damaged: {error}") from error


def _sync_folder(path: Path) -> None:
    """Make a rename last through a crash. Windows can sync no folders."""
    if os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
