"""Explanation: which words of a query met which words of a document, and how much of the score each pair carries.

Frozen, with read-only arrays: threads, caches and logs can share one. All numbers are in score units, none is scaled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from rag_explain.errors import FormatError, InvalidInput
from rag_explain.probes import Probes
from rag_explain.results import serialization as plain
from rag_explain.results.display import Displayable
from rag_explain.results.links import Link, find_links
from rag_explain.results.notices import LEFT_OUT, Notice, cut_sides, is_of_chunk, merged, stand_in_reason
from rag_explain.results.readonly import ReadOnly, readonly, readonly_mapping
from rag_explain.results.spans import ValuedSpan, best
from rag_explain.results.terms import Term, read_terms, write_terms
from rag_explain.results.trust import Trust
from rag_explain.texts.tokens import Role, Token, Unit
from rag_explain.texts.units import Index, text_units

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array = NDArray[np.float32]
FORMAT, VERSION = "rag_explain.explanation", 2


@dataclass(frozen=True, slots=True)
class Pair:
    """One cell of an explanation: what a query token and a document token carry together.

    `value` is in score units; `share` is |value| / sum of |pairs|, and never "per cent of the score".
    """

    query: Token
    document: Token
    value: float
    share: float


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Explanation(ReadOnly, Displayable):
    """Why a document scored what it did for a query.

    `matrix` is (n_q + 1, n_d + 1) float32 in score units; its last row and column are the rest, which no token owns.
    `similarities` are (n_q, n_d) cosines of all token pairs, for alignment methods. `terms` are what the score is a sum
    over, for scorers that compare words of a vocabulary.
    """

    query: str | None  # the caller's own strings; None where text is not kept
    document: str | None
    query_tokens: tuple[Token, ...]
    document_tokens: tuple[Token, ...]
    matrix: Array
    score: float  # the encoder's own similarity, computed apart from the matrix
    method: str
    additive: bool = True  # whether the matrix is meant to sum to the score
    unit: Unit = "token"
    settings: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""
    fingerprint: str = ""
    probes: Probes | None = None  # what the model computes for a few texts: for a log to keep, not part of `to_dict`
    references: Mapping[str, float] | None = None  # of integrated Jacobians: tell how far they can be trusted
    similarities: Array | None = None
    terms: tuple[Term, ...] = ()
    measure: str = "cosine"  # what the score is: "cosine", "dot", "MaxSim" and so on
    returned: float | None = None  # what the user saw, where that is a function of the score, such as a sigmoid
    error: float | None = None  # the largest relative error that the method reports of its own arithmetic, if any
    notices: tuple[Notice, ...] = ()  # what a reader must know before trusting the numbers
    provenance: Mapping[str, Any] = field(default_factory=dict)  # which path served it, and what that cost
    sums: tuple[float, float] | None = None  # of all pairs above and below zero, where the matrix has only some of them

    def __post_init__(self) -> None:
        matrix = readonly(self.matrix)
        expected = (len(self.query_tokens) + 1, len(self.document_tokens) + 1)
        if matrix.shape != expected:
            raise InvalidInput(f"matrix must be {expected}: one row per token and one for the rest, not {matrix.shape}")
        if not np.isfinite(matrix).all() or not np.isfinite(self.score):
            raise InvalidInput("the matrix or the score holds NaN or infinity: the encoder's output is not usable")
        values: dict[str, Any] = {"matrix": matrix, "score": float(self.score), "notices": tuple(self.notices)}
        values["similarities"] = None if self.similarities is None else readonly(self.similarities)
        for name in ("settings", "provenance", "references"):
            values[name] = readonly_mapping(getattr(self, name))
        # A text that is not kept must not live on in what was read from it.
        values["terms"] = () if self.query is None or self.document is None else tuple(self.terms)
        for text, name in ((self.query, "query_tokens"), (self.document, "document_tokens")):
            values[name] = tuple(one if text is not None else one.without_text() for one in getattr(self, name))
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def pairs(self) -> Array:
        """(n_q, n_d): what each pair of tokens carries, in score units."""
        return self.matrix[:-1, :-1]

    @property
    def gap(self) -> float | None:
        """score - matrix.sum(): zero up to rounding when the explanation is exact; None when not additive."""
        return self.score - float(self.matrix.sum(dtype=np.float64)) if self.additive else None

    @property
    def surrogate(self) -> str | None:
        """Why what is explained is not what the retriever scored, or None when it is."""
        return stand_in_reason(self.notices)

    @property
    def truncated(self) -> tuple[Role, ...]:
        """The sides ("query", "document") of which the encoder read only a part."""
        return cut_sides(self.notices)

    @property
    def trust(self) -> Trust:
        """How far the numbers are to be trusted: the sums of either sign, and what the papers warn of."""
        return Trust.of(self)

    def with_notices(self, *notices: Notice) -> Explanation:
        """The same explanation with more to know about it."""
        return replace(self, notices=merged(self.notices, notices)) if notices else self

    def within(self, document: str, start: int) -> Explanation:
        """The same explanation, of a chunk that stands at this character of a document, shown in the document."""
        tokens = (replace(one, start=one.start + start, end=one.end + start) for one in self.document_tokens)
        return replace(self, document=document, document_tokens=tuple(tokens))

    @property
    def unattributed(self) -> float:
        """score - pairs.sum(): what no pair of this unit carries (biases; by words also special tokens)."""
        return self.score - float(self.pairs.sum(dtype=np.float64))

    def top_cells(self, k: int = 10) -> list[tuple[int, int]]:
        """Where in `pairs` the k largest |values| are, largest first; ties keep reading order."""
        order = np.argsort(-np.abs(self.pairs), axis=None, kind="stable")[: max(0, k)]
        return [divmod(int(flat), len(self.document_tokens)) for flat in order]

    def top_pairs(self, k: int = 10) -> list[Pair]:
        """The k pairs with the largest |value|, largest first; ties keep reading order."""
        total = float(np.abs(self.pairs, dtype=np.float64).sum()) or 1.0
        cells = ((i, j, float(self.pairs[i, j])) for i, j in self.top_cells(k))
        return [Pair(self.query_tokens[i], self.document_tokens[j], value, abs(value) / total) for i, j, value in cells]

    def document_saliency(self) -> Array:
        """(n_d,): what each document token carries over the whole query, special tokens and rest included.

        In score units; with what no token of the document carries they sum to the score.
        """
        saliency: Array = self.matrix[:, :-1].sum(axis=0)
        return saliency

    def query_saliency(self) -> Array:
        """(n_q,): what each query token carries over the whole document, in score units."""
        saliency: Array = self.matrix[:-1].sum(axis=1)
        return saliency

    def highlights(self, k: int = 5) -> tuple[ValuedSpan, ...]:
        """The k pieces of the document that carry most, with their character offsets; largest first."""
        return best(self.document_spans(), k)

    def document_spans(self) -> tuple[ValuedSpan, ...]:
        """Every piece of the document's text with what it carries, in the document's order."""
        carried = zip(self.document_tokens, self.document_saliency().tolist(), strict=True)
        return tuple(ValuedSpan(one.text, one.start, one.end, value) for one, value in carried if one.part == "text")

    def links(self, k: int | None = None) -> tuple[Link, ...]:
        """Words and phrases of both texts that belong together, those that carry most first: k of them, or all."""
        words = self.by_word()
        found = find_links(words.pairs, words.query_tokens, words.document_tokens, (self.query, self.document))
        return found if k is None else found[: max(0, k)]

    def by_word(self) -> Explanation:
        """The same explanation by words: pieces are summed; special tokens and prompts go to the rest."""
        return self.grouped("word")

    def in_words(self) -> Explanation:
        """By words where tokens can be joined to some, which takes the texts; else the explanation itself."""
        is_readable = self.query is not None and self.document is not None
        return self.by_word() if self.unit == "token" and is_readable else self

    def by_sentence(self) -> Explanation:
        """The same explanation by sentences of the document and words of the query."""
        return self.grouped("sentence")

    @property
    def can_be_grouped(self) -> bool:
        """Whether a coarser unit is the sum of this one: not where parts were left out, each by itself."""
        return all(notice.code != LEFT_OUT for notice in self.notices)

    def grouped(self, unit: Unit) -> Explanation:
        """The same explanation in a coarser unit; in its own unit, the explanation itself."""
        if self.unit == unit:
            return self
        if self.unit == "sentence":
            raise InvalidInput("an explanation by sentences cannot be split into words again: group the original")
        if not self.can_be_grouped:
            what = f"what the score loses without a {unit} is not the sum of what it loses without its {self.unit}s"
            raise InvalidInput(f'{what}: ask for unit="{unit}" when explaining')
        if self.query is None or self.document is None:
            raise InvalidInput("words cannot be found without the texts: group the explanation before dropping them")
        cut = self.truncated
        query_tokens, rows = text_units(self.query_tokens, self.query, "word", truncated="query" in cut)
        is_cut = "document" in cut or is_of_chunk(self.notices)
        document_tokens, columns = text_units(self.document_tokens, self.document, unit, truncated=is_cut)
        shape = (len(query_tokens) + 1, len(document_tokens) + 1)
        similarities = self.similarities
        return replace(
            self,
            query_tokens=query_tokens,
            document_tokens=document_tokens,
            matrix=summed(self.matrix, rows, columns, shape),
            similarities=None if similarities is None else _largest(similarities, rows, columns, shape),
            unit=unit,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: everything that `from_dict` needs, the format's version, and the sums to look at."""
        sums = {"gap": self.gap, "unattributed": self.unattributed, "surrogate": self.surrogate}
        sums["trust"] = plain.to_plain(asdict(self.trust))
        return {"format": FORMAT, "version": VERSION, **plain.fields_to_dict(self, FIELDS), **sums}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Explanation:
        """The inverse of `to_dict`; refuses data of another format or of another version."""
        if isinstance(data, Mapping):
            data = {"terms": [], **data}
        values = plain.fields_from_dict(data, FIELDS, FORMAT, VERSION, "an explanation")
        try:
            return cls(**values)
        except (TypeError, ValueError) as error:
            raise FormatError(f"the explanation is damaged: {error}") from error

    def to_json(self) -> str:
        """`to_dict` as one line of JSON."""
        return plain.to_json(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> Explanation:
        """The inverse of `to_json`."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise FormatError(f"this is not JSON: {error}") from error
        return cls.from_dict(data)

    def plot(self, kind: Literal["heatmap", "connections"] = "heatmap", path: str | Path | None = None) -> Figure:
        """A figure for a paper; also saved to `path` (.png, .svg, .pdf) when one is given. Extra: `plot`."""
        from rag_explain.render.plot import plot

        return plot(self, kind, path)

    def __repr__(self) -> str:
        n_q, n_d = self.pairs.shape
        return f"Explanation({self.method}, {n_q} x {n_d} {self.unit}s, score={self.score:.4f})"


FIELDS = plain.table(
    Explanation,
    ("probes", "sums"),
    query_tokens=(plain.write_tokens, plain.read_tokens("query")),
    document_tokens=(plain.write_tokens, plain.read_tokens("document")),
    matrix=(np.ndarray.tolist, plain.read_matrix(rest=1)),
    unit=(None, plain.read_unit),
    settings=(dict, None),
    references=(dict, None),
    similarities=(np.ndarray.tolist, plain.read_matrix(rest=0)),
    terms=(write_terms, read_terms),
    notices=(plain.write_notices, plain.read_notices),
    provenance=(dict, None),
)


def summed(matrix: NDArray[np.float32], rows: Index, columns: Index, shape: tuple[int, int]) -> NDArray[np.float32]:
    """A matrix (n_q + 1, n_d + 1) with rows and columns summed by their indices; -1 and the rest go to the last."""
    total = np.zeros(shape)
    np.add.at(total, (np.append(rows, -1)[:, None], np.append(columns, -1)[None, :]), matrix)
    return total.astype(np.float32)


def _largest(values: NDArray[np.float32], rows: Index, columns: Index, shape: tuple[int, int]) -> NDArray[np.float32]:
    """The largest of the values (n_q, n_d) in each pair of units; `shape` is that of the matrix, with a rest."""
    best = np.full(shape, -np.inf)
    np.maximum.at(best, (rows[:, None], columns[None, :]), values)
    return best[:-1, :-1].astype(np.float32)
