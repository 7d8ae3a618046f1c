"""The nouns of the library: Token, Factors, Explanation, Pair, Hit.

All are frozen and hold numpy arrays that are read-only: threads, caches and logs can share one object.
Nothing here is normalised: every number is in score units, and scaling for colours belongs to rendering.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, overload

import numpy as np
from numpy.typing import NDArray

from rag_explain.drawn import Drawn
from rag_explain.errors import InvalidInput
from rag_explain.frozen import Frozen, frozen, readonly
from rag_explain.plain import (
    explanation_from_dict,
    explanation_from_json,
    explanation_to_dict,
    plain,
    to_json,
)
from rag_explain.segments import Span, group, sentence_spans, word_spans

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Part = Literal["text", "special", "prompt", "metadata"]
Unit = Literal["token", "word", "sentence"]
Role = Literal["query", "document"]
Status = Literal["ready", "pending", "skipped", "failed"]
Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Token:
    """One token, word or sentence of a text, and where it stands in the caller's own string.

    `text` is the caller's `text[start:end]`. A token that is not part of the caller's text (a special token,
    a prompt, metadata put in front) has `start == end` and an empty `text`; `piece` still names it.
    """

    text: str
    start: int
    end: int
    part: Part = "text"
    piece: str = ""

    @property
    def label(self) -> str:
        """What to show a person: the text where there is some, else the vocabulary piece."""
        return self.text or self.piece

    def without_text(self) -> Token:
        """The same token where text is not kept: only special tokens keep their name."""
        return Token("", self.start, self.end, self.part, self.piece if self.part == "special" else "")


@dataclass(frozen=True, slots=True)
class Embedded:
    """A text inside the string that was really embedded, when the two differ.

    LlamaIndex, for one, embeds metadata and text together. `string` is what the encoder read, `string[start:end]` the
    caller's text; offsets of an explanation point into the text, and tokens outside it are "metadata".
    """

    string: str
    start: int = 0
    end: int = -1

    def __post_init__(self) -> None:
        if self.end == -1 and isinstance(self.string, str):
            object.__setattr__(self, "end", len(self.string))

    @property
    def text(self) -> str:
        """The caller's own text."""
        return self.string[self.start : self.end]

    @property
    def around(self) -> tuple[str, str]:
        """What the encoder read before and behind the text."""
        return self.string[: self.start], self.string[self.end :]


@dataclass(frozen=True, eq=False, kw_only=True)
class Factors(Frozen):
    """One text's half of every explanation: `embedding = rows.sum(0) + rest`, up to `error`.

    Attributes:
        tokens: the n tokens that the rows belong to.
        rows: (n, h) float32, what each token contributes to the embedding.
        rest: (h,) float32, what no token owns.
        embedding: (h,) float32, the encoder's own embedding, before it is divided by `norm`.
        norm: the number that the embedding is divided by in the score (1.0 for a dot product).
        error: |rows.sum(0) + rest - embedding| / |embedding|, measured, not assumed.
        truncated: whether the encoder saw only the beginning of the text.
    """

    tokens: tuple[Token, ...]
    rows: Array
    rest: Array
    embedding: Array
    norm: float
    role: Role
    method: str
    settings: Mapping[str, Any]
    fingerprint: str
    unit: Unit = "token"
    truncated: bool = False
    error: float = 0.0
    references: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        rows = readonly(self.rows)
        if rows.ndim != 2 or rows.shape[0] != len(self.tokens):
            raise InvalidInput(f"rows must be ({len(self.tokens)}, h), one row per token, not {rows.shape}")
        for name in ("rest", "embedding"):
            vector = readonly(getattr(self, name))
            if vector.shape != (rows.shape[1],):
                raise InvalidInput(f"{name} must be ({rows.shape[1]},), not {vector.shape}")
            object.__setattr__(self, name, vector)
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "tokens", tuple(self.tokens))
        for name in ("settings", "references"):
            object.__setattr__(self, name, frozen(getattr(self, name)))

    def __repr__(self) -> str:
        n, h = self.rows.shape
        return f"Factors({self.role}, {n} {self.unit}s x {h}, method={self.method!r}, error={self.error:.1e})"


@dataclass(frozen=True, slots=True)
class Pair:
    """One cell of an explanation: what a query token and a document token carry together.

    `value` is in score units; `share` is |value| / sum of |pairs|, and never "per cent of the score".
    """

    query: Token
    document: Token
    value: float
    share: float


