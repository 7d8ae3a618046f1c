"""The record: one answer, the documents it came from and why they were found, as one line of JSON.

docs/log-format.md describes the format. A line ends in a digest of all that stands before it, so that half a line, or a
damaged one, is never taken for a record.
"""

import hashlib
import json
import math
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Self

from rag_explain import __version__
from rag_explain.budget import at_most
from rag_explain.errors import FormatError, InvalidInput, RagExplainError
from rag_explain.log.compact import TUPLE, LoggedExplanation
from rag_explain.log.redaction import Policy, Texts, digest, mask
from rag_explain.results import serialization as plain
from rag_explain.results.deferred import Deferred, Status, load
from rag_explain.results.explanation import Explanation, Pair
from rag_explain.results.hits import Hit, Hits
from rag_explain.results.stages import NAMES, Stage, expanded

FORMAT, VERSION = "rag_explain.log", 3
READABLE = (2, VERSION)  # of version 2, a stage is a list of its first members
_CHECK_LENGTH = len(',"check":"0123456789abcdef"}')
_HITS = b',"hits":['
# What the search said of a hit. It stays when the document is erased.
MEASURED = ("rank", "score", "metric", "similarity", "gap")


def new_id() -> str:
    """32 hexadecimal digits: 12 of the time in milliseconds, so that ids sort by time, and 20 at random."""
    return f"{time.time_ns() // 1_000_000:012x}{secrets.token_hex(10)}"


@dataclass
class PendingRecord:
    """An answer that is on its way into the log. Metadata are copied: the caller may change the originals."""

    query: str
    answer: str | None = None
    hits: Iterable[Hit] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    context: Any = None  # for the export: where the caller was
    id: str = field(default_factory=new_id)
    time: datetime = field(default_factory=lambda: datetime.now(UTC))

    def __post_init__(self) -> None:
        if not isinstance(self.query, str) or not (self.answer is None or isinstance(self.answer, str)):
            raise InvalidInput("query and answer must be strings (answer may be None)")
        if not isinstance(self.hits, Iterable):
            raise InvalidInput(f"hits must be a list of rag_explain.Hit objects, not {type(self.hits).__name__}")
        self.hits = hits = tuple(self.hits)  # a generator can be read only once
        for hit in hits:
            if not isinstance(hit, Hit):
                raise InvalidInput(f"hits must be rag_explain.Hit objects, not {type(hit).__name__}")
        self.hit_metadata = [_copy(hit.metadata) for hit in hits]
        self.metadata = _copy(self.metadata)


