"""Chroma: a `chromadb.Collection`."""

from collections.abc import Iterator, Sequence
from typing import Any

from rag_explain.results.metric import UNKNOWN, Metric
from rag_explain.retrieval.engines.base import Engine, Kept

_METRICS = {"l2": Metric("squared L2"), "cosine": Metric("cosine distance"), "ip": Metric("1 - inner product")}
_PAGE = 300  # documents that a hosted Chroma returns at once


class ChromaEngine(Engine):
    """The index of one collection."""

    handles = ("chromadb", "Collection")

    def told_metric(self) -> Metric:
        settings = self.handle.configuration_json or {}
        index = settings.get("hnsw") or settings.get("spann") or {}
        space = index.get("space") or (self.handle.metadata or {}).get("hnsw:space")
        return _METRICS.get(str(space), UNKNOWN)

    def vectors(self, ids: Sequence[str]) -> dict[str, Any]:
        found = self.handle.get(ids=list(dict.fromkeys(ids)), include=["embeddings"])
        return dict(zip(found["ids"], found["embeddings"], strict=True))

    def documents(self) -> Iterator[Kept]:
        offset = 0
        while True:
            page = self.handle.get(include=["documents", "metadatas"], limit=_PAGE, offset=offset)
            rows = zip(page["ids"], page["documents"], page["metadatas"], strict=True)
            yield from (Kept(name, text, fields or {}) for name, text, fields in rows)
            offset += len(page["ids"])
            if len(page["ids"]) < _PAGE:
                return
