"""Is what is explained what the retriever scored? Every reason why not, in the order in which it becomes known.

The scorer and the method put their reasons on the explanation. Added here are the retriever's, declared by the user or
found out by an adapter, and what comparing shows: the framework's query vector, the index's vector and the index's
score, each with this encoder's. No reason switches another one off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rag_explain.errors import InvalidInput
from rag_explain.results.explanation import Explanation
from rag_explain.results.metric import Metric
from rag_explain.results.notices import (
    MISMATCH,
    OTHER_RANKING,
    OTHER_SCORE,
    UNCHECKED,
    Notice,
    stand_in_reason,
)
from rag_explain.retrieval.engines import TOLERANCE
from rag_explain.retrieval.usage import Embedder, Usage

if TYPE_CHECKING:
    from rag_explain.explainer import Explainer

Vector = NDArray[np.float64]

# What 16 bits may round a vector by on its way through a model: two batches with the same text differ by as much.
_HALF_TOLERANCE = 2e-2
_UNIT = 1e-3
_SCALE_FREE = ("cosine", "cosine distance")
_CAUSE = "the index was probably built with another model, another prompt or header, or rescaled vectors"
_PROMPTS = 'prompts={"query": ..., "document": ...}'
_NOTHING = Notice(
    UNCHECKED,
    "this store tells neither scores nor vectors that can be compared: that its index was built with this encoder "
    "was not checked",
    "note",
)


@dataclass(frozen=True)
class Stored:
    """The vector (e,) that an engine keeps for a document, this encoder's own, and how the engine compares."""

    metric: Metric
    vector: Vector
    own: Vector

    def difference(self, measure: str, tolerance: float) -> str | None:
        """How the vector differs from this encoder's, or None when it is the same."""
        if self.vector.shape != self.own.shape:
            sizes = f"{self.vector.size} dimensions, but this encoder's have {self.own.size}"
            return f"the index's vectors have {sizes}: {_CAUSE}"
        if _distance(self.own, self.vector, by_length=measure == "dot") <= tolerance:
            return None
        cosine = f"(their cosine is {_cosine(self.own, self.vector):.6f})"
        return f"the index's vector of this document is not the one that this encoder computes {cosine}: {_CAUSE}"

    def other_ranking(self, measure: str) -> str | None:
        """Why vectors of this length are ranked by something else than what is explained."""
        agrees = self.metric.base in _SCALE_FREE if measure == "cosine" else "inner product" in self.metric.base
        if agrees or self.metric.base == "unknown" or abs(float(np.linalg.norm(self.vector)) - 1.0) <= _UNIT:
            return None
        explained = "inner product" if measure == "dot" else measure
        return f"the index compares vectors that are not normalised by {self.metric.base}; the {explained} is explained"


@dataclass(frozen=True)
class Scoring:
    """How a search scored its documents, as far as that is known."""

    metric: Metric
    reasons: Sequence[str]  # why the scores are not the encoder's similarity alone: reranked, mixed, diversified
    tolerance: float  # how far a score may be from the encoder's similarity before the two are said to differ

    def notices(
        self,
        explanation: Explanation,
        score: float | None,
        asked: Sequence[Notice] = (),
        stored: Stored | None = None,
    ) -> tuple[Notice, ...]:
        """What the explanation of a document with this score must say, beside what it says already.

        `asked` is what asking the framework's embedding object showed, `stored` what the engine keeps.
        """
        found = [*(Notice(OTHER_RANKING, reason) for reason in self.reasons), *asked]
        if any(notice.code == OTHER_SCORE for notice in explanation.notices):
            return tuple(found)  # a score other than the model's similarity cannot be compared
        claimed, other_ranking = self.metric.similarity(score), None
        if stored is not None:
            difference = stored.difference(explanation.measure, self.tolerance)
            other_ranking = stored.other_ranking(explanation.measure) if difference is None else None
            found += [Notice(MISMATCH, difference)] if difference else []
            found += [Notice(OTHER_RANKING, other_ranking)] if other_ranking else []
        is_known = stand_in_reason((*explanation.notices, *found)) is not None
        if claimed is not None and other_ranking is None and not _agree(claimed, explanation.score, self.tolerance):
            text = f"the index's score implies a similarity of {claimed:.4f}, but this encoder computes "
            # The cause is guessed only where none is known.
            found.append(Notice(MISMATCH, f"{text}{explanation.score:.4f}" + ("" if is_known else f": {_CAUSE}")))
        elif claimed is None and stored is None and not is_known:
            found.append(_NOTHING)
        return tuple(found)