def _copy(metadata: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return dict(plain.to_plain(metadata))
    except Exception as error:  # an object in it that cannot be shown, or that holds itself: not worth an answer
        return {"unreadable": type(error).__name__}


@dataclass(frozen=True, kw_only=True)
class LoggedHit:
    """One retrieved document as a record holds it. Texts are as they were written: masked, or None when not kept."""

    id: str
    rank: int
    score: float | None
    metric: str
    similarity: float | None
    gap: float | None
    status: Status
    reason: str | None
    text: str | None = None
    text_hash: str | None = None
    query: str | None = None  # where it is not the record's query (a chain or an agent): what the retriever was asked
    query_hash: str | None = None
    around: tuple[str, str] | None = None  # what was embedded before and after the text
    around_hash: str | None = None  # of both with a zero byte between
    chunk: tuple[int, int] | None = None  # where in the text the chunk stands that was embedded
    metadata: Mapping[str, Any] = field(default_factory=dict)
    explanation: LoggedExplanation | None = None
    stages: tuple[Stage, ...] = ()

    @classmethod
    def of(cls, hit: Hit, metadata: Mapping[str, Any], query: str, policy: Policy, compute: bool) -> Self:
        """What the policy keeps of a hit for `query`. A pending explanation is computed by sentences, or left so.

        One that would cost money is left: nothing is sent to be logged.
        """
        compute = compute and hit.brief_handle.reserved is None
        with at_most(0):
            why = hit.brief() if compute else hit.peek()
        left = hit.brief_handle if compute else hit.handle
        reason = left.reserved if left.status == "pending" else left.reason
        # The texts into which the explanation's offsets point: a chain may have rewritten the query.
        asked = (None if why is None else why.query) or hit.query or query
        text = hit.text if why is None or why.document is None else why.document
        rewritten = None if asked == query else asked
        shown = policy.written(text)
        around = hit.around if any(hit.around) else None
        return cls(
            **{name: _number(getattr(hit, name)) for name in ("score", "similarity", "gap")},
            id=str(hit.id),
            rank=int(hit.rank),
            metric=policy.described(hit.metric),
            status="ready" if why is not None else left.status,
            reason=policy.written(reason) if policy.keep_text else _error_kind(reason),
            text=shown,
            text_hash=policy.hashed(text),
            query=policy.written(rewritten),
            query_hash=policy.hashed(rewritten),
            around=policy.written(around),
            around_hash=None if around is None else policy.hashed("\0".join(around)),
            chunk=hit.chunk,
            metadata=policy.written(metadata) or {},
            stages=tuple(_written_stage(stage, policy) for stage in _stages(hit.stages, compute)),
            explanation=None if why is None else LoggedExplanation.of(why, policy, policy.written(asked), shown),
        )

    def hit(self) -> Hit:
        """The hit as the search returned it, with its explanation as far as it was kept."""
        status: Status = "failed" if self.status == "failed" else "skipped"
        handle: Deferred[Explanation]
        handle = Deferred(None, status=status, reason=self.reason or "it was not computed when it was logged")
        if self.explanation is not None:
            try:
                handle = Deferred.ready(self.explanation.explanation())
            except RagExplainError as error:  # its matrix is damaged: the other hits can still be looked at
                handle = Deferred(None, status="failed", reason=str(error))
        names = ("id", "text", "rank", "score", "metric", "metadata", "stages", "query")
        own = {name: getattr(self, name) for name in names}
        return Hit(**own, handle=handle, around=self.around or ("", ""), chunk=self.chunk)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a listing shows of a record: all that stands before its hits."""

    id: str
    time: datetime
    library: str
    texts: Texts
    dropped: int
    query: str | None
    query_hash: str
    answer: str | None
    answer_hash: str | None
    explained: int
    documents: tuple[str, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class Record(Summary):
    """One answer of a log; docs/log-format.md describes the members.

    Texts are as they were written: masked, or None when not kept. `logged_hits` has the order of recording.
    """

    metadata: Mapping[str, Any]
    logged_hits: tuple[LoggedHit, ...]

    @classmethod
    def of(cls, pending: PendingRecord, policy: Policy, *, compute: bool = True, dropped: int = 0) -> Self:
        """What the policy keeps of an answer. `compute` computes explanations that are still pending."""
        if compute:
            free = Hits(hit for hit in pending.hits if hit.brief_handle.reserved is None)
            # What one batch could not give is computed hit by hit, and each says why not.
            with suppress(Exception), at_most(0):
                free.load("sentences")
        given = zip(pending.hits, pending.hit_metadata, strict=True)
        return cls(
            **counted([LoggedHit.of(hit, metadata, pending.query, policy, compute) for hit, metadata in given]),
            id=pending.id,
            time=pending.time,
            library=__version__,
            texts=policy.texts,
            dropped=dropped,
            query=policy.written(pending.query),
            query_hash=digest(pending.query, policy.hash_key),
            answer=policy.written(pending.answer),
            answer_hash=policy.hashed(pending.answer),
            metadata=mask(pending.metadata, policy.redact),
        )

    @cached_property
    def hits(self) -> Hits:
        """The documents as a search returns them, with their explanations."""
        return Hits(hit.hit() for hit in self.logged_hits)

    def pairs(self, index: int) -> Sequence[Pair]:
        """The strongest pairs of hit `index`, with their shares among all pairs; none where it has no explanation."""
        why = self.logged_hits[index].explanation
        return () if why is None else why.pairs

    def asked(self, index: int) -> str | None:
        """The words that hit `index` was retrieved with: the query, unless a chain rewrote it."""
        hit = self.logged_hits[index]
        return self.query if hit.query_hash is None else hit.query

    def to_json(self) -> str:
        """The line that the record is."""
        return self.to_line().decode()

    def to_line(self) -> bytes:
        """One line of JSON, without its newline, with the digest of everything before it as its last member."""
        data = {
            "format": FORMAT,
            "version": VERSION,
            **plain.fields_to_dict(self, _HEAD),
            "hits": [plain.fields_to_dict(hit, _HIT) for hit in self.logged_hits],
            "metadata": dict(self.metadata),
        }
        body = plain.to_json(data, compact=True).encode()[:-1]
        return body + _check(body)

    @classmethod
    def from_line(cls, line: bytes) -> Self:
        """The record of a line that is `whole`."""
        members = _members(line, {**_HEAD, **_BODY})
        return plain.made(cls, {"logged_hits": members.pop("hits"), **members}, "a log record")

    def __repr__(self) -> str:
        return f"Record({self.id}, {self.time:%Y-%m-%dT%H:%M:%S}Z, {len(self.logged_hits)} hits)"


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _stages(stages: Sequence[Stage], compute: bool) -> tuple[Stage, ...]:
    """With the terms of those that are sums of terms."""
    load(stage.split for stage in stages if compute)
    return expanded(stages)


def _written_stage(stage: Stage, policy: Policy) -> Stage:
    """What the policy keeps of a stage; its explanation is not logged."""
    name = mask(stage.name, policy.redact)
    texts = {"query": policy.written(stage.query), "note": policy.written(stage.note)}
    return Stage.from_dict(stage.to_dict() | texts | {"name": name})


def _error_kind(reason: str | None) -> str | None:
    """What a reason says without quoting anything: the kind of an error, where it begins with one."""
    kind, colon, _ = (reason or "").partition(":")
    return kind if colon and kind.isidentifier() else None


def counted(hits: Sequence[LoggedHit]) -> dict[str, Any]:
    """The members of a record that say what its hits are."""
    ids, explained = tuple(hit.id for hit in hits), sum(hit.explanation is not None for hit in hits)
    return {"explained": explained, "documents": ids, "logged_hits": tuple(hits)}


def summary(line: bytes) -> Summary:
    """What stands before the hits of a line: enough for a listing, at a fraction of the cost."""
    at = line.find(_HITS)
    return plain.made(Summary, _members(line if at < 0 else line[:at] + b"}", _HEAD), "a log record")


def whole(line: bytes) -> bool:
    """Whether a line (without its newline) is a record exactly as it was written."""
    return line[-_CHECK_LENGTH:] == _check(line[:-_CHECK_LENGTH])


def _check(body: bytes) -> bytes:
    """The end of a line: the digest of all that stands before it."""
    return f',"check":"{hashlib.blake2b(body, digest_size=8).hexdigest()}"}}'.encode()


def _members(raw: bytes, rows: plain.FieldTable) -> dict[str, Any]:
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"this is not a log record: {error}") from error
    version = data.get("version") if isinstance(data, Mapping) else None
    known = version if isinstance(version, int) and version in READABLE else VERSION
    return plain.fields_from_dict(data, rows, FORMAT, known, "a log record")


def _read_hit(hit: Mapping[str, Any], query: str | None) -> LoggedHit:
    asked = query if hit["query_hash"] is None else hit["query"]
    what = "a hit of a record"
    added: dict[str, Any] = {"stages": [], "chunk": None}  # members that older records lack
    return plain.made(LoggedHit, plain.read_fields({**added, **hit, "asked": asked}, _HIT, what), what)


def _stage_to_dict(stage: Stage) -> dict[str, Any]:
    """Name, kind and rank, and of the other members those that say something."""
    return {name: value for name, value in stage.to_dict().items() if name in _ALWAYS or value not in (None, 0)}


def _read_stage(item: Any) -> Stage:
    known = dict(item if isinstance(item, Mapping) else zip(NAMES, item, strict=False))
    return plain.made(Stage, {name: known[name] for name in NAMES if name in known}, "a stage of a record")


_ALWAYS = ("name", "kind", "rank")
# How members are written and read back. A record's hits stand after all that a listing needs.
_STAGES: plain.Row = (
    lambda stages: [_stage_to_dict(stage) for stage in stages],
    lambda items, data: tuple(map(_read_stage, items)),
)
_METADATA: plain.Row = (None, lambda value, data: plain.to_plain(value))  # without NaN, which cannot be written again
_WHY: plain.Row = (LoggedExplanation.to_dict, LoggedExplanation.from_dict)
_HIT = plain.table(LoggedHit, around=TUPLE, chunk=TUPLE, metadata=_METADATA, explanation=_WHY, stages=_STAGES)
_TIME: plain.Row = (
    lambda when: when.isoformat(timespec="microseconds").replace("+00:00", "Z"),
    lambda text, data: datetime.fromisoformat(text).astimezone(UTC),
)
_HEAD = plain.table(Summary, time=_TIME, documents=TUPLE)
_BODY: plain.FieldTable = {
    "hits": (None, lambda hits, record: tuple(_read_hit(hit, record["query"]) for hit in hits)),
    "metadata": _METADATA,
}
