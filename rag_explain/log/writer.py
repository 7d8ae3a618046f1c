"""ExplanationLog: takes an answer in microseconds, and writes it in the background."""

import atexit
import logging
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, Literal, NamedTuple

from rag_explain.errors import InvalidInput, LogError, RagExplainError
from rag_explain.log import erasure, reader
from rag_explain.log.files import Folder
from rag_explain.log.models import keep_models
from rag_explain.log.record import PendingRecord, Record
from rag_explain.log.redaction import Policy, Redactor
from rag_explain.log.sinks import Sink
from rag_explain.results.hits import Hit

_LOGGER = logging.getLogger("rag_explain.log")
_BATCH = 100
_BATCH_SECONDS = 0.5  # a record that is ready does not wait longer than this for explanations of later ones
_RETRIES = (0.2, 1.0)
_EXIT_SECONDS = 10.0
_NICENESS = 10
_OPEN: "weakref.WeakSet[ExplanationLog]" = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class Counts:
    """What became of the records so far; `accepted` = `written` + `failed` + those still waiting."""

    accepted: int = 0
    written: int = 0
    dropped: int = 0  # not accepted: too many were waiting, or the log was closed
    failed: int = 0  # accepted, and then not written: a full disk, a redaction hook that raised


class _Line(NamedTuple):
    raw: bytes
    record: Record
    context: Any


