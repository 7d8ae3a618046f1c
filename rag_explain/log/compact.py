"""An explanation as a record holds it: its figures, its strongest word pairs, and the whole matrix if asked for.

Words are what a person asks about months later, and what two encoders with different tokenizers have in common, so
pairs are kept by word wherever the texts are known. The matrix, where it is kept, is the explanation's own.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from rag_explain.errors import FormatError
from rag_explain.log.redaction import MASK, Policy
from rag_explain.results import serialization as plain
from rag_explain.results.explanation import FIELDS, Array, Explanation, Pair
from rag_explain.results.notices import Notice
from rag_explain.texts.tokens import Token

# The explanation holds the pairs that the log kept, and not all pairs of the original.
KEPT_PAIRS = "kept-pairs"

# The fields of an explanation that hold its words. A record has kept pairs instead of them, or a packed matrix.
_WORDS = ("query", "document", "query_tokens", "document_tokens", "matrix", "similarities")
_OUTLINE: plain.FieldTable = {name: row for name, row in FIELDS.items() if name not in _WORDS}


class KeptPair(NamedTuple):
    """One of the strongest pairs: character offsets into the query and the document, and what the pair carries."""

    query_start: int
    query_end: int
    document_start: int
    document_end: int
    value: float


@dataclass(frozen=True, kw_only=True)
class LoggedExplanation:
    """What a record holds of an explanation.

    Attributes:
        outline: the explanation without its words: method, model, settings, score, notices and so on. All that the
            words carried is in the one cell of its matrix; its unit is that of `pairs`.
        gap: score - sum of the original's whole matrix; None when the method is not additive.
        unattributed: score - sum of all the original's pairs, in the outline's unit.
        size: how many query and document words the original has, in the outline's unit.
        absolute: sum of |pairs| over all the original's pairs.
        pairs: the strongest pairs, strongest first.
        metadata_tokens: how many tokens of the embedded string lie outside the document's text.
        matrix: the whole matrix with its tokens, packed, where it was kept.
    """

    outline: Explanation
    gap: float | None
    unattributed: float
    size: tuple[int, int]
    absolute: float
    pairs: tuple[KeptPair, ...]
    metadata_tokens: int
    matrix: str | None

    @classmethod
    def of(cls, explanation: Explanation, policy: Policy, query: str | None, document: str | None) -> LoggedExplanation:
        """What the policy keeps. `query` and `document` are the texts as they are written."""
        shown = explanation
        if explanation.unit == "token" and explanation.query is not None and explanation.document is not None:
            shown = explanation.by_word()
        top = [(pair.query, pair.document, _short(pair.value)) for pair in shown.top_pairs(policy.top)]
        return cls(
            outline=replace(explanation, unit=shown.unit, **_no_words(float(explanation.matrix.sum(dtype=np.float64)))),
            gap=explanation.gap,
            unattributed=shown.unattributed,
            size=(len(shown.query_tokens), len(shown.document_tokens)),
            absolute=_short(float(np.abs(shown.pairs, dtype=np.float64).sum())),
            pairs=tuple(KeptPair(q.start, q.end, d.start, d.end, value) for q, d, value in top),
            metadata_tokens=sum(token.part == "metadata" for token in explanation.document_tokens),
            matrix=_packed(explanation, query, document, policy) if policy.matrices else None,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data: the outline's fields and the log's own beside them."""
        return plain.fields_to_dict(self.outline, _OUTLINE) | plain.fields_to_dict(self, _OWN)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LoggedExplanation:
        """The inverse of `to_dict`."""
        own, outline = (plain.read_fields(data, table, "an explanation in this record") for table in (_OWN, _OUTLINE))
        carried = 0.0 if own["gap"] is None else outline["score"] - own["gap"]
        return cls(outline=Explanation(**outline, **_no_words(carried)), **own)

    def top_pairs(self, query: str | None, document: str | None) -> list[Pair]:
        """The kept pairs, strongest first, each with its share among ALL pairs of the original explanation."""
        total = self.absolute or 1.0
        return [
            Pair(_token(q0, q1, query), _token(d0, d1, document), value, abs(value) / total)
            for q0, q1, d0, d1, value in self.pairs
        ]

    def explanation(self, query: str | None, document: str | None) -> Explanation:
        """The original where its matrix was kept, else an explanation of the kept pairs that says so by a notice."""
        if self.matrix is not None:
            return replace(self.outline, **_unpacked(self.matrix, query, document))
        return self._of_kept_pairs(query, document)

    def _of_kept_pairs(self, query: str | None, document: str | None) -> Explanation:
        """Score and gap are the original's. The corner holds the pairs that were not kept, and the notice says so."""
        rows = sorted({pair[0:2] for pair in self.pairs})
        columns = sorted({pair[2:4] for pair in self.pairs})
        matrix = np.zeros((len(rows) + 1, len(columns) + 1))
        for pair in self.pairs:
            matrix[rows.index(pair[0:2]), columns.index(pair[2:4])] += pair.value
        if self.gap is not None:
            matrix[-1, -1] = self.outline.score - self.gap - matrix.sum()
        kept = replace(
            self.outline,
            query=query,
            document=document,
            query_tokens=tuple(_token(start, end, query) for start, end in rows),
            document_tokens=tuple(_token(start, end, document) for start, end in columns),
            matrix=matrix.astype(np.float32),
        )
        count, every = len(self.pairs), self.size[0] * self.size[1]
        text = f"The log kept the strongest {count} of {every} pairs. The other pairs are counted as unattributed here."
        return kept if count == every else kept.with_notices(Notice(KEPT_PAIRS, text))


