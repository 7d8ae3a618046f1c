"""ExplanationLog: takes an answer in microseconds, and writes it behind the host's back."""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal, NamedTuple, Protocol

from rag_explain.errors import InvalidInput, LogError, RagExplainError
from rag_explain.log import erasure, reader
from rag_explain.log.files import Folder
from rag_explain.log.record import Entry, Policy, Record, decode, encode
from rag_explain.log.redaction import Redactor
from rag_explain.results.hits import Hit

_LOGGER = logging.getLogger(__name__)
_BATCH = 100
_BATCH_SECONDS = 0.5  # a record that is ready does not wait longer than this for explanations of later ones
_RETRIES = (0.2, 1.0)
_EXIT_SECONDS = 10.0
_NICENESS = 10
_OPEN: weakref.WeakSet[ExplanationLog] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class Counts:
    """What became of the records so far; `accepted` = `written` + `failed` + those still waiting.

    Attributes:
        dropped: not accepted, because too many were waiting or the log was closed.
        failed: accepted, and then not written: a full disk, a redaction hook that raised.
    """

    accepted: int
    written: int
    dropped: int
    failed: int


class _Line(NamedTuple):
    raw: bytes
    dropped: int  # how many lost records this one tells of
    context: Any


class Export(Protocol):
    """Somewhere else where records go, once they are written: `rag_explain.log.otel.TraceExport`."""

    def context(self) -> Any:
        """What must be taken from the caller's thread. Must be fast."""

    def export(self, record: Record, context: Any) -> None:
        """Called in the background with the record as it was written."""


