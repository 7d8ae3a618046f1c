"""Qdrant: a `qdrant_client.QdrantClient` and the name of a collection, local or on a server."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from rag_explain.results.metric import UNKNOWN, Metric
from rag_explain.retrieval.engines.base import TOLERANCE, Engine, Kept

_METRICS = {"Cosine": Metric("cosine"), "Dot": Metric("inner product"), "Euclid": Metric("L2")}
_PAGE = 500
# Scores of quantised vectors are estimates, unless they are computed again from the vectors that are kept beside.
_QUANTISED_TOLERANCE = 0.25


class QdrantEngine(Engine):
    """The vectors of one name in one collection."""

    handles = ("qdrant_client", "QdrantClient")
    is_client = True
    gives_originals = True

    @cached_property
    def _settings(self) -> tuple[Any, Any]:
        """How the vectors are compared, and how they are quantised."""
        config = self.handle.get_collection(self.place.collection).config
        vectors = config.params.vectors
        vector = vectors.get(self.place.vector) if isinstance(vectors, dict) else vectors
        return vector, getattr(vector, "quantization_config", None) or config.quantization_config

    def told_metric(self) -> Metric:
        distance = getattr(self._settings[0], "distance", None)
        return _METRICS.get(getattr(distance, "value", ""), UNKNOWN)

    @property
    def tolerance(self) -> float:
        return TOLERANCE if self._settings[1] is None else _QUANTISED_TOLERANCE

    def vectors(self, ids: Sequence[str]) -> dict[str, Any]:
        # Ids are UUIDs, or numbers.
        wanted = [int(name) if name.isdecimal() else name for name in dict.fromkeys(ids)]
        found = self.handle.retrieve(self.place.collection, wanted, with_payload=False, with_vectors=True)
        named = {str(point.id): point.vector for point in found}
        unnamed = {name: self._own(vector) for name, vector in named.items()}
        return {name: vector for name, vector in unnamed.items() if vector is not None}

    def _own(self, vector: Any) -> Any:
        return vector.get(self.place.vector or "") if isinstance(vector, dict) else vector

    def documents(self) -> Iterator[Kept]:
        offset = None
        while True:
            page, offset = self.handle.scroll(self.place.collection, limit=_PAGE, offset=offset, with_payload=True)
            for point in page:
                fields = point.payload or {}
                yield Kept(str(point.id), fields.get(self.place.text), fields)
            if offset is None:
                return