def cells(explanation: Explanation) -> dict[tuple[int, ...], float]:
    """All pairs of an explanation by their offsets, as in `KeptPair`."""
    return {
        (q.start, q.end, d.start, d.end): float(explanation.pairs[i, j])
        for i, q in enumerate(explanation.query_tokens)
        for j, d in enumerate(explanation.document_tokens)
    }


_LOGGED = plain.table(
    LoggedExplanation,
    size=(list, lambda size, data: tuple(size)),
    pairs=(list, lambda pairs, data: tuple(KeptPair(*pair) for pair in pairs)),
)
_OWN = {name: row for name, row in _LOGGED.items() if name != "outline"}


def _no_words(carried: float) -> dict[str, Any]:
    """The fields that hold words, for an explanation without any; `carried` is what the matrix sums to."""
    nothing: dict[str, Any] = {"query": None, "document": None, "query_tokens": (), "document_tokens": ()}
    return {**nothing, "matrix": np.array([[carried]], dtype=np.float32), "similarities": None}


def _token(start: int, end: int, text: str | None) -> Token:
    return Token("" if text is None else text[start:end], start, end, "text" if end > start else "special")


def _short(value: float) -> float:
    return float(f"{value:.6g}")  # a float32 has no more to say


# ---------------------------------------------------------------------- the whole matrix


def _packed(explanation: Explanation, query: str | None, document: str | None, policy: Policy) -> str:
    """Base64 of zlib of JSON. `query` and `document` are the texts as they are written."""
    words = {
        "unit": explanation.unit,
        "query_tokens": _shown(explanation.query_tokens, query, policy),
        "document_tokens": _shown(explanation.document_tokens, document, policy),
        "matrix": _base64(explanation.matrix.astype("<f4").tobytes()),
        "similarities": None,
    }
    if explanation.similarities is not None:
        words["similarities"] = _base64(explanation.similarities.astype("<f4").tobytes())
    return _base64(zlib.compress(plain.to_json(words, compact=True).encode()))


def _unpacked(packed: str, query: str | None, document: str | None) -> dict[str, Any]:
    try:
        words = json.loads(zlib.decompress(base64.b64decode(packed)))
        for name in ("matrix", "similarities"):
            words[name] = None if words[name] is None else _numbers(words[name])
    except (ValueError, LookupError, TypeError, zlib.error) as error:
        raise FormatError(f"the matrix in this record is damaged: {error!r}") from error
    words |= {"query": query, "document": document}
    return plain.read_fields(words, {name: FIELDS[name] for name in (*_WORDS, "unit")}, "the matrix in this record")


def _shown(tokens: Sequence[Token], written: str | None, policy: Policy) -> list[list[Any]]:
    """Tokens whose vocabulary piece says no more than the text that is written beside them."""
    kept = []
    for token in tokens:
        # The text of "metadata" tokens is not in the record, so no redaction hook has seen it.
        unseen = policy.redact is not None and token.part == "metadata"
        hidden = token.part != "special" and (written is None or unseen or MASK in written[token.start : token.end])
        kept.append([token.start, token.end, token.part, "" if hidden else token.piece])
    return kept


def _numbers(packed: str) -> Array:
    return np.frombuffer(base64.b64decode(packed), dtype="<f4")


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")
