"""An explanation as a record holds it: its figures, its strongest word pairs, and the whole matrix if asked for.

Words are what a person asks about months later, and what two encoders with different tokenizers have in common, so
pairs are kept by word wherever the texts are known. The matrix, where it is kept, is the explanation's own.
"""

import base64
import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple, Self

import numpy as np

from rag_explain.errors import FormatError
from rag_explain.log.redaction import MASK, Policy, mask
from rag_explain.results import notices
from rag_explain.results import serialization as plain
from rag_explain.results.explanation import FIELDS, Explanation, Pair
from rag_explain.results.notices import KEPT_PAIRS, READING, Notice
from rag_explain.results.readonly import readonly
from rag_explain.texts.tokens import Token

# The codes by which programs know a notice. They are no text of the host.
_CODES = {value for name, value in vars(notices).items() if name.isupper() and isinstance(value, str)}

TUPLE: plain.Row = (list, lambda items, data: tuple(items))  # how a field that is a tuple is written and read
# The fields of an explanation that hold its words. A record has kept pairs instead of them, or a packed matrix; terms
# are not in it.
_WORDS = ("query", "document", "query_tokens", "document_tokens", "matrix", "similarities")
_OUTLINE: plain.FieldTable = {name: row for name, row in FIELDS.items() if name not in (*_WORDS, "terms")}
# The fields in which a computation describes itself: a method of another package may put any string there.
_DESCRIPTIONS = ("method", "settings", "model", "references", "measure", "provenance")
_place = attrgetter("start", "end")  # of a token


class Carried(NamedTuple):
    """A word or sentence of the document by its place, and what it carries over the whole query."""

    start: int
    end: int
    value: float


