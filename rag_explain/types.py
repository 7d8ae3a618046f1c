"""The nouns of the library: Token, Factors, Explanation, Pair, Hit.

All are frozen and hold numpy arrays that are read-only, so that one object can be shared by threads, caches and logs.
Nothing here is normalised: every number is in score units, and scaling for colours belongs to rendering.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from rag_explain.errors import FormatError, InvalidInput
from rag_explain.segments import Span, sentence_spans, word_spans

if TYPE_CHECKING:
    from rich.console import RenderableType

Part = Literal["text", "special", "prompt", "metadata"]
Unit = Literal["token", "word", "sentence"]
Role = Literal["query", "document"]
Status = Literal["ready", "pending", "skipped", "failed"]
Array = NDArray[np.float32]

FORMAT = "rag_explain.explanation"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Token:
    """One token, word or sentence of a text, and where it stands in the caller's own string.

    `text` is the caller's `text[start:end]`. A token that is not part of the caller's text (a special token, a
    prompt, metadata put in front of the text) has `start == end` and an empty `text`; `piece` still names it.
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


@dataclass(frozen=True, eq=False, kw_only=True)
class Factors:
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
        rows = _readonly(self.rows)
        if rows.ndim != 2 or rows.shape[0] != len(self.tokens):
            raise InvalidInput(f"rows must be ({len(self.tokens)}, h), one row per token, not {rows.shape}")
        for name in ("rest", "embedding"):
            vector = _readonly(getattr(self, name))
            if vector.shape != (rows.shape[1],):
                raise InvalidInput(f"{name} must be ({rows.shape[1]},), not {vector.shape}")
            object.__setattr__(self, name, vector)
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "tokens", tuple(self.tokens))
        object.__setattr__(self, "settings", MappingProxyType(dict(self.settings)))

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
class Explanation:
    """Why a document scored what it did for a query.

    Attributes:
        query, document: the caller's own strings; None where text is not kept.
        matrix: (n_q + 1, n_d + 1) float32 in score units; the last row and column belong to the rest, which no token owns.
        score: the encoder's own similarity, computed apart from the matrix.
        additive: whether the matrix is meant to sum to the score.
        references: reference similarities of integrated Jacobians, which tell how far they can be trusted.
        similarities: (n_q, n_d) cosines of all token pairs, for alignment methods.
        surrogate: why what is explained is not what the retriever scored, or None when it is.
        truncated: the sides ("query", "document") of which the encoder saw only the beginning; empty when it saw all.
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
        matrix = _readonly(self.matrix)
        expected = (len(self.query_tokens) + 1, len(self.document_tokens) + 1)
        if matrix.shape != expected:
            raise InvalidInput(f"matrix must be {expected}: one row per token and one for the rest, not {matrix.shape}")
        object.__setattr__(self, "matrix", matrix)
        if self.similarities is not None:
            object.__setattr__(self, "similarities", _readonly(self.similarities))
        for name in ("query_tokens", "document_tokens", "truncated"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("settings", "provenance"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        object.__setattr__(self, "score", float(self.score))

    # ------------------------------------------------------------------ what it says

    @property
    def pairs(self) -> Array:
        """(n_q, n_d): what each pair of tokens carries, in score units."""
        return self.matrix[:-1, :-1]

    @property
    def gap(self) -> float | None:
        """score - matrix.sum(): zero up to rounding when the explanation is exact. None when it is not additive."""
        return self.score - float(self.matrix.sum(dtype=np.float64)) if self.additive else None

    @property
    def unattributed(self) -> float:
        """score - pairs.sum(): what no pair of tokens of this unit carries (biases, and in word units special tokens)."""
        return self.score - float(self.pairs.sum(dtype=np.float64))

    def top_pairs(self, k: int = 10) -> list[Pair]:
        """The k pairs with the largest |value|, largest first; ties keep reading order."""
        size = np.abs(self.pairs, dtype=np.float64)
        total = float(size.sum()) or 1.0
        width = max(1, len(self.document_tokens))
        cells = (divmod(int(flat), width) for flat in np.argsort(-size, axis=None, kind="stable")[: max(0, k)])
        return [
            Pair(self.query_tokens[i], self.document_tokens[j], float(self.pairs[i, j]), float(size[i, j]) / total)
            for i, j in cells
        ]

    def document_saliency(self) -> Array:
        """(n_d,): what each document token carries over all query tokens, in score units."""
        return self.pairs.sum(axis=0)

    def query_saliency(self) -> Array:
        """(n_q,): what each query token carries over all document tokens, in score units."""
        return self.pairs.sum(axis=1)

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
        """The same explanation by words: pieces of a word are summed, special tokens and prompts go to the rest."""
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
        query_tokens, rows = _group(self.query_tokens, self.query, word_spans(self.query))
        document_tokens, columns = _group(self.document_tokens, self.document, document_spans(self.document))
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
        return {
            "format": FORMAT,
            "version": VERSION,
            "query": self.query,
            "document": self.document,
            "query_tokens": [_token_to_list(token) for token in self.query_tokens],
            "document_tokens": [_token_to_list(token) for token in self.document_tokens],
            "matrix": self.matrix.tolist(),
            "score": self.score,
            "gap": self.gap,
            "unattributed": self.unattributed,
            "additive": self.additive,
            "unit": self.unit,
            "method": self.method,
            "settings": dict(self.settings),
            "model": self.model,
            "fingerprint": self.fingerprint,
            "references": None if self.references is None else dict(self.references),
            "similarities": None if self.similarities is None else self.similarities.tolist(),
            "surrogate": self.surrogate,
            "truncated": list(self.truncated),
            "provenance": dict(self.provenance),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Explanation:
        """The inverse of `to_dict`; refuses data of another format or of a newer version."""
        if data.get("format") != FORMAT:
            raise FormatError(f"this is not an explanation: its format is {data.get('format')!r}, not {FORMAT!r}")
        if data.get("version") != VERSION:
            raise FormatError(f"format version {data.get('version')!r} cannot be read: this library reads {VERSION}")
        try:
            similarities = data["similarities"]
            query_tokens = tuple(_token_from_list(item, data["query"]) for item in data["query_tokens"])
            document_tokens = tuple(_token_from_list(item, data["document"]) for item in data["document_tokens"])
            shape = (len(query_tokens) + 1, len(document_tokens) + 1)
            return cls(
                query=data["query"],
                document=data["document"],
                query_tokens=query_tokens,
                document_tokens=document_tokens,
                matrix=np.asarray(data["matrix"], dtype=np.float32).reshape(shape),
                score=data["score"],
                method=data["method"],
                additive=data["additive"],
                unit=data["unit"],
                settings=data["settings"],
                model=data["model"],
                fingerprint=data["fingerprint"],
                references=data["references"],
                similarities=None
                if similarities is None
                else np.asarray(similarities, dtype=np.float32).reshape(shape[0] - 1, shape[1] - 1),
                surrogate=data["surrogate"],
                truncated=data["truncated"],
                provenance=data["provenance"],
            )
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise FormatError(f"the explanation is damaged: {error!r}") from error

    def to_json(self) -> str:
        """`to_dict` as one line of JSON."""
        return json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Explanation:
        """The inverse of `to_json`."""
        return cls.from_dict(json.loads(text))

    # ------------------------------------------------------------------ looking at it

    def to_html(self, path: str | Path | None = None) -> str:
        """A self-contained page; also written to `path` when one is given."""
        from rag_explain.render.html import write_page

        return write_page([self], path)

    def _repr_html_(self) -> str:
        from rag_explain.render.html import fragment

        return fragment([self])

    def __rich__(self) -> RenderableType:
        from rag_explain.render.terminal import explanation_view

        return explanation_view(self)

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
        self, compute: Callable[[], Explanation] | None, *, status: Status = "pending", reason: str | None = None
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


@dataclass(frozen=True, eq=False, kw_only=True)
class Hit:
    """A retrieved document: the index's own score, the exact similarity beside it, and the explanation on demand.

    Attributes:
        score: what the index returned, in the index's own metric.
        similarity: the exact similarity recomputed from the encoder, or None where it was not.
        gap: index score (as a similarity) - recomputed similarity: zero up to rounding when the scorer is this encoder.
    """

    id: str
    text: str | None
    rank: int
    score: float
    metric: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    similarity: float | None = None
    gap: float | None = None
    handle: Lazy = field(default_factory=lambda: Lazy(None, status="skipped", reason="not asked for"), repr=False)

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

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON. Never computes: a pending explanation is written as None."""
        explanation = self.handle.get() if self.status == "ready" else None
        return {
            "id": self.id,
            "text": self.text,
            "metadata": dict(self.metadata),
            "rank": self.rank,
            "score": self.score,
            "metric": self.metric,
            "similarity": self.similarity,
            "gap": self.gap,
            "status": self.status,
            "reason": self.reason,
            "explanation": None if explanation is None else explanation.to_dict(),
        }