def asked_notices(
    explainer: Explainer, embedder: Embedder, usage: Usage | None, query: str, *, is_followed: bool
) -> list[Notice]:
    """What the query's vector from the framework's own object shows, beside this encoder's; nothing when they agree.

    `is_followed` says that the explainer was made to embed by this usage.
    """
    try:
        theirs = embedder.vector(query)
    except Exception as error:
        text = f"{embedder.name} could not be compared with this encoder ({type(error).__name__}: {error})"
        # An object that holds a model is likely to use it; any other is not known to be this encoder.
        return [Notice(UNCHECKED, text, "note") if embedder.model is not None else Notice(OTHER_RANKING, text)]
    try:
        own = explainer.query_vector(query).astype(np.float64)
    except InvalidInput as error:
        return [Notice(MISMATCH, f"the documents were ranked by vectors of {embedder.name}, but {error}")]
    by_length = explainer.scorer.measure == "dot"
    if theirs.shape != own.shape:
        seen = f"a vector of {theirs.size} dimensions, and this encoder has {own.size}"
    elif _distance(own, theirs, by_length=False) > rounding(explainer):
        seen = f"another vector than this encoder's (their cosine is {_cosine(own, theirs):.6f})"
    elif by_length and _distance(own, theirs, by_length=True) > rounding(explainer):
        seen = f"a vector of length {np.linalg.norm(theirs):.4g}, and this encoder's has {np.linalg.norm(own):.4g}"
    else:
        return []
    made = "explainer=Explainer(SentenceTransformer(..., {}))"
    if is_followed:
        hint = "what it does with a text cannot be done again here"
    elif usage is None:
        hint = f"pass {made.format(_PROMPTS)} of the model that it uses"
    else:
        hint = f"leave explainer= out, or pass {made.format(usage.arguments)}"
        hint += ", for which line breaks become blanks" if usage.query.joins_lines and "\n" in query else ""
    return [Notice(MISMATCH, f"{embedder.name} gives the query {seen}: {hint}")]


def rounding(explainer: Explainer) -> float:
    """How far two vectors of one text may be apart in the precision of this model, as a share of their length."""
    import torch

    try:
        dtype = explainer.scorer.encoder.dtype
    except InvalidInput:  # no torch model
        return TOLERANCE
    return TOLERANCE if dtype in (torch.float32, torch.float64) else _HALF_TOLERANCE


def retriever_reason(declared: str | bool | None, found_out: str | None) -> str | None:
    """Why a retriever's scores are not the encoder's: what the user declared, else what the adapter found out.

    A declared False says that they are the encoder's.
    """
    if isinstance(declared, str):
        return declared
    return None if declared is False else found_out


def _agree(score: float, own: float, tolerance: float) -> bool:
    """Inner products grow with the vectors, and their rounding with them."""
    return abs(score - own) <= tolerance * max(1.0, abs(own))


def _distance(own: Vector, other: Vector, *, by_length: bool) -> float:
    """Between the directions of two vectors, or the vectors themselves as a share of the length of the first.

    No similarity with any third vector differs by more; a cosine of the two would hide what it squares.
    """
    if not by_length:
        own, other = _unit(own), _unit(other)
    return float(np.linalg.norm(own - other)) / max(float(np.linalg.norm(own)), 1e-30)


def _cosine(one: Vector, other: Vector) -> float:
    return float(_unit(one) @ _unit(other))


def _unit(vector: Vector) -> Vector:
    result: Any = vector / max(float(np.linalg.norm(vector)), 1e-30)
    return np.asarray(result, np.float64)