@dataclass(frozen=True, kw_only=True)
class LoggedExplanation:
    """What a record holds of an explanation; docs/log-format.md describes the members.

    `outline` is the explanation without its tokens: texts as they are written, method, model, score, notices and so on.
    All that its pairs carried is in the one cell of its matrix; its unit is that of `pairs`.
    """

    outline: Explanation
    gap: float | None
    unattributed: float
    size: tuple[int, int]
    absolute: float
    pairs: tuple[Pair, ...]  # strongest first, each with its share among ALL pairs of the original
    metadata_tokens: int
    matrix: str | None  # the whole matrix with its tokens, packed, where it was kept
    carried: tuple[Carried, ...] = ()

    @classmethod
    def of(cls, explanation: Explanation, policy: Policy, query: str | None, document: str | None) -> Self:
        """What the policy keeps. `query` and `document` are the texts as they are written."""
        shown = explanation.in_words()
        absolute = _short(float(np.abs(shown.pairs, dtype=np.float64).sum()))
        top = ((*_offsets(pair), _short(pair.value)) for pair in shown.top_pairs(policy.top))
        described: dict[str, Any] = {name: policy.described(getattr(explanation, name)) for name in _DESCRIPTIONS}
        described["notices"] = tuple(_notice(notice, policy) for notice in explanation.notices)
        described |= _no_tokens(query, document, float(explanation.matrix.sum(dtype=np.float64)))
        return cls(
            outline=replace(explanation, unit=shown.unit, **described),
            gap=explanation.gap,
            unattributed=shown.unattributed,
            size=(len(shown.query_tokens), len(shown.document_tokens)),
            absolute=absolute,
            pairs=_read_pairs(top, {"query": query, "document": document, "absolute": absolute}),
            metadata_tokens=sum(token.part == "metadata" for token in explanation.document_tokens),
            matrix=_packed(explanation, query, document, policy) if policy.matrices else None,
            carried=tuple(Carried(one.start, one.end, _short(one.value)) for one in shown.document_spans()),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data without the texts: the outline's fields and the log's own beside them."""
        return plain.fields_to_dict(self.outline, _OUTLINE) | plain.fields_to_dict(self, _OWN)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], hit: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`; the texts are those of the hit: what was `asked`, and its `text`."""
        query, document = hit["asked"], hit["text"]
        data = {"carried": [], **data, "query": query, "document": document}
        what = "an explanation in this record"
        own, outline = (plain.read_fields(data, table, what) for table in (_OWN, _OUTLINE))
        carried = 0.0 if own["gap"] is None else outline["score"] - own["gap"]
        outline |= _no_tokens(query, document, carried)
        return plain.made(cls, {"outline": plain.made(Explanation, outline, what), **own}, what)

    def explanation(self) -> Explanation:
        """The original where its matrix was kept, else an explanation of the kept pairs that says so by a notice."""
        if self.matrix is not None:
            return replace(self.outline, **_unpacked(self.matrix, self.outline))
        rows = sorted({pair.query for pair in self.pairs}, key=_place)
        carried = {_token(start, end, self.outline.document): value for start, end, value in self.carried}
        columns = sorted({*carried, *(pair.document for pair in self.pairs)}, key=_place)
        matrix = np.zeros((len(rows) + 1, len(columns) + 1))
        for pair in self.pairs:
            matrix[rows.index(pair.query), columns.index(pair.document)] += pair.value
        # What a word carries over all of the query is kept whole: what is not in its kept pairs is the last row's.
        for column, token in enumerate(columns):
            matrix[-1, column] = carried.get(token, matrix[:, column].sum()) - matrix[:, column].sum()
        if self.gap is not None:  # score and gap are the original's, so the corner holds the pairs that were not kept
            matrix[-1, -1] = self.outline.score - self.gap - matrix.sum()
        total = self.outline.score - self.unattributed
        sums = (self.absolute + total) / 2, (total - self.absolute) / 2
        own: dict[str, Any] = {"query_tokens": tuple(rows), "document_tokens": tuple(columns), "sums": sums}
        kept = replace(self.outline, **own, matrix=readonly(matrix))
        count, every = len(self.pairs), self.size[0] * self.size[1]
        text = f"The log kept the strongest {count} of {every} pairs. The other pairs are counted as unattributed here."
        return kept if count == every else kept.with_notices(Notice(KEPT_PAIRS, text))


def cells(pairs: Iterable[Pair]) -> dict[tuple[int, ...], float]:
    """What pairs carry, by their offsets: query start and end, document start and end."""
    return {_offsets(pair): pair.value for pair in pairs}


def all_cells(explanation: Explanation) -> dict[tuple[int, ...], float]:
    """The same for every pair of an explanation."""
    return cells(explanation.top_pairs(explanation.pairs.size))


def _read_pairs(items: Iterable[Any], data: Mapping[str, Any]) -> tuple[Pair, ...]:
    query, document, total = data["query"], data["document"], data["absolute"] or 1.0
    token = cache(_token)  # the strongest words recur in many pairs
    pairs = tuple(
        Pair(token(int(q0), int(q1), query), token(int(d0), int(d1), document), float(value), abs(value) / total)
        for q0, q1, d0, d1, value in items
    )
    if not math.isfinite(sum(pair.value for pair in pairs)):
        raise ValueError("a pair is not a number")
    return pairs


def _read_carried(items: Iterable[Any], data: Mapping[str, Any]) -> tuple[Carried, ...]:
    found = tuple(Carried(int(start), int(end), float(value)) for start, end, value in items)
    if not math.isfinite(sum(one.value for one in found)):
        raise ValueError("what a word carries is not a number")
    return found


_PAIRS: plain.Row = (lambda pairs: [[*_offsets(pair), pair.value] for pair in pairs], _read_pairs)
_CARRIED: plain.Row = (lambda carried: [list(one) for one in carried], _read_carried)
_LOGGED = plain.table(LoggedExplanation, size=TUPLE, pairs=_PAIRS, carried=_CARRIED)
_OWN = {name: row for name, row in _LOGGED.items() if name != "outline"}


def _notice(notice: Notice, policy: Policy) -> Notice:
    """The notice as it is written: a program must still know it, and a text that is not kept leaves a sign."""
    if notice.code in READING:  # they count words, and quote none
        return notice
    code = notice.code if notice.code in _CODES else policy.described(notice.code)
    return replace(notice, code=code, text=policy.written(notice.text) or f"{code} (the text was not kept)")


def _no_tokens(query: str | None, document: str | None, carried: float) -> dict[str, Any]:
    """The fields that hold words, for an explanation without tokens; `carried` is what the matrix sums to."""
    return dict(zip(_WORDS, (query, document, (), (), np.array([[carried]]), None), strict=True)) | {"terms": ()}


def _token(start: int, end: int, text: str | None) -> Token:
    return Token("" if text is None else text[start:end], start, end, "text" if end > start else "special")


def _offsets(pair: Pair) -> tuple[int, ...]:
    return (*_place(pair.query), *_place(pair.document))


def _short(value: float) -> float:
    return float(f"{value:.6g}")  # a float32 has no more to say


def _packed(explanation: Explanation, query: str | None, document: str | None, policy: Policy) -> str:
    """Base64 of zlib of JSON. `query` and `document` are the texts as they are written."""
    arrays = {"matrix": explanation.matrix, "similarities": explanation.similarities}
    words = {
        "unit": explanation.unit,
        "query_tokens": _shown(explanation.query_tokens, query, policy),
        "document_tokens": _shown(explanation.document_tokens, document, policy),
        **{name: None if array is None else _base64(array.astype("<f4").tobytes()) for name, array in arrays.items()},
    }
    return _base64(zlib.compress(plain.to_json(words, compact=True).encode()))


def _unpacked(packed: str, outline: Explanation) -> dict[str, Any]:
    try:
        words = json.loads(zlib.decompress(base64.b64decode(packed)))
        for name in ("matrix", "similarities"):
            if words[name] is not None:
                words[name] = np.frombuffer(base64.b64decode(words[name]), dtype="<f4")
    except (ValueError, LookupError, TypeError, RecursionError, zlib.error) as error:
        raise FormatError(f"the matrix in this record is damaged: {error!r}") from error
    words |= {"query": outline.query, "document": outline.document}
    return plain.read_fields(words, {name: FIELDS[name] for name in (*_WORDS, "unit")}, "the matrix in this record")


def _shown(tokens: Sequence[Token], written: str | None, policy: Policy) -> list[list[Any]]:
    """Tokens whose vocabulary piece says no more than the text that is written beside them."""
    kept = []
    for token in tokens:
        # The texts of prompts and metadata are not in the record, so no redaction hook has seen them.
        unseen = policy.redact is not None and token.part in ("prompt", "metadata")
        hidden = token.part != "special" and (written is None or unseen or MASK in written[token.start : token.end])
        kept.append([token.start, token.end, token.part, "" if hidden else mask(token.piece, policy.redact)])
    return kept


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")