def _readonly(array: NDArray[Any]) -> Array:
    """`array` as float32 that nobody can write to; a copy only where the caller could still write to it."""
    result = np.asarray(array, dtype=np.float32)
    if result.flags.writeable:
        result = result.copy() if result is array or result.base is not None else result
        result.flags.writeable = False
    return result


def _group(tokens: Sequence[Token], text: str, spans: Iterable[Span]) -> tuple[tuple[Token, ...], NDArray[np.intp]]:
    """The spans that hold at least one token, and for each token the index of its span, or -1 for the rest."""
    spans = list(spans)
    starts = np.array([start for start, _ in spans], dtype=np.intp)
    kept: dict[int, int] = {}
    index = np.full(len(tokens), -1, dtype=np.intp)
    for position, token in enumerate(tokens):
        if token.part != "text" or token.start == token.end or not spans:
            continue
        # The token may begin with blanks that no span covers: its span is that of its last character.
        span = int(np.searchsorted(starts, token.end - 1, side="right")) - 1
        if span >= 0 and spans[span][1] > token.start:
            index[position] = kept.setdefault(span, len(kept))
    words = tuple(Token(text[a:b], a, b) for a, b in (spans[span] for span in kept))
    return words, index


def _token_to_list(token: Token) -> list[Any]:
    return [token.start, token.end, token.part, token.piece]


def _token_from_list(item: Sequence[Any], text: str | None) -> Token:
    start, end, part, piece = item
    return Token("" if text is None else text[start:end], int(start), int(end), part, piece)
