"""Chroma: a `chromadb.Collection`."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any, Self

from rag_explain.results.metric import UNKNOWN, Metric
from rag_explain.retrieval.engines.base import TOLERANCE

_METRICS = {"l2": Metric("squared L2"), "cosine": Metric("cosine distance"), "ip": Metric("1 - inner product")}
_PAGE = 300  # documents that a hosted Chroma returns at once


class ChromaEngine:
    """The index of one collection."""

    tolerance = TOLERANCE

    def __init__(self, collection: Any) -> None:
        self._collection = collection

    @classmethod
    def of(cls, handle: object) -> Self | None:
        module = sys.modules.get("chromadb")  # a collection cannot be there before its library is loaded
        return cls(handle) if module is not None and isinstance(handle, module.Collection) else None

    @property
    def metric(self) -> Metric:
        settings = self._collection.configuration_json or {}
        index = settings.get("hnsw") or settings.get("spann") or {}
        space = index.get("space") or (self._collection.metadata or {}).get("hnsw:space")
        return _METRICS.get(str(space), UNKNOWN)

    def vectors(self, ids: Sequence[str]) -> dict[str, Any]:
        found = self._collection.get(ids=list(dict.fromkeys(ids)), include=["embeddings"])
        return dict(zip(found["ids"], found["embeddings"], strict=True))

    def documents(self) -> Iterator[tuple[str, str]]:
        offset = 0
        while True:
            page = self._collection.get(include=["documents"], limit=_PAGE, offset=offset)
            yield from ((name, text) for name, text in zip(page["ids"], page["documents"], strict=True) if text)
            offset += len(page["ids"])
            if len(page["ids"]) < _PAGE:
                return
