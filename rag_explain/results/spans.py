"""Pieces of a document with a value each: what `Evidence` is, and what else points at parts of one text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

from rag_explain.results import serialization as plain
from rag_explain.results.display import Paged
from rag_explain.results.notices import Notice, merged
from rag_explain.results.readonly import ReadOnly


class ValuedSpan(NamedTuple):
    """A piece of the document, `document[start:end] == text`, and its value."""

    text: str
    start: int
    end: int
    value: float


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class ValuedSpans(ReadOnly, tuple[ValuedSpan, ...], Paged):
    """A tuple of pieces of one document, with what they are about; equal to any tuple of the same pieces.

    `spans` are all pieces in the order of the document; a kind may hold fewer of them, or in another order.
    """

    FORMAT: ClassVar[str]
    VERSION: ClassVar[int] = 1
    WHAT: ClassVar[str]  # what it is called in an error

    query: str  # the caller's own strings
    document: str
    spans: tuple[ValuedSpan, ...]
    score: float | None = None
    method: str
    model: str = ""
    fingerprint: str = ""
    notices: tuple[Notice, ...] = ()  # what a reader must know before trusting the values

    def __new__(cls, *, spans: tuple[ValuedSpan, ...], **fields: Any) -> Self:
        return super().__new__(cls, spans)

    def top(self, k: int) -> tuple[ValuedSpan, ...]:
        """The k pieces of the largest value, the largest first; of equal ones the first of the document."""
        return best(self.spans, k)

    def with_notices(self, *notices: Notice) -> Self:
        """The same with more to know about it."""
        return replace(self, notices=merged(self.notices, notices)) if notices else self

    def within(self, document: str, start: int) -> Self:
        """The same of a chunk that stands at this character of a document, with offsets into the document."""
        spans = (one._replace(start=one.start + start, end=one.end + start) for one in self.spans)
        return replace(self, document=document, spans=tuple(spans))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: everything that `from_dict` needs, and the format's version."""
        return {"format": self.FORMAT, "version": self.VERSION, **plain.fields_to_dict(self, _rows(type(self)))}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`; refuses data of another format or of another version."""
        return plain.made(cls, plain.fields_from_dict(data, _rows(cls), cls.FORMAT, cls.VERSION, cls.WHAT), cls.WHAT)

    def to_json(self) -> str:
        """`to_dict` as one line of JSON."""
        return plain.to_json(self.to_dict())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} of {len(self.spans)} pieces, {self.method})"


def best(spans: Sequence[ValuedSpan], k: int) -> tuple[ValuedSpan, ...]:
    return tuple(sorted(spans, key=lambda span: -span.value)[: max(0, k)])


def _rows(kind: type[ValuedSpans]) -> plain.FieldTable:
    notices = plain.write_notices, plain.read_notices
    return plain.table(kind, spans=(_write_spans, _read_spans), notices=notices)


def _write_spans(spans: tuple[ValuedSpan, ...]) -> list[list[float]]:
    """Spans without their texts, which their offsets give."""
    return [[span.start, span.end, span.value] for span in spans]


def _read_spans(items: Any, data: Mapping[str, Any]) -> tuple[ValuedSpan, ...]:
    text, found, position = data["document"], [], 0
    for start, end, value in items:
        if not position <= start < end <= len(text) or not plain.is_number(value):
            raise ValueError(f"no such piece of the document: {[start, end, value]!r}")
        found.append(ValuedSpan(text[start:end], start, end, float(value)))
        position = end
    return tuple(found)
