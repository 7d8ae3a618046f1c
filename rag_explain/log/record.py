"""The record: one answer, the documents it came from and why they were found, as one line of JSON.

docs/log-format.md describes the format. A line ends in a digest of all that stands before it, so that half a line, or a
damaged one, is never taken for a record.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from rag_explain import __version__
from rag_explain.errors import FormatError, InvalidInput
from rag_explain.log.compact import LoggedExplanation
from rag_explain.log.redaction import Policy, Texts, digest, mask
from rag_explain.results import serialization as plain
from rag_explain.results.deferred import Deferred, Status, load
from rag_explain.results.explanation import Pair
from rag_explain.results.hits import Hit, Hits

FORMAT, VERSION = "rag_explain.log", 2
_DIGEST_BYTES = 8
_CHECK = re.compile(rb',"check":"([0-9a-f]{%d})"\}$' % (2 * _DIGEST_BYTES))
_CHECK_LENGTH = len(',"check":""}') + 2 * _DIGEST_BYTES
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
    hits: Sequence[Hit] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    context: Any = None  # for the export: where the caller was
    id: str = field(default_factory=new_id)
    time: datetime = field(default_factory=lambda: datetime.now(UTC))

    def __post_init__(self) -> None:
        if not isinstance(self.query, str) or not (self.answer is None or isinstance(self.answer, str)):
            raise InvalidInput("query and answer must be strings (answer may be None)")
        for hit in self.hits:
            if not isinstance(hit, Hit):
                raise InvalidInput(f"hits must be rag_explain.Hit objects, not {type(hit).__name__}")
        self.hits = tuple(self.hits)
        self.hit_metadata = [_copy(hit.metadata) for hit in self.hits]
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
    query: str | None = None  # where a chain rewrote the record's query: what the retriever was asked
    query_hash: str | None = None
    around: tuple[str, str] | None = None  # what was embedded before and after the text
    around_hash: str | None = None  # of both with a zero byte between
    metadata: Mapping[str, Any] = field(default_factory=dict)
    explanation: LoggedExplanation | None = None

    @classmethod
    def of(cls, hit: Hit, metadata: Mapping[str, Any], query: str, policy: Policy, compute: bool) -> LoggedHit:
        """What the policy keeps of a hit for `query`. A pending explanation is computed, or left as pending."""
        why = hit.explanation if compute else hit.handle.peek()
        # The texts into which the explanation's offsets point: a chain may have rewritten the query.
        asked = query if why is None or why.query is None else why.query
        text = hit.text if why is None or why.document is None else why.document
        rewritten = None if asked == query else asked
        shown = policy.written(text)
        around = hit.around if any(hit.around) else None
        reason = hit.reason if hit.reason is None or policy.keep_text else hit.reason.split(":")[0]
        return cls(
            **{name: plain.to_plain(getattr(hit, name)) for name in ("id", "status", *MEASURED)},
            reason=mask(reason, policy.redact),  # what follows the kind of an error may quote the text
            text=shown,
            text_hash=policy.hashed(text),
            query=policy.written(rewritten),
            query_hash=policy.hashed(rewritten),
            around=policy.written(around),
            around_hash=None if around is None else policy.hashed("\0".join(around)),
            metadata=policy.written(metadata) or {},
            explanation=None if why is None else LoggedExplanation.of(why, policy, policy.written(asked), shown),
        )

    def hit(self) -> Hit:
        """The hit as the search returned it, with its explanation as far as it was kept."""
        if self.explanation is not None:
            handle = Deferred.ready(self.explanation.explanation())
        else:
            status: Status = "failed" if self.status == "failed" else "skipped"
            handle = Deferred(None, status=status, reason=self.reason or "it was not computed when it was logged")
        own = {name: getattr(self, name) for name in ("id", "text", "rank", "score", "metric", "metadata")}
        return Hit(**own, handle=handle, around=self.around or ("", ""))


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
    def of(cls, pending: PendingRecord, policy: Policy, *, compute: bool = True, dropped: int = 0) -> Record:
        """What the policy keeps of an answer. `compute` computes explanations that are still pending."""
        if compute:
            with suppress(Exception):  # what one batch could not give is computed hit by hit, and each says why not
                load(hit.handle for hit in pending.hits)
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
        return body + f',"check":"{_check(body)}"}}'.encode()

    @classmethod
    def from_line(cls, line: bytes) -> Record:
        """The record of a line that is `whole`."""
        members = _members(line, _HEAD | _BODY)
        return cls(logged_hits=members.pop("hits"), **members)

    def __repr__(self) -> str:
        return f"Record({self.id}, {self.time:%Y-%m-%dT%H:%M:%S}Z, {len(self.logged_hits)} hits)"


def counted(hits: Sequence[LoggedHit]) -> dict[str, Any]:
    """The members of a record that say what its hits are."""
    ids, explained = tuple(hit.id for hit in hits), sum(hit.explanation is not None for hit in hits)
    return {"explained": explained, "documents": ids, "logged_hits": tuple(hits)}


def summary(line: bytes) -> Summary:
    """What stands before the hits of a line: enough for a listing, at a fraction of the cost."""
    at = line.find(_HITS)
    return Summary(**_members(line if at < 0 else line[:at] + b"}", _HEAD))


def whole(line: bytes) -> bool:
    """Whether a line (without its newline) is a record exactly as it was written."""
    match = _CHECK.search(line[-_CHECK_LENGTH:])
    return match is not None and match[1].decode() == _check(line[:-_CHECK_LENGTH])


def _check(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).hexdigest()


def _members(raw: bytes, rows: plain.FieldTable) -> dict[str, Any]:
    try:
        data = json.loads(raw)
    except ValueError as error:
        raise FormatError(f"this is not a log record: {error}") from error
    return plain.fields_from_dict(data, rows, FORMAT, VERSION, "a log record")


def _read_hit(hit: Mapping[str, Any], query: str | None) -> LoggedHit:
    asked = query if hit["query_hash"] is None else hit["query"]
    return LoggedHit(**plain.read_fields({**hit, "asked": asked}, _HIT, "a hit of a record"))


# How members are written and read back. A record's hits stand after all that a listing needs.
_HIT = plain.table(
    LoggedHit,
    around=(list, lambda parts, hit: tuple(parts)),
    explanation=(
        LoggedExplanation.to_dict,
        lambda why, hit: LoggedExplanation.from_dict(why, hit["asked"], hit["text"]),
    ),
)
_TIME: tuple[plain.Write, plain.Read] = (
    lambda when: when.isoformat(timespec="microseconds").replace("+00:00", "Z"),
    lambda text, data: datetime.fromisoformat(text),
)
_BODY: dict[str, Any] = {
    "hits": (None, lambda hits, record: tuple(_read_hit(hit, record["query"]) for hit in hits)),
    "metadata": (None, None),
}
_HEAD: dict[str, Any] = {**plain.table(Summary, time=_TIME, documents=(list, lambda ids, data: tuple(ids)))}
