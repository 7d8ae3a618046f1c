"""An explanation as a record holds it: its figures, its strongest word pairs, and the whole matrix if asked for.

Words are what a person asks about months later, and what two encoders with different tokenizers have in common, so
pairs are kept by word wherever the texts are known. The matrix, where it is kept, is the explanation's own.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from rag_explain.errors import FormatError
from rag_explain.log.redaction import MASK, Policy
from rag_explain.results.explanation import FIELDS, Array, Explanation, Pair
from rag_explain.results.notices import Notice
from rag_explain.results.serialization import (
    FieldTable,
    Read,
    Write,
    fields_to_dict,
    read_fields,
    to_json,
    write_tokens,
)
from rag_explain.texts.tokens import Token, Unit

# The explanation holds the pairs that the log kept, and not all pairs of the original.
KEPT_PAIRS = "kept-pairs"

# The fields of an explanation that hold its words. A record has kept pairs instead of them, or a packed matrix.
_WORDS = ("query", "document", "query_tokens", "document_tokens", "matrix", "similarities")
_OUTLINE: FieldTable = {name: row for name, row in FIELDS.items() if name not in _WORDS}
_WHOLE: FieldTable = {name: FIELDS[name] for name in (*_WORDS, "unit")}


class KeptPair(NamedTuple):
    """One of the strongest pairs: character offsets into the query and the document, and what the pair carries."""

    query_start: int
    query_end: int
    document_start: int
    document_end: int
    value: float


@dataclass(frozen=True)
class PackedMatrix:
    """The whole matrix. Tokens (JSON) and numbers (little-endian float32, row by row) are base64 of zlib."""

    unit: Unit
    tokens: str
    cells: str
    similarities: str | None

    @classmethod
    def of(cls, explanation: Explanation, query: str | None, document: str | None, *, redacted: bool) -> PackedMatrix:
        """Packed. `query` and `document` are the texts as they are written: masked, or None when not kept."""
        tokens = [
            _shown(write_tokens(explanation.query_tokens), query, redacted),
            _shown(write_tokens(explanation.document_tokens), document, redacted),
        ]
        similarities = explanation.similarities
        return cls(
            unit=explanation.unit,
            tokens=_pack(to_json(tokens, compact=True).encode()),
            cells=_pack(explanation.matrix.astype("<f4").tobytes()),
            similarities=None if similarities is None else _pack(similarities.astype("<f4").tobytes()),
        )

    def words(self, query: str | None, document: str | None) -> dict[str, Any]:
        """The fields of an explanation that hold its words."""
        try:
            query_tokens, document_tokens = json.loads(_unpack(self.tokens))
            plain = {
                "query": query,
                "document": document,
                "query_tokens": query_tokens,
                "document_tokens": document_tokens,
                "unit": self.unit,
                "matrix": _numbers(self.cells),
                "similarities": None if self.similarities is None else _numbers(self.similarities),
            }
        except (ValueError, zlib.error) as error:
            raise FormatError(f"the matrix in this record is damaged: {error!r}") from error
        return read_fields(plain, _WHOLE, "the matrix in this record")


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
        matrix: the whole matrix, where it was kept.
    """

    outline: Explanation
    gap: float | None
    unattributed: float
    size: tuple[int, int]
    absolute: float
    pairs: tuple[KeptPair, ...]
    metadata_tokens: int
    matrix: PackedMatrix | None

    @classmethod
    def of(cls, explanation: Explanation, policy: Policy, query: str | None, document: str | None) -> LoggedExplanation:
        """What the policy keeps. `query` and `document` are the texts as they are written."""
        shown = explanation
        if explanation.unit == "token" and explanation.query is not None and explanation.document is not None:
            shown = explanation.by_word()
        n_q, n_d = shown.pairs.shape
        redacted = policy.redact is not None
        return cls(
            outline=replace(explanation, unit=shown.unit, **_no_words(float(explanation.matrix.sum(dtype=np.float64)))),
            gap=explanation.gap,
            unattributed=shown.unattributed,
            size=(n_q, n_d),
            absolute=_short(float(np.abs(shown.pairs, dtype=np.float64).sum())),
            pairs=tuple(
                KeptPair(pair.query.start, pair.query.end, pair.document.start, pair.document.end, _short(pair.value))
                for pair in shown.top_pairs(policy.top)
            ),
            metadata_tokens=sum(token.part == "metadata" for token in explanation.document_tokens),
            matrix=PackedMatrix.of(explanation, query, document, redacted=redacted) if policy.matrices else None,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data: the outline's fields and the log's own beside them."""
        return fields_to_dict(self.outline, _OUTLINE) | fields_to_dict(self, _OWN)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LoggedExplanation:
        """The inverse of `to_dict`."""
        what = "an explanation in this record"
        own, outline = read_fields(data, _OWN, what), read_fields(data, _OUTLINE, what)
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
            return replace(self.outline, **self.matrix.words(query, document))
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
        every = self.size[0] * self.size[1]
        return kept if len(self.pairs) == every else kept.with_notices(_only_kept(len(self.pairs), every))


def table(kind: type[Any], **rows: tuple[Write | None, Read | None]) -> FieldTable:
    """One row per field of a dataclass, which is written and read as it is unless a row says otherwise."""
    return {item.name: rows.get(item.name, (None, None)) for item in fields(kind)}


_PACKED = table(PackedMatrix)
_OWN = table(
    LoggedExplanation,
    size=(list, lambda size, data: tuple(size)),
    pairs=(list, lambda pairs, data: tuple(KeptPair(*pair) for pair in pairs)),
    matrix=(
        lambda matrix: fields_to_dict(matrix, _PACKED),
        lambda matrix, data: PackedMatrix(**read_fields(matrix, _PACKED, "the matrix in this record")),
    ),
)
_OWN = {name: row for name, row in _OWN.items() if name != "outline"}


def _only_kept(kept: int, every: int) -> Notice:
    text = f"The log kept the strongest {kept} of {every} pairs. The other pairs are counted as unattributed here."
    return Notice(KEPT_PAIRS, text)


def _no_words(carried: float) -> dict[str, Any]:
    """The fields that hold words, for an explanation without any; `carried` is what the matrix sums to."""
    nothing: dict[str, Any] = {"query": None, "document": None, "query_tokens": (), "document_tokens": ()}
    return {**nothing, "matrix": np.array([[carried]], dtype=np.float32), "similarities": None}


def _shown(tokens: Sequence[list[Any]], written: str | None, redacted: bool) -> list[list[Any]]:
    """Tokens whose vocabulary piece says no more than the text that is written beside them."""
    kept = []
    for start, end, part, piece in tokens:
        # The text of "metadata" tokens is not in the record, so no redaction hook has seen it.
        unseen = redacted and part == "metadata"
        hidden = part != "special" and (written is None or unseen or MASK in written[start:end])
        kept.append([start, end, part, "" if hidden else piece])
    return kept


def _token(start: int, end: int, text: str | None) -> Token:
    return Token("" if text is None else text[start:end], start, end, "text" if end > start else "special")


def _numbers(packed: str) -> Array:
    return np.frombuffer(_unpack(packed), dtype="<f4")


def _pack(raw: bytes) -> str:
    return base64.b64encode(zlib.compress(raw)).decode("ascii")


def _unpack(packed: str) -> bytes:
    return zlib.decompress(base64.b64decode(packed))


def _short(value: float) -> float:
    return float(f"{value:.6g}")  # a float32 has no more to say