class ExplanationLog:
    """Explanations beside the answers they belong to, for the day when somebody asks.

        log = ExplanationLog("rag-log")
        record_id = log.record(query=query, answer=answer, hits=hits)

    `record` only puts the answer into a bounded queue; one thread computes what is pending, redacts and writes. When
    the queue is full the answer is dropped and counted, never waited for. `flush`, `close` and the end of the process
    empty it.

    Args:
        path: the log's folder. Several processes may write to it.
        top: how many word pairs of each explanation are kept.
        matrices: keep whole matrices too, compressed.
        keep_text: False writes offsets, weights and hashes, but no query, answer or document.
        redact: gives the spans of a text that must not be written; see `patterns`.
        hash_key: a secret of 16 bytes or more, so that a guessed text cannot be confirmed by its hash.
        pending: "compute" explains what nobody has looked at yet, in the background, as long as less than half of the
            queue waits; "leave" writes it as pending.
        export: where records go once they are written, for example `rag_explain.log.otel.TraceExport()`.
        background: False writes before `record` returns, and raises when it cannot.
        queue: how many answers may wait.
        max_bytes, max_age: when the growing file is sealed and a new one begun.
        retention: sealed files older than this are deleted. None: kept.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        top: int = 20,
        matrices: bool = False,
        keep_text: bool = True,
        redact: Redactor | None = None,
        hash_key: bytes | None = None,
        pending: Literal["compute", "leave"] = "compute",
        export: Export | None = None,
        background: bool = True,
        queue: int = 1000,
        max_bytes: int = 16 << 20,
        max_age: timedelta | None = timedelta(days=1),
        retention: timedelta | None = None,
    ) -> None:
        if pending not in ("compute", "leave"):
            raise InvalidInput(f"pending must be 'compute' or 'leave', not {pending!r}")
        if queue < 1 or max_bytes < 1:
            raise InvalidInput("queue and max_bytes must be at least 1")
        self.folder = Folder(path, max_bytes=max_bytes, max_age=max_age, retention=retention)
        self.policy = Policy(top, matrices, keep_text, redact, hash_key)
        self._pending = pending
        self._export = export
        self._background = background
        self._limit = queue
        self._accepted = self._written = self._dropped = self._failed = self._told = 0
        self._closed = False
        self._compute_until = math.inf
        self._begin()
        _OPEN.add(self)

    def _begin(self) -> None:
        """What a process needs of its own; a forked child starts again from here."""
        self._queue: deque[Entry] = deque()
        self._changed = threading.Condition()
        self._writing = threading.Lock()
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------------ writing

    def record(
        self,
        *,
        query: str,
        answer: str | None = None,
        hits: Sequence[Hit] = (),
        metadata: Mapping[str, Any] | None = None,
    ) -> str:
        """Log an answer, the documents behind it and why they were found. Returns the record's id at once.

        An id is a promise to try: what could not be kept is in `counts`, and the next record says how many are missing.
        """
        entry = Entry.of(query, answer, hits, metadata)
        if self._export is not None:
            entry = replace(entry, context=self._export.context())
        if not self._background:
            self._record_now(entry)
            return entry.id
        with self._changed:
            if self._closed or len(self._queue) >= self._limit:
                self._dropped += 1
                first = self._dropped == 1
            else:
                self._queue.append(entry)
                self._accepted += 1
                first = False
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="rag-explain-log", daemon=True)
                    self._thread.start()
                self._changed.notify_all()
        if first:
            why = "it is closed" if self._closed else f"{self._limit} records are waiting"
            _LOGGER.warning("the log %s drops records: %s", self.folder.path, why)
        return entry.id

    def _record_now(self, entry: Entry) -> None:
        if self._closed:
            raise LogError(f"the log {self.folder.path} is closed")
        with self._writing:
            self._accepted += 1
            try:
                line = encode(entry, self.policy, compute=self._pending == "compute", dropped=self._failed - self._told)
                self.folder.append([line])
            except BaseException:
                self._settle(failed=1)
                raise
            self._told = self._failed
            self._send([_Line(line, 0, entry.context)])
            self._settle(written=1)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything recorded so far is on disk or counted as failed. False when time ran out."""
        with self._changed:
            target = self._accepted
            return self._changed.wait_for(lambda: self._written + self._failed >= target, timeout)

    def close(self, timeout: float | None = _EXIT_SECONDS, *, compute: bool = True) -> bool:
        """Write what waits and stop. False when time ran out.

        Pending explanations are still computed in the first half of `timeout`, and then, or without `compute`, left.
        """
        computing = 0.0 if not compute else math.inf if timeout is None else time.monotonic() + timeout / 2
        with self._changed:
            self._closed = True
            self._compute_until = min(self._compute_until, computing)
            self._changed.notify_all()
            thread = self._thread
        done = self.flush(timeout)
        if thread is not None and done and thread is not threading.current_thread():
            thread.join(timeout)
        return done

    @property
    def counts(self) -> Counts:
        """What became of the records of this process."""
        with self._changed:
            return Counts(self._accepted, self._written, self._dropped, self._failed)

    # ------------------------------------------------------------------ the background thread

    def _run(self) -> None:
        with suppress(OSError):
            # Linux gives each thread, and the workers that torch starts for it, a priority of its own. Measured: with
            # it a search beside this thread takes 26 ms, as without a log; at equal priority it takes 58 ms.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        lines: list[_Line] = []
        since = time.monotonic()
        while True:
            entry = self._next(wait=not lines)
            if entry is not None:
                since = since if lines else time.monotonic()
                line = self._encode(entry)
                if line is not None:
                    lines.append(line)
            elif not lines:
                return
            if lines and (entry is None or len(lines) == _BATCH or time.monotonic() - since > _BATCH_SECONDS):
                self._append(lines)
                lines = []

    def _next(self, wait: bool) -> Entry | None:
        """The entry that has waited longest; None when there is none and, if `wait`, the log was closed."""
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._queue or self._closed)
            return self._queue.popleft() if self._queue else None

    def _encode(self, entry: Entry) -> _Line | None:
        # An answer without its explanation is better than none: computing stops before dropping starts.
        behind = len(self._queue) > self._limit // 2
        compute = self._pending == "compute" and not behind and time.monotonic() < self._compute_until
        lost = self._dropped + self._failed - self._told
        try:
            raw = encode(entry, self.policy, compute=compute, dropped=lost)
        except Exception as error:  # whatever the host's hook or objects raise, the log goes on
            # The message of a foreign error may quote the text that was to be redacted: only its kind is told.
            told = str(error) if isinstance(error, RagExplainError) else type(error).__name__
            _LOGGER.warning("record %s could not be made and is not logged: %s", entry.id, told)
            self._settle(failed=1)
            return None
        self._told += lost
        return _Line(raw, lost, entry.context)

    def _append(self, lines: list[_Line]) -> None:
        for pause in (*_RETRIES, None):
            try:
                self.folder.append([line.raw for line in lines])
            except Exception as error:
                if pause is None or self._closed:
                    _LOGGER.warning("%d records are lost: %s", len(lines), error)
                    self._told -= sum(line.dropped for line in lines)  # nobody will read it there
                    self._settle(failed=len(lines))
                    return
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, pause)
            else:
                self._send(lines)
                self._settle(written=len(lines))
                return

    def _send(self, lines: Sequence[_Line]) -> None:
        if self._export is None:
            return
        for line in lines:
            try:
                self._export.export(decode(line.raw), line.context)
            except Exception as error:  # the record is written: a trace that is not must not undo that
                _LOGGER.warning("a record could not be exported: %s", type(error).__name__)

    def _settle(self, written: int = 0, failed: int = 0) -> None:
        with self._changed:
            self._written += written
            self._failed += failed
            self._changed.notify_all()

    # ------------------------------------------------------------------ reading and erasing

    def records(self) -> Iterator[Record]:
        """Everything in the log, what is still waiting included."""
        self.flush()
        return reader.records(self.folder.path) if self.folder.path.exists() else iter(())

    def find(self, record_id: str) -> Record:
        """The record with this id."""
        self.flush()
        return reader.find(self.folder.path, record_id)

    def erase(self, *, records: Collection[str] = (), documents: Collection[str] = ()) -> int:
        """Remove records, or every trace of documents, from all files of the log. How many records changed."""
        self.flush()
        return erasure.erase(self.folder.path, records=records, documents=documents)

    # ------------------------------------------------------------------ life

    def __enter__(self) -> ExplanationLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"ExplanationLog({str(self.folder.path)!r}, {self.counts})"


def _close_all() -> None:
    deadline = time.monotonic() + _EXIT_SECONDS
    for log in list(_OPEN):
        # No computing: thread pools are gone by now, and an explanation that needs one would be logged as failed.
        if not log.close(max(0.0, deadline - time.monotonic()), compute=False):
            _LOGGER.warning("the process ends before the log %s was written: %s", log.folder.path, log.counts)


def _after_fork() -> None:
    for log in list(_OPEN):
        log._begin()
        log._accepted = log._written = log._dropped = log._failed = log._told = 0


atexit.register(_close_all)
os.register_at_fork(after_in_child=_after_fork)