@dataclass(frozen=True, slots=True)
class Highlight:
    """A piece of the document, `document[start:end] == text`, and what it carries, in score units."""

    text: str
    start: int
    end: int
    value: float


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Explanation(Frozen, Drawn):
    """Why a document scored what it did for a query.

    Attributes:
        query, document: the caller's own strings; None where text is not kept.
        matrix: (n_q + 1, n_d + 1) float32 in score units; last row and column: the rest, which no token owns.
        score: the encoder's own similarity, computed apart from the matrix.
        additive: whether the matrix is meant to sum to the score.
        references: reference similarities of integrated Jacobians, which tell how far they can be trusted.
        similarities: (n_q, n_d) cosines of all token pairs, for alignment methods.
        surrogate: why what is explained is not what the retriever scored, or None when it is.
        truncated: the sides ("query", "document") of which the encoder saw only a part.
        provenance: which path served this explanation and what it cost.
    """

    query: str | None
    document: str | None
    query_tokens: tuple[Token, ...]
    document_tokens: tuple[Token, ...]
    matrix: Array
    score: float
    method: str
    additive: bool = True
    unit: Unit = "token"
    settings: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""
    fingerprint: str = ""
    references: Mapping[str, float] | None = None
    similarities: Array | None = None
    surrogate: str | None = None
    truncated: tuple[Role, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        matrix = readonly(self.matrix)
        expected = (len(self.query_tokens) + 1, len(self.document_tokens) + 1)
        if matrix.shape != expected:
            raise InvalidInput(f"matrix must be {expected}: one row per token and one for the rest, not {matrix.shape}")
        if not np.isfinite(matrix).all() or not np.isfinite(self.score):
            raise InvalidInput("the matrix or the score holds NaN or infinity: the encoder's output is not usable")
        object.__setattr__(self, "matrix", matrix)
        if self.similarities is not None:
            object.__setattr__(self, "similarities", readonly(self.similarities))
        object.__setattr__(self, "truncated", tuple(self.truncated))
        for side in ("query", "document"):
            tokens = tuple(getattr(self, f"{side}_tokens"))
            # A text that is not kept must not live on in its tokens.
            kept = tokens if getattr(self, side) is not None else tuple(token.without_text() for token in tokens)
            object.__setattr__(self, f"{side}_tokens", kept)
        for name in ("settings", "provenance", "references"):
            object.__setattr__(self, name, frozen(getattr(self, name)))
        object.__setattr__(self, "score", float(self.score))

    # ------------------------------------------------------------------ what it says

    @property
    def pairs(self) -> Array:
        """(n_q, n_d): what each pair of tokens carries, in score units."""
        return self.matrix[:-1, :-1]

    @property
    def gap(self) -> float | None:
        """score - matrix.sum(): zero up to rounding when the explanation is exact; None when not additive."""
        return self.score - float(self.matrix.sum(dtype=np.float64)) if self.additive else None

    @property
    def unattributed(self) -> float:
        """score - pairs.sum(): what no pair of this unit carries (biases; by words also special tokens)."""
        return self.score - float(self.pairs.sum(dtype=np.float64))

    def top_pairs(self, k: int = 10) -> list[Pair]:
        """The k pairs with the largest |value|, largest first; ties keep reading order."""
        size = np.abs(self.pairs, dtype=np.float64)
        total = float(size.sum()) or 1.0
        width = max(1, len(self.document_tokens))
        cells = (divmod(int(flat), width) for flat in np.argsort(-size, axis=None, kind="stable")[: max(0, k)])
        return [
            Pair(
                self.query_tokens[i],
                self.document_tokens[j],
                float(self.pairs[i, j]),
                float(size[i, j]) / total,
            )
            for i, j in cells
        ]

    def document_saliency(self) -> Array:
        """(n_d,): what each document token carries over all query tokens, in score units."""
        saliency: Array = self.pairs.sum(axis=0)
        return saliency

    def query_saliency(self) -> Array:
        """(n_q,): what each query token carries over all document tokens, in score units."""
        saliency: Array = self.pairs.sum(axis=1)
        return saliency

    def highlights(self, k: int = 5) -> list[Highlight]:
        """The k pieces of the document that carry most, with their character offsets; largest first."""
        values = self.document_saliency()
        order = [i for i in np.argsort(-values, kind="stable") if self.document_tokens[i].part == "text"]
        return [
            Highlight(token.text, token.start, token.end, float(values[i]))
            for i in order[: max(0, k)]
            for token in [self.document_tokens[i]]
        ]

    # ------------------------------------------------------------------ coarser units

    def by_word(self) -> Explanation:
        """The same explanation by words: pieces are summed; special tokens and prompts go to the rest."""
        return self._grouped("word", word_spans)

    def by_sentence(self) -> Explanation:
        """The same explanation by sentences of the document and words of the query."""
        return self._grouped("sentence", sentence_spans)

    def _grouped(self, unit: Unit, document_spans: Callable[[str], list[Span]]) -> Explanation:
        if self.unit == unit:
            return self
        if self.unit == "sentence":
            raise InvalidInput("an explanation by sentences cannot be split into words again: group the original")
        if self.query is None or self.document is None:
            raise InvalidInput("words cannot be found without the texts: group the explanation before dropping them")
        query_tokens, rows = _group(self.query_tokens, self.query, word_spans, "query" in self.truncated)
        document_tokens, columns = _group(
            self.document_tokens, self.document, document_spans, "document" in self.truncated
        )
        matrix = np.zeros((len(query_tokens) + 1, len(document_tokens) + 1))
        np.add.at(matrix, (np.append(rows, -1)[:, None], np.append(columns, -1)[None, :]), self.matrix)
        similarities = None
        if self.similarities is not None:
            best = np.full((len(query_tokens) + 1, len(document_tokens) + 1), -np.inf)
            np.maximum.at(best, (rows[:, None], columns[None, :]), self.similarities)
            similarities = best[:-1, :-1].astype(np.float32)
        return replace(
            self,
            query_tokens=query_tokens,
            document_tokens=document_tokens,
            matrix=matrix.astype(np.float32),
            similarities=similarities,
            unit=unit,
        )

    # ------------------------------------------------------------------ reading and writing

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: everything that `from_dict` needs, with the format's version."""
        return explanation_to_dict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Explanation:
        """The inverse of `to_dict`; refuses data of another format or of another version."""
        return explanation_from_dict(data)

    def to_json(self) -> str:
        """`to_dict` as one line of JSON."""
        return to_json(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> Explanation:
        """The inverse of `to_json`."""
        return explanation_from_json(text)

    # ------------------------------------------------------------------ looking at it

    def plot(self, kind: Literal["heatmap", "connections"] = "heatmap", path: str | Path | None = None) -> Figure:
        """A figure for a paper; also saved to `path` (.png, .svg, .pdf) when one is given. Extra: `plot`."""
        from rag_explain.render.plot import plot

        return plot(self, kind, path)

    def __str__(self) -> str:
        from rag_explain.render.terminal import plain_text

        return plain_text(self)

    def __repr__(self) -> str:
        n_q, n_d = self.pairs.shape
        return f"Explanation({self.method}, {n_q} x {n_d} {self.unit}s, score={self.score:.4f})"


class Lazy:
    """An explanation that is computed once, on first use, by whichever thread asks first.

    A computation that fails leaves a reason and no explanation: it never raises into the host's search.
    """

    def __init__(
        self,
        compute: Callable[[], Explanation] | None,
        *,
        status: Status = "pending",
        reason: str | None = None,
    ):
        self._compute = compute
        self._lock = threading.Lock()
        self._explanation: Explanation | None = None
        self.status: Status = status
        self.reason = reason

    @classmethod
    def ready(cls, explanation: Explanation) -> Lazy:
        """A handle whose explanation is there already."""
        lazy = cls(None, status="ready")
        lazy._explanation = explanation
        return lazy

    def __deepcopy__(self, memo: dict[int, Any]) -> Lazy:
        return self  # frameworks copy their documents; a copy is the same promise, kept once

    def __reduce__(self) -> tuple[Any, ...]:
        if self.status == "pending":  # the computation cannot leave the process
            return _lazy, ("skipped", "it was not computed before the hit was pickled", None)
        return _lazy, (self.status, self.reason, self._explanation)

    def get(self) -> Explanation | None:
        """The explanation, computed now if nobody asked before; None when skipped or failed."""
        if self.status == "pending":
            with self._lock:
                if self.status == "pending":
                    self._run()
        return self._explanation

    def _run(self) -> None:
        assert self._compute is not None
        try:
            self._explanation = self._compute()
            self.status = "ready"
        except Exception as error:  # the host's search must not fail because an explanation did
            self.reason = f"{type(error).__name__}: {error}"
            self.status = "failed"
        self._compute = None  # let go of the texts and the query's factors


# How an index's score becomes a similarity; squared L2 between unit vectors is 2 - 2 cos.
_AS_SIMILARITY: dict[str, Callable[[float], float]] = {
    "cosine": lambda score: score,
    "inner product": lambda score: score,
    "squared L2": lambda score: 1 - score / 2,
    "cosine distance": lambda score: 1 - score,
}


def as_similarity(score: float | None, metric: str) -> float | None:
    """What similarity a score stands for, or None when the metric does not tell."""
    convert = _AS_SIMILARITY.get(metric)
    return None if convert is None or score is None else convert(score)


@dataclass(frozen=True, eq=False, kw_only=True)
class Hit(Drawn):
    """A retrieved document: the index's own score, the exact similarity, and the explanation on demand.

    Attributes:
        score: what the index returned, in the index's own metric; None where the retriever keeps it to itself.
        metric: "cosine", "inner product", "squared L2", "cosine distance", or what else the index calls it.
        around: what the encoder read before and behind the text: metadata, where they were embedded with it.
    """

    id: str
    text: str | None
    rank: int
    score: float | None
    metric: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    handle: Lazy = field(default_factory=lambda: Lazy(None, status="skipped", reason="not asked for"), repr=False)
    around: tuple[str, str] = field(default=("", ""), repr=False)

    @property
    def explanation(self) -> Explanation | None:
        """The explanation, computed on first use; None when it was skipped or failed (`reason` says why)."""
        return self.handle.get()

    @property
    def status(self) -> Status:
        """Where the explanation stands: ready, pending (not looked at yet), skipped or failed."""
        return self.handle.status

    @property
    def reason(self) -> str | None:
        """Why there is no explanation, when it was skipped or failed."""
        return self.handle.reason

    @property
    def similarity(self) -> float | None:
        """The exact similarity, recomputed by the encoder; None as long as the explanation is not computed.

        Also None where the method explains a score of its own, such as MaxSim.
        """
        explanation = self.handle.get() if self.status == "ready" else None
        return None if explanation is None else explanation.provenance.get("similarity", explanation.score)

    @property
    def gap(self) -> float | None:
        """The index's score as a similarity - `similarity`: zero up to rounding when the scorer is this encoder."""
        claimed, exact = as_similarity(self.score, self.metric), self.similarity
        return None if claimed is None or exact is None else claimed - exact

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON. Never computes: a pending explanation is written as None."""
        explanation = self.handle.get() if self.status == "ready" else None
        return {
            "id": self.id,
            "text": self.text,
            "metadata": plain(self.metadata),
            "rank": self.rank,
            "score": self.score,
            "metric": self.metric,
            "similarity": self.similarity,
            "gap": self.gap,
            "status": self.status,
            "reason": self.reason,
            "explanation": None if explanation is None else explanation.to_dict(),
        }


class Hits(tuple[Hit, ...], Drawn):
    """What a search returns: a tuple of hits that shows why in a notebook, a terminal and a page.

    Looking at the hits computes the explanations that are pending; `repr` never does.
    """

    __slots__ = ()

    @overload
    def __getitem__(self, index: SupportsIndex) -> Hit: ...
    @overload
    def __getitem__(self, index: slice) -> Hits: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Hit | Hits:
        return Hits(super().__getitem__(index)) if isinstance(index, slice) else super().__getitem__(index)


def _group(
    tokens: tuple[Token, ...], text: str, spans: Callable[[str], list[Span]], truncated: bool
) -> tuple[tuple[Token, ...], NDArray[np.intp]]:
    """The words or sentences that hold a token, and for each token the index of its own, -1 for the rest."""
    offsets = [(token.start, token.end) if token.part == "text" else (0, 0) for token in tokens]
    found, index = group(offsets, spans(text), join=spans is word_spans, clip=truncated)
    return tuple(Token(text[start:end], start, end) for start, end in found), np.array(index, dtype=np.intp)


def _lazy(status: Status, reason: str | None, explanation: Explanation | None) -> Lazy:
    return Lazy(None, status=status, reason=reason) if explanation is None else Lazy.ready(explanation)
