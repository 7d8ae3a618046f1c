"""FAISS: an index of float vectors, whose rows the framework around it knows by its own ids."""

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Self

from rag_explain.results.metric import UNKNOWN, Metric
from rag_explain.retrieval.engines.base import TOLERANCE

Rows = Callable[[Collection[str]], Mapping[str, int]]

_METRICS = {0: Metric("inner product"), 1: Metric("squared L2")}
# Indexes that compare the vectors they were given; any other may compare compressed ones.
_EXACT = frozenset(("IndexFlat", "IndexFlatIP", "IndexFlatL2", "IndexHNSWFlat", "IndexIVFFlat", "IndexNSGFlat"))
_COMPRESSED_TOLERANCE = 0.25


class FaissEngine:
    """One index; `rows` gives the row of each of some documents that it knows."""

    def __init__(self, index: Any, rows: Rows | None = None) -> None:
        self._index, self._rows = index, rows

    @classmethod
    def of(cls, handle: object, rows: Rows | None = None) -> Self | None:
        module = sys.modules.get("faiss")  # an index cannot be there before its library is loaded
        return cls(handle, rows) if module is not None and isinstance(handle, module.Index) else None

    @property
    def metric(self) -> Metric:
        return _METRICS.get(self._index.metric_type, UNKNOWN)

    @property
    def tolerance(self) -> float:
        return TOLERANCE if self._is_exact else _COMPRESSED_TOLERANCE

    def vectors(self, ids: Sequence[str]) -> dict[str, Any]:
        rows = {} if self._rows is None or not self._is_exact else self._rows(set(ids))
        try:
            return {name: self._index.reconstruct(row) for name, row in rows.items()}
        except RuntimeError:  # an IDMap, or an IVF without a direct map: such an index cannot look a row up
            return {}

    def documents(self) -> None:
        return None

    @property
    def _is_exact(self) -> bool:
        """Whether the index compares the vectors it was given, whatever stands in front of them."""
        downcast = sys.modules["faiss"].downcast_index
        index = downcast(self._index)
        while type(index).__name__ in ("IndexIDMap", "IndexIDMap2"):
            index = downcast(index.index)
        return type(index).__name__ in _EXACT
