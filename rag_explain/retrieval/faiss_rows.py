"""The rows of a FAISS index, for questions about all of them: every row compared, filters, and a least score."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rag_explain.errors import InvalidInput
from rag_explain.results.metric import Metric
from rag_explain.retrieval.corpus import Corpus, Entry, Ranking, Vector, ranked
from rag_explain.retrieval.engines import TOLERANCE, FaissEngine, Place
from rag_explain.retrieval.search import RetrievedDocument

if TYPE_CHECKING:
    from rag_explain.explainer import Explainer

Rows = NDArray[np.int64]
Filter: TypeAlias = Mapping[str, Any] | Callable[[Mapping[str, Any]], bool]
"""What metadata must hold: values by name, one of several where a list is given; or a function of the metadata."""

_NOTHING = -1  # the id with which FAISS fills up what it did not find


class Sieve:
    """What a search leaves out of what the index found."""

    def __init__(self, filter: Filter | None, min_score: float | None, index: Any) -> None:
        if not (filter is None or callable(filter) or isinstance(filter, Mapping)):
            raise InvalidInput(
                f"filter must be a mapping of metadata, or a function of them, not {type(filter).__name__}"
            )
        if min_score is not None and (isinstance(min_score, bool) or not _is_number(min_score)):
            raise InvalidInput(f"min_score must be a number in the unit of the index, not {min_score!r}")
        self.filter, self.min_score, self._is_distance = filter, min_score, is_distance(index)

    def is_enough(self, score: float) -> bool:
        """Of a distance, which is better the smaller it is, `min_score` is the largest that is let through."""
        if self.min_score is None:
            return True
        return score <= self.min_score if self._is_distance else score >= self.min_score

    def reason(self, document: RetrievedDocument) -> str | None:
        """Why the filter leaves a document out; None where it does not."""
        if self.filter is None:
            return None
        if callable(self.filter):
            return None if self.filter(document.metadata) else "the filter's function refuses its metadata"
        for name, wanted in self.filter.items():
            value = document.metadata.get(name)
            accepted = wanted if isinstance(wanted, (list, tuple, set, frozenset)) else (wanted,)
            if value not in accepted:
                return f"its {name} is {value!r}, where the filter asks for {wanted!r}"
        return None


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def is_distance(index: Any) -> bool:
    """Whether the index gives the smaller scores to what is nearer."""
    return not sys.modules["faiss"].is_similarity_metric(index.metric_type)


class FaissCorpus(Corpus):
    """The rows of one index; the metric is that of the vectors as they are searched."""

    def __init__(self, index: Any, rows: Callable[[], Iterable[tuple[int, RetrievedDocument]]], metric: Metric) -> None:
        self._index, self._rows, self._metric = index, rows, metric

    def listed(self) -> Iterator[Entry]:
        return (Entry(row, document) for row, document in self._rows())

    def ranking(self, query: Vector, explainer: Explainer) -> Ranking:
        scores, rows = exhaustive(self._index, np.ascontiguousarray(query[None], np.float32), int(self._index.ntotal))
        found = [(row, score) for row, score in zip(rows[0].tolist(), scores[0].tolist(), strict=True)]
        found = [(row, score) for row, score in found if row != _NOTHING]
        told = [self._metric.similarity(score) for _, score in found]
        is_told = all(one is not None for one in told)
        own = [-score if is_distance(self._index) else score for _, score in found]
        is_exact = FaissEngine(self._index).tolerance <= TOLERANCE
        values = np.array(told if is_told else own, np.float64)
        return ranked([row for row, _ in found], values, is_exact=is_exact, is_similarity=is_told)

    def vectors(self, entries: Sequence[Entry]) -> dict[Any, Any]:
        known = {str(one.key): one.key for one in entries}
        place = Place(rows=lambda ids: {name: row for name, row in known.items() if name in ids})  # type: ignore[misc]
        engine = FaissEngine(self._index, place)
        if engine.tolerance > TOLERANCE:
            return {}
        return {known[name]: vector for name, vector in engine.vectors(list(known)).items()}

    def compared(self, queries: Any, entries: Sequence[Entry], explainer: Explainer) -> NDArray[np.float64] | None:
        keys = [one.key for one in entries]
        found = [self.ranking(query, explainer).similarities_of(keys) for query in queries]
        rows = [row for row in found if row is not None]
        return np.stack(rows) if len(rows) == len(found) else None

    def coded(self, vectors: Any) -> Any:
        return FaissEngine(self._index).coded(vectors)


def exhaustive(index: Any, vectors: Any, k: int) -> tuple[NDArray[np.float32], Rows]:
    """Scores and ids of the k best by comparing every row, whatever stands in front of the rows: graph, cells, ids."""
    faiss = sys.modules["faiss"]
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexPreTransform):
        for number in range(index.chain.size()):
            vectors = faiss.downcast_VectorTransform(index.chain.at(number)).apply(vectors)
        return exhaustive(index.index, vectors, k)
    if isinstance(index, (faiss.IndexIDMap, faiss.IndexIDMap2)):
        scores, rows = exhaustive(index.index, vectors, k)
        names = faiss.vector_to_array(index.id_map)
        return scores, np.where(rows == _NOTHING, _NOTHING, names[rows])
    if isinstance(index, faiss.IndexRefine):
        return exhaustive(index.refine_index, vectors, k)
    if isinstance(index, faiss.IndexIVF):
        found: tuple[Any, Rows] = index.search(vectors, k, params=faiss.SearchParametersIVF(nprobe=index.nlist))
        return found
    if hasattr(index, "storage"):  # a graph over an index
        return exhaustive(index.storage, vectors, k)
    plain: tuple[Any, Rows] = index.search(vectors, k)
    return plain


def enough_effort(index: Any, vectors: Any, k: int, row: Any) -> str | None:
    """The smallest setting tried with which an approximate index does find a row among the k best; None without one."""
    faiss = sys.modules["faiss"]
    kind = faiss.downcast_index(index)
    if isinstance(kind, faiss.IndexIVF):
        tried = _doubling(2 * kind.nprobe, kind.nlist)
        settings = [(f"nprobe={n} (it is {kind.nprobe})", faiss.SearchParametersIVF(nprobe=n)) for n in tried]
    elif isinstance(kind, faiss.IndexHNSW):
        now = kind.hnsw.efSearch
        tried = _doubling(2 * now, max(2 * now, kind.ntotal))
        settings = [(f"efSearch={n} (it is {now})", faiss.SearchParametersHNSW(efSearch=n)) for n in tried]
    else:
        return None
    for told, parameters in settings:
        if row in kind.search(vectors, k, params=parameters)[1][0]:
            return told
    return None


def _doubling(first: int, last: int) -> Iterator[int]:
    while first < last:
        yield first
        first *= 2
    yield last
