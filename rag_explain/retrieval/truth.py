"""Is what is explained what the retriever scored? Every reason why not, in the order in which it becomes known.

The scorer and the method put their reasons on the explanation. Added here are the retriever's, declared by the user or
found out by an adapter, and what comparing the two scores shows. No reason switches another one off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rag_explain.results.explanation import Explanation
from rag_explain.results.metric import UNKNOWN, Metric
from rag_explain.results.notices import MISMATCH, OTHER_RANKING, OTHER_SCORE, Notice, stand_in_reason

# An index keeps float32, sometimes float16 vectors; another model, or another text, is off by far more.
TOLERANCE = 0.02
_FAISS_METRICS = {0: Metric("inner product"), 1: Metric("squared L2")}


@dataclass(frozen=True)
class Scoring:
    """How a search scored its documents, as far as that is known."""

    metric: Metric
    reasons: Sequence[str]  # why the scores are not the encoder's similarity alone: reranked, mixed, diversified
    tolerance: float  # how far a score may be from the encoder's similarity before the two are said to differ

    def notices(self, explanation: Explanation, score: float | None) -> tuple[Notice, ...]:
        """What the explanation of a document with this score must say, beside what it says already."""
        declared = tuple(Notice(OTHER_RANKING, reason) for reason in self.reasons)
        claimed = self.metric.similarity(score)
        is_other = any(notice.code == OTHER_SCORE for notice in explanation.notices)
        # A score other than the model's similarity cannot be compared.
        if is_other or claimed is None or abs(claimed - explanation.score) <= self.tolerance:
            return declared
        own = f"{explanation.score:.4f}"
        text = f"the index's score implies a similarity of {claimed:.4f}, but this encoder computes {own}"
        if stand_in_reason((*explanation.notices, *declared)) is None:  # the cause is guessed only where none is known
            text += ": the index was probably built with another model, another prompt, or rescaled vectors"
        return (*declared, Notice(MISMATCH, text))


def retriever_reason(declared: str | bool | None, found_out: str | None) -> str | None:
    """Why a retriever's scores are not the encoder's: what the user declared, else what the adapter found out.

    A declared False says that they are the encoder's.
    """
    if isinstance(declared, str):
        return declared
    return None if declared is False else found_out


def faiss_metric(index: object) -> Metric:
    """What the scores of a FAISS index are, for vectors of length one; unknown for anything else."""
    return _FAISS_METRICS.get(getattr(index, "metric_type", -1), UNKNOWN)