class ExplanationLog(AbstractContextManager["ExplanationLog"]):
    """Explanations beside the answers they belong to, to be read when an answer is questioned.

    `record` only puts the answer into a bounded queue; one thread computes what is pending, redacts and writes. When
    the queue is full the answer is dropped and counted, never waited for. `flush`, `close` and the end of the process
    empty it; a log that nothing uses any more ends its thread when all is written. docs/log-format.md says what is
    written and what is promised.

    Args:
        path: the log's folder. Several processes may write to it.
        top: how many word pairs of each explanation are kept.
        matrices: keep whole matrices too, compressed.
        keep_text: False writes offsets, weights and hashes, but no query, answer or document.
        redact: gives the spans of a text that must not be written; see `patterns`.
        hash_key: a secret of 16 bytes or more, so that a guessed text cannot be confirmed by its hash.
        pending: whether pending explanations are computed in the background, or left and written as pending.
        export: where records go once they are written, for example `rag_explain.log.otel.TraceExport()`.
        background: False writes before `record` returns, and raises when it cannot.
        queue: how many answers may wait.
        max_bytes, max_age: the growing file is sealed before it gets larger, and when its first record is older.
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
        export: Sink | None = None,
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
        self._export = export
        self._background = background
        self._limit = queue
        self._closed = False
        self._compute_until = math.inf if pending == "compute" else 0.0
        self._begin()
        _OPEN.add(self)

    def _begin(self) -> None:
        """What a process needs of its own; a forked child starts again from here."""
        # A record that waits keeps its log alive. None ends the thread: the log was closed, or nothing uses it.
        self._waiting: SimpleQueue[tuple[ExplanationLog, PendingRecord] | None] = SimpleQueue()
        weakref.finalize(self, self._waiting.put, None).atexit = False  # at the end of the process it is closed
        self._changed = threading.Condition()  # guards the counts, and tells of their changes
        self.counts = Counts()  # what became of the records of this process so far
        self._told = 0  # how many lost records the others tell of
        self._writing = threading.Lock()
        self._thread: threading.Thread | None = None
        self._models: set[str] = set()  # fingerprints whose probes are in the log
        self._lines: list[_Line] = []  # records that are made, and written together
        self._write_at = 0.0

    def record(
        self,
        *,
        query: str,
        answer: str | None = None,
        hits: Iterable[Hit] = (),
        metadata: Mapping[str, Any] | None = None,
    ) -> str:
        """Log an answer, the documents it came from and why they were found. Returns the record's id at once.

        An id is a promise to try: what could not be kept is in `counts`, and the next record says how many are missing.
        """
        context = None if self._export is None else self._export.context()
        pending = PendingRecord(query, answer, hits, metadata or {}, context)
        if not self._background:
            if self._closed:
                raise LogError(f"the log {self.folder.path} is closed")
            with self._writing:
                self._count("accepted")
                self._append([self._line(pending, compute=self._compute_until > 0)], pauses=())
            return pending.id
        with self._changed:
            accepted = not self._closed and self._waiting.qsize() < self._limit
            self._count("accepted" if accepted else "dropped")
            first_dropped = not accepted and self.counts.dropped == 1
            if accepted:
                self._waiting.put((self, pending))
                if self._thread is None:
                    work = partial(_work, self._waiting)
                    self._thread = threading.Thread(target=work, name="rag-explain-log", daemon=True)
                    self._thread.start()
        if first_dropped:
            why = "it is closed" if self._closed else f"{self._limit} records are waiting"
            _LOGGER.warning("the log %s drops records: %s", self.folder.path, why)
        return pending.id

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything recorded so far is on disk or counted as failed. False when time ran out."""
        with self._changed:
            target = self.counts.accepted
            return self._changed.wait_for(lambda: self.counts.written + self.counts.failed >= target, timeout)

    def close(self, timeout: float | None = _EXIT_SECONDS, *, compute: bool = True) -> bool:
        """Write what waits and stop. False when time ran out.

        Pending explanations are still computed in the first half of `timeout`, and then, or without `compute`, left.
        """
        computing = 0.0 if not compute else math.inf if timeout is None else time.monotonic() + timeout / 2
        with self._changed:
            self._compute_until = min(self._compute_until, computing)
            if not self._closed:
                self._closed = True
                self._waiting.put(None)
            self._changed.notify_all()
        done = self.flush(timeout)
        if self._thread is not None and done and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        return done

    def _count(self, what: str, number: int = 1) -> None:
        with self._changed:
            self.counts = replace(self.counts, **{what: getattr(self.counts, what) + number})
            self._changed.notify_all()

    def _take(self, pending: PendingRecord) -> None:
        """Make a record, and write all that are made when none waits, or when they have waited long enough."""
        if not self._lines:
            self._write_at = time.monotonic() + _BATCH_SECONDS
        # An answer without its explanation is better than none: computing stops before dropping starts.
        is_late = self._waiting.qsize() - self._closed > self._limit // 2
        try:
            self._lines.append(self._line(pending, compute=not is_late and time.monotonic() < self._compute_until))
        except BaseException as error:  # whatever the host's hook or objects raise, SystemExit too: the log goes on
            # The message of a foreign error may quote the text that was to be redacted: only its kind is told.
            told = str(error) if isinstance(error, RagExplainError) else type(error).__name__
            _LOGGER.warning("record %s could not be made and is not logged: %s", pending.id, told)
        is_last = self._waiting.qsize() - self._closed <= 0
        if is_last or len(self._lines) == _BATCH or time.monotonic() > self._write_at:
            lines, self._lines = self._lines, []
            self._append_or_warn(lines)

    def _line(self, pending: PendingRecord, *, compute: bool) -> _Line:
        """The record's line, which tells how many records were lost since the line before it."""
        lost = self.counts.dropped + self.counts.failed
        try:
            record = Record.of(pending, self.policy, compute=compute, dropped=lost - self._told)
            line = _Line(record.to_line(), record, pending.context)
        except BaseException:
            self._count("failed")
            raise
        self._told = lost
        return line

    def _append_or_warn(self, lines: Sequence[_Line]) -> None:
        try:
            if lines:
                self._append(lines, _RETRIES)
        except BaseException as error:
            _LOGGER.warning("%d records are lost: %s", len(lines), error)

    def _append(self, lines: Sequence[_Line], pauses: Sequence[float]) -> None:
        """Write and export; a write that fails is tried again after each of the pauses."""
        for pause in (*pauses, None):
            try:
                self.folder.append([line.raw for line in lines])
                break
            except BaseException:
                if pause is None or self._closed:
                    self._told -= sum(line.record.dropped for line in lines)
                    self._count("failed", len(lines))
                    raise
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, pause)
        try:
            for line in lines:
                self._export_or_warn(line)
        finally:
            self._keep_models(lines)
        self._count("written", len(lines))

    def _keep_models(self, lines: Sequence[_Line]) -> None:
        """Write down what the models of these records compute, each once for this log."""
        logged = [hit.explanation.outline for line in lines for hit in line.record.logged_hits if hit.explanation]
        new = {one.fingerprint: one.probes for one in logged if one.probes and one.fingerprint not in self._models}
        try:
            if new:
                keep_models(self.folder, new)
                self._models.update(new)
        except RagExplainError as error:  # the records are written: they can be verified without it
            _LOGGER.warning("what a model computes could not be kept: %s", error)

    def _export_or_warn(self, line: _Line) -> None:
        try:
            if self._export is not None:
                self._export.export(line.record, line.context)
        except BaseException as error:  # the record is written: a trace that is not must not undo that
            _LOGGER.warning("a record could not be exported: %s", type(error).__name__)
            if not self._background and not isinstance(error, Exception):
                raise  # the caller's own Ctrl-C

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

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"ExplanationLog({str(self.folder.path)!r}, {self.counts})"


def _work(waiting: "SimpleQueue[tuple[ExplanationLog, PendingRecord] | None]") -> None:
    """What the thread of a log does. It holds the log only while there is something to write."""
    _give_way()
    for log, pending in iter(waiting.get, None):
        log._take(pending)
        del log, pending


def _give_way() -> None:
    """Lower the priority of this thread, and of the workers that torch starts for it. Only Linux has one per thread.

    Measured: with it a search beside this thread takes 26 ms, as without a log; at equal priority it takes 58 ms.
    """
    if sys.platform == "linux":
        with suppress(OSError):
            os.nice(_NICENESS)


def _close_all() -> None:
    deadline = time.monotonic() + _EXIT_SECONDS
    for log in list(_OPEN):
        # No computing: thread pools are gone by now, and an explanation that needs one would be logged as failed.
        if not log.close(max(0.0, deadline - time.monotonic()), compute=False):
            _LOGGER.warning("the process ends before the log %s was written: %s", log.folder.path, log.counts)


def _after_fork() -> None:
    for log in list(_OPEN):
        log._begin()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
