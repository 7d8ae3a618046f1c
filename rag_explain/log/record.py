"""The record: one answer, the documents it came from and why they were found, as one line of JSON.

The format is described in docs/log-format.md and versioned here. A line ends in a digest of all that stands before it,
so that half a line, or a damaged one, is never taken for a record.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from rag_explain import __version__
from rag_explain.errors import FormatError, InvalidInput
from rag_explain.log.compact import compact, expand, kept_pairs
from rag_explain.log.redaction import Redactor, mask, mask_all
from rag_explain.results.deferred import Deferred
from rag_explain.results.explanation import Explanation, Pair
from rag_explain.results.hits import Hit, Hits
from rag_explain.results.serialization import to_json, to_plain

FORMAT = "rag_explain.log"
VERSION = 1
_DIGEST_BYTES = 8
_CHECK = re.compile(rb',"check":"([0-9a-f]{%d})"\}$' % (2 * _DIGEST_BYTES))
_CHECK_LENGTH = len(',"check":""}') + 2 * _DIGEST_BYTES
_HITS = b',"hits":['


@dataclass(frozen=True)
class Policy:
    """What of an answer is written.

    Attributes:
        top: how many word pairs of each explanation.
        matrices: whether whole matrices are kept beside them.
        keep_text: False writes offsets, weights and hashes, but no text at all.
        redact: gives the spans of a text that must not be written.
        hash_key: makes the hashes keyed, so that nobody without the key can confirm a guessed text.
    """

    top: int = 20
    matrices: bool = False
    keep_text: bool = True
    redact: Redactor | None = None
    hash_key: bytes | None = None

    def __post_init__(self) -> None:
        if self.top < 0:
            raise InvalidInput(f"top must be 0 or more pairs, not {self.top}")
        if self.hash_key is not None and len(self.hash_key) < 16:
            raise InvalidInput(
                "hash_key must have at least 16 bytes, or it can be guessed: use secrets.token_bytes(32)"
            )


@dataclass(frozen=True)
class Entry:
    """An answer that is on its way into the log. Metadata are copies: the caller may change the originals."""

    id: str
    time: datetime
    query: str
    answer: str | None
    hits: tuple[Hit, ...]
    hit_metadata: tuple[Mapping[str, Any], ...]
    metadata: Mapping[str, Any]
    context: Any = None  # for the export: where the caller was

    @classmethod
    def of(cls, query: str, answer: str | None, hits: Sequence[Hit], metadata: Mapping[str, Any] | None) -> Entry:
        """A new entry with a new id."""
        if not isinstance(query, str) or not (answer is None or isinstance(answer, str)):
            raise InvalidInput("query and answer must be strings (answer may be None)")
        for hit in hits:
            if not isinstance(hit, Hit):
                raise InvalidInput(f"hits must be rag_explain.Hit objects, not {type(hit).__name__}")
        now = datetime.now(UTC)
        copies = tuple(_copy(hit.metadata) for hit in hits)
        return cls(new_id(), now, query, answer, tuple(hits), copies, _copy(metadata or {}))


def new_id() -> str:
    """32 hexadecimal digits: 12 of the time in milliseconds, so that ids sort by time, and 20 at random."""
    return f"{time.time_ns() // 1_000_000:012x}{secrets.token_hex(10)}"


def _copy(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        copy: Mapping[str, Any] = to_plain(metadata)
        return copy
    except Exception as error:  # an object in it that cannot be shown, or that holds itself: not worth an answer
        return {"unreadable": type(error).__name__}


# ---------------------------------------------------------------------- writing


def encode(entry: Entry, policy: Policy, *, compute: bool = True, dropped: int = 0) -> bytes:
    """The entry as one line of JSON, without its newline.

    `compute` decides about explanations that nobody has looked at yet: computed now, or written as pending.
    """
    query = _written(entry.query, policy)
    hits = [
        _hit(hit, metadata, entry.query, policy, compute)
        for hit, metadata in zip(entry.hits, entry.hit_metadata, strict=True)
    ]
    return seal(
        {
            "format": FORMAT,
            "version": VERSION,
            "id": entry.id,
            "time": entry.time.isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "library": __version__,
            "text": _text_mode(policy),
            "dropped": dropped,
            "query": {"text": query, "hash": digest(entry.query, policy.hash_key)},
            "answer": _text(entry.answer, policy),
            "explained": sum(hit["explanation"] is not None for hit in hits),
            "documents": [hit["id"] for hit in hits],
            # A listing reads no further than this: what stands above is all it needs.
            "hits": hits,
            "metadata": mask_all(entry.metadata, policy.redact),
        }
    )


def seal(data: Mapping[str, Any]) -> bytes:
    """One line of JSON with the digest of everything before it as its last member."""
    body = to_json({key: value for key, value in data.items() if key != "check"}, compact=True).encode()[:-1]
    return body + f',"check":"{_check(body)}"}}'.encode()


def digest(text: str, key: bytes | None = None) -> str:
    """`sha256:...` of the UTF-8 text, or `hmac-sha256:...` with a key."""
    raw = text.encode("utf-8", "surrogatepass")
    if key is None:
        return "sha256:" + hashlib.sha256(raw).hexdigest()
    return "hmac-sha256:" + hmac.new(key, raw, hashlib.sha256).hexdigest()


def digest_around(around: Sequence[str], key: bytes | None = None) -> str:
    """The digest of what was embedded before and behind a text."""
    return digest("\0".join(around), key)


def _hit(hit: Hit, metadata: Mapping[str, Any], query: str, policy: Policy, compute: bool) -> dict[str, Any]:
    explanation = hit.explanation if compute or hit.status == "ready" else None
    text = hit.text
    asked = query
    if explanation is not None:
        text = text if explanation.document is None else explanation.document
        asked = query if explanation.query is None else explanation.query
    written = None if text is None else _written(text, policy)
    reason = hit.reason
    if reason is not None and not policy.keep_text:
        reason = reason.split(":")[0]  # an error message may quote the text
    data: dict[str, Any] = {
        "id": hit.id,
        "rank": hit.rank,
        "score": to_plain(hit.score),
        "metric": hit.metric,
        "similarity": to_plain(hit.similarity),
        "gap": to_plain(hit.gap),
        "status": hit.status,
        "reason": reason if reason is None else mask(reason, policy.redact),
        "hash": None if text is None else digest(text, policy.hash_key),
        "text": written,
        "metadata": mask_all(metadata, policy.redact) if policy.keep_text else {},
        "explanation": None,
    }
    if asked != query:  # the chain put its own words to the retriever: offsets point into those
        data["query"] = _text(asked, policy)
    if any(hit.around):  # what was embedded with the text: without it nobody could compute the explanation again
        data["around"] = {
            "text": [_written(part, policy) for part in hit.around] if policy.keep_text else None,
            "hash": digest_around(hit.around, policy.hash_key),
        }
    if explanation is not None:
        shown = _written(asked, policy)
        data["explanation"] = compact(
            explanation,
            top=policy.top,
            matrix=policy.matrices,
            query=shown,
            document=written,
            redacted=policy.redact is not None,
        )
    return data


def _written(text: str, policy: Policy) -> str | None:
    return mask(text, policy.redact) if policy.keep_text else None


def _text(text: str | None, policy: Policy) -> dict[str, Any] | None:
    return None if text is None else {"text": _written(text, policy), "hash": digest(text, policy.hash_key)}


def _text_mode(policy: Policy) -> str:
    if not policy.keep_text:
        return "none"
    return "kept" if policy.redact is None else "redacted"


def _check(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).hexdigest()


# ---------------------------------------------------------------------- reading


def whole(line: bytes) -> bool:
    """Whether a line (without its newline) is a record exactly as it was written."""
    match = _CHECK.search(line[-_CHECK_LENGTH:])
    return match is not None and match[1].decode() == _check(line[:-_CHECK_LENGTH])


def head(line: bytes) -> dict[str, Any]:
    """What stands before the hits: enough for a listing, at a fraction of the cost."""
    at = line.find(_HITS)
    return _parsed(line if at < 0 else line[:at] + b"}")


def decode(line: bytes) -> Record:
    """The record of a line that is `whole`."""
    return Record(_parsed(line))


def _parsed(raw: bytes) -> dict[str, Any]:
    try:
        data = json.loads(raw)
    except ValueError as error:
        raise FormatError(f"this is not a log record: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise FormatError(f"this is not a log record: its format is not {FORMAT!r}")
    if data.get("version") != VERSION:
        raise FormatError(f"log version {data.get('version')!r} cannot be read: this library reads {VERSION}")
    return data


@dataclass(frozen=True, eq=False)
class Record:
    """One answer read back. `data` is the record as to_plain data; the rest are views of it."""

    data: Mapping[str, Any]

    @property
    def id(self) -> str:
        """The id that `ExplanationLog.record` returned."""
        return str(self.data["id"])

    @property
    def time(self) -> datetime:
        """When the answer was recorded, in UTC."""
        return datetime.fromisoformat(self.data["time"])

    @property
    def query(self) -> str | None:
        """The query, None where text was not kept."""
        return _string(self.data["query"]["text"])

    @property
    def answer(self) -> str | None:
        """The answer, None where there was none or text was not kept."""
        return None if self.data["answer"] is None else _string(self.data["answer"]["text"])

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The caller's own data about the answer."""
        return dict(self.data["metadata"])

    @cached_property
    def hits(self) -> Hits:
        """The documents in the order they were recorded, with their explanations."""
        return Hits(self._hit(item) for item in self.data["hits"])

    def pairs(self, index: int) -> list[Pair]:
        """The strongest pairs of hit `index`, with their shares among all pairs; none where it has no explanation."""
        item = self.data["hits"][index]
        explanation = item["explanation"]
        return [] if explanation is None else kept_pairs(explanation, self._asked(item), item["text"])

    def asked(self, index: int) -> str | None:
        """The words that hit `index` was retrieved with: the query, unless a chain rewrote it."""
        return self._asked(self.data["hits"][index])

    def _asked(self, item: Mapping[str, Any]) -> str | None:
        return _string(item["query"]["text"]) if item.get("query") else self.query

    def _hit(self, item: Mapping[str, Any]) -> Hit:
        handle: Deferred[Explanation] = Deferred(
            None, status="skipped", reason=item["reason"] or "it was not computed when it was logged"
        )
        if item["explanation"] is not None:
            handle = Deferred.ready(self._explanation(item))
        elif item["status"] == "failed":
            handle = Deferred(None, status="failed", reason=item["reason"])
        before, after = (item.get("around") or {}).get("text") or ("", "")
        return Hit(
            **{name: item[name] for name in ("id", "text", "rank", "score", "metric", "metadata")},
            handle=handle,
            around=(str(before), str(after)),
        )

    def _explanation(self, item: Mapping[str, Any]) -> Explanation:
        return expand(item["explanation"], self._asked(item), item["text"])

    def to_json(self) -> str:
        """The line that the record is."""
        return seal(self.data).decode()

    def __repr__(self) -> str:
        return f"Record({self.id}, {self.data['time']}, {len(self.data['hits'])} hits)"


def _string(value: Any) -> str | None:
    return None if value is None else str(value)
