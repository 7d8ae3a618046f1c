"""The folder of a log: one file that grows, sealed ones beside it, and a lock that keeps writers apart.

An append is one write at the end, synced. One that fails is cut off again; one that was killed leaves a piece of a
line, which its digest gives away (see `record.whole`), and the next append starts on a new line. Sealing, compressing
and erasing write a new file, sync it and rename it: at every moment each record is there exactly once, or erased.
Readers take no lock and write nothing.
"""

import gzip
import io
import logging
import os
import secrets
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import chain
from operator import ne
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout

from rag_explain.errors import FormatError, LogError
from rag_explain.log.record import summary, whole

T = TypeVar("T")
_LOGGER = logging.getLogger("rag_explain.log")
_CURRENT = "log.jsonl"  # the file that grows
_SEALED_AT = "log-%Y%m%dT%H%M%S.%fZ"  # how the name of a sealed file begins: names sort by time
_LOCK_SECONDS = 30.0
_LOCK_POLL_SECONDS = 0.005
_PIECE = 1 << 16  # bytes read at once
_HEAD_BYTES = 128  # format, version and id of a record stand within these


class LogFile(AbstractContextManager["LogFile"]):
    """One file of a log, opened: the first of `paths` that exists, and an empty one where none does.

    Reading goes as far as it can, and `problem` says afterwards what could not be read.
    """

    def __init__(self, *paths: Path) -> None:
        self.name = paths[0].name
        self.damage: str | None = None  # why the file cannot be read to its end
        self.torn = 0  # lines that are not as they were written
        self.foreign: Counter[str] = Counter()  # whole lines that this version cannot read, by reason
        self._file: io.BufferedReader | None = None
        for path in paths:
            with suppress(FileNotFoundError), self._noting_damage():
                self._file, self.name = path.open("rb"), path.name
                break

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def problem(self) -> str:
        """What could not be read, in words; empty where everything could."""
        found = [] if self.damage is None else [f"it is damaged ({self.damage})"]
        found += [f"{self.torn} lines are torn or were changed after they were written"] if self.torn else []
        found += [f"{count} lines cannot be read ({reason})" for reason, count in self.foreign.items()]
        return ", ".join(found)

    def records(self, parse: Callable[[bytes], T], key: bytes = b"") -> Iterator[T]:
        """What `parse` makes of every whole record that has `key` at its beginning."""
        # What stands after the last newline of the growing file may be a line that is being written.
        for line in self.lines(unfinished=self.name != _CURRENT):
            if key not in line[:_HEAD_BYTES]:
                continue
            if not whole(line):
                self.torn += 1
                continue
            try:
                found = parse(line)
            except FormatError as error:
                self.foreign[str(error)] += 1
                continue
            yield found

    def lines(self, *, unfinished: bool) -> Iterator[bytes]:
        """Every line up to the damage, if there is one; `unfinished`: also what stands after the last newline."""
        rest = b""
        with self._noting_damage():
            for piece in self._pieces():
                *lines, rest = (rest + piece).split(b"\n")
                yield from filter(None, lines)
        if rest and unfinished:
            yield rest

    def _pieces(self) -> Iterator[bytes]:
        if self._file is None:
            return iter(())
        return _unpacked(self._file) if self.name.endswith(".gz") else iter(partial(self._file.read, _PIECE), b"")

    @contextmanager
    def _noting_damage(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except (OSError, EOFError, zlib.error) as error:
            self.damage = getattr(error, "strerror", None) or str(error)


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
        self.current = self.path / _CURRENT
        self.max_bytes = max_bytes
        self.max_age = max_age
        self.retention = retention

    def append(self, lines: Sequence[bytes]) -> None:
        """Add whole records at the end, all or none, on disk when this returns."""
        data = b"".join(line + b"\n" for line in lines)
        with self._locked("written"):
            if self._is_full(len(data)):
                self._seal()
            self._write(data)

    def append_to(self, name: str, lines: Sequence[bytes]) -> None:
        """The same for another file of the folder, which is never sealed."""
        with self._locked("written"):
            self._write(b"".join(line + b"\n" for line in lines), self.path / name)

    def _write(self, data: bytes, path: Path | None = None) -> None:
        path = self.current if path is None else path
        is_new = not path.exists()
        with open(path, "ab+", buffering=0, opener=_private) as file:
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
        with LogFile(self.current) as file:
            first = next(file.records(summary), None)
        # What another version wrote stays in a file of its own.
        return bool(file.foreign) or (first is not None and datetime.now(UTC) - first.time > self.max_age)

    def _seal(self) -> None:
        """Rename the growing file and compress it; a crash in between leaves a readable file."""
        name = datetime.now(UTC).strftime(_SEALED_AT)
        self.current.rename(self.path / f"{name}-{secrets.token_hex(2)}.jsonl")
        _sync_folder(self.path)
        self._tidy()

    def _tidy(self) -> None:
        try:
            for leftover in self.path.glob("*.tmp"):
                leftover.unlink()
            for plain in self.path.glob("log-*.jsonl"):
                with plain.open("rb") as file:
                    _replace(_packed(plain), file)
                plain.unlink()
            if self.retention is not None:
                limit = (datetime.now(UTC) - self.retention).strftime(_SEALED_AT)
                for packed in self.path.glob("log-*.jsonl.gz"):
                    if packed.name < limit:
                        packed.unlink()
            _sync_folder(self.path)
        except OSError as error:  # compressing is a comfort, and the disk may be full: the next seal tries again
            _LOGGER.warning("a sealed file of the log could not be compressed: %s", error.strerror or error)

    def rewrite(self, change: Callable[[bytes], bytes | None]) -> int:
        """Pass every record through `change`; None removes it. How many were changed. Torn lines go too.

        A damaged file stays as it is, so that it can be restored; one error names it when all others are done.
        """
        if not self.path.is_dir():
            raise LogError(f"{self.path} is not the folder of a log: only there can records be erased")
        changed, problems = 0, []
        with self._locked("rewritten"):
            self._tidy()
            for path in (*chain.from_iterable((path, _packed(path)) for path in self._sealed()), self.current):
                count, problem = _rewrite(path, change)
                changed += count
                problems += [problem] if problem else []
        if problems:
            raise FormatError(
                f"{changed} records of the log {self.path} were changed, but {', and '.join(problems)}: what was to go "
                "may still stand there until you delete or restore it and erase again"
            )
        return changed

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

    def files(self, since: datetime | None = None, *, newest_first: bool = False) -> Iterator[LogFile]:
        """Every file, oldest first; with `since` those first that are likely to hold what was recorded then."""
        if not os.path.exists(self.path):
            raise LogError(f"there is no log at {self.path}")
        sealed, current = self._snapshot() if self.path.is_dir() else ([], LogFile(self.path))
        earliest = "" if since is None else since.strftime(_SEALED_AT)
        likely, others = ([path for path in sealed if (path.name >= earliest) is side] for side in (True, False))
        paths = [*likely, self.current, *others]
        with current:
            for path in reversed(paths) if newest_first else paths:
                # The compressed file is there before the plain one goes. Retention may have deleted both.
                with current if path is self.current else LogFile(path, _packed(path)) as file:
                    yield file

    def _snapshot(self) -> tuple[list[Path], LogFile]:
        """The sealed files, and the growing one, opened: together they hold every record once.

        If the growing file was sealed meanwhile, the list of sealed files has changed and both are taken again. If it
        is sealed afterwards, the opened file is still the same one.
        """
        while True:
            sealed = self._sealed()
            current = LogFile(self.current)
            if self._sealed() == sealed:
                return sealed, current
            current.close()

    def _sealed(self) -> list[Path]:
        """The sealed files by their names before compression, oldest first. During sealing a file may exist twice."""
        try:
            names = {name.removesuffix(".gz") for name in os.listdir(self.path)}
        except OSError as error:
            raise LogError(f"the log {self.path} cannot be read: {error.strerror or error}") from error
        return sorted(self.path / name for name in names if name.startswith("log-") and name.endswith(".jsonl"))


def _packed(path: Path) -> Path:
    return path.with_name(path.name + ".gz")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _rewrite(path: Path, change: Callable[[bytes], bytes | None]) -> tuple[int, str]:
    """How many records changed, and what in this file could not be. Torn lines go: what was to go may stand in one."""
    with LogFile(path) as file:
        lines = list(file.lines(unfinished=True))
    if file.damage is not None:
        return 0, f"{path.name} is damaged and cannot be rewritten ({file.damage})"
    old, new = [line for line in lines if whole(line)], []
    for line in old:
        try:
            new.append(change(line))
        except FormatError as error:
            file.foreign[str(error)] += 1
            new.append(line)
    kept = [line for line in new if line is not None]
    try:
        if kept != lines:
            _replace(path, (line + b"\n" for line in kept))
    except OSError as error:
        return 0, f"{path.name} cannot be rewritten ({error.strerror or error})"
    if len(old) < len(lines):
        _LOGGER.warning("%d torn or damaged lines of %s were removed", len(lines) - len(old), path.name)
    problem = f"{path.name} holds lines that only the version that wrote them can erase: {file.problem}"
    return sum(map(ne, old, new)), problem if file.foreign else ""


def _replace(path: Path, chunks: Iterable[bytes]) -> None:
    """Write beside, sync, rename."""
    beside = path.with_name(path.name + ".tmp")
    try:
        with open(beside, "wb", opener=_private) as raw:
            is_packed = path.suffix == ".gz"
            with gzip.GzipFile("", "wb", fileobj=raw, mtime=0) if is_packed else nullcontext(raw) as file:
                file.writelines(chunks)
            raw.flush()
            os.fsync(raw.fileno())
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)  # it holds texts
        raise
    _sync_folder(path.parent)


def _unpacked(packed: io.BufferedReader) -> Iterator[bytes]:
    """What a gzip file holds, piece by piece, up to the very byte from which on it cannot be read."""
    stream = zlib.decompressobj(wbits=31)
    while piece := stream.unused_data or packed.read(_PIECE):
        stream = zlib.decompressobj(wbits=31) if stream.eof else stream
        before = stream.copy()
        try:
            found = stream.decompress(piece)
        except zlib.error:
            yield _before_damage(before, piece)
            raise
        yield found
    if not stream.eof:
        raise EOFError("it ends too early")


def _before_damage(stream: "zlib._Decompress", piece: bytes) -> bytes:
    found = bytearray()
    with suppress(zlib.error):
        for at in range(len(piece)):
            found += stream.decompress(piece[at : at + 1])
    return bytes(found)


def _sync_folder(path: Path) -> None:
    """Make a rename last through a crash."""
    if os.name != "nt":  # Windows can sync no folders
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
