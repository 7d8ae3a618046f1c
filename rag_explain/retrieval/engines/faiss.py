"""FAISS: an index of float vectors, whose rows the framework around it knows by its own ids."""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from rag_explain.results.metric import UNKNOWN, Metric
from rag_explain.retrieval.engines.base import TOLERANCE, Engine

_METRICS = {0: Metric("inner product"), 1: Metric("squared L2")}
# Indexes that compare the vectors they were given.
_EXACT = frozenset(("IndexFlat", "IndexFlatIP", "IndexFlatL2", "IndexIVFFlat"))
# Indexes whose scores come from another one, which is their attribute of this name.
_INNER = {
    **dict.fromkeys(("IndexIDMap", "IndexIDMap2"), "index"),
    **dict.fromkeys(("IndexRefine", "IndexRefineFlat"), "refine_index"),
}
# Kinds of index that estimate scores, or code a vector otherwise each time.
_ESTIMATING = ("RaBitQ", "LocalSearch")
# What is not known to lose less.
_COMPRESSED_TOLERANCE = 0.25


class FaissEngine(Engine):
    """One index, whose rows the place knows."""

    handles = ("faiss", "Index")

    def told_metric(self) -> Metric:
        return _METRICS.get(self.handle.metric_type, UNKNOWN)

    @property
    def tolerance(self) -> float:
        return TOLERANCE if _kind(self.handle)[0] in _EXACT else _COMPRESSED_TOLERANCE

    def coded(self, vectors: Any) -> Any:
        """(D, e): these vectors as the index compares them once they are in it, by its own coding; None where it has
        none that can be asked."""
        try:
            return _coded(self.handle, np.ascontiguousarray(vectors, np.float32))
        except (RuntimeError, AssertionError):  # FAISS: "not implemented for this type of index", or not this width
            return None

    def vectors(self, ids: Sequence[str]) -> dict[str, Any]:
        rows = {} if self.place.rows is None else self.place.rows(set(ids))
        try:
            return {name: self.handle.reconstruct(row) for name, row in rows.items()}
        except RuntimeError:  # an IDMap, or an IVF without a direct map: such an index cannot look a row up
            return {}


def _kind(index: Any) -> tuple[str, Any]:
    """The class, and the index itself, of what gives the scores of an index, whatever stands in front of it."""
    index = sys.modules["faiss"].downcast_index(index)
    name = type(index).__name__
    if name in _INNER:
        return _kind(getattr(index, _INNER[name]))
    return _kind(index.storage) if hasattr(index, "storage") else (name, index)  # a graph over an index


def _coded(index: Any, vectors: Any) -> Any:
    name, index = _kind(index)
    if name in _EXACT:
        return vectors
    if any(kind in name for kind in _ESTIMATING):
        raise RuntimeError(f"{name} does not compare what it decodes")
    if name != "IndexPreTransform":
        return index.sa_decode(index.sa_encode(vectors))
    faiss = sys.modules["faiss"]
    steps = [faiss.downcast_VectorTransform(index.chain.at(number)) for number in range(index.chain.size())]
    for step in steps:
        vectors = step.apply(vectors)
    vectors = _coded(index.index, vectors)
    for step in reversed(steps):
        vectors = step.reverse_transform(vectors)
    return vectors
