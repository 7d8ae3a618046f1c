"""What LlamaIndex's stores and embedding models tell: how texts were embedded, which engine searches, what it keeps."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.indices.base import BaseIndex
from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.retrievers.rag_explain._internals import (
    query_embedding,
    retriever_index,
    retriever_store,
    text_embedding,
)

from rag_explain.errors import InvalidInput
from rag_explain.results.metric import UNKNOWN, Metric
from rag_explain.retrieval import TOLERANCE, ChromaEngine, Embedder, Engine, engine_of


def embedder_of(model: object | None) -> Embedder | None:
    """An embedding model, as it is asked for vectors: past its cache, its rate limit and the traces of it."""
    return None if model is None else Embedder(model, {"query": query_embedding, "document": text_embedding})


class SimpleEngine:
    """LlamaIndex's own store."""

    metric, tolerance = Metric("cosine"), TOLERANCE

    def __init__(self, store: SimpleVectorStore) -> None:
        self._store = store

    def vectors(self, ids: Sequence[str]) -> dict[str, list[float]]:
        kept = self._store.data.embedding_dict
        return {name: kept[name] for name in ids if name in kept}

    def documents(self) -> None:
        return None


def engine_of_retriever(base: BaseRetriever) -> Engine | None:
    """What searches for a retriever, where it is known."""
    store = retriever_store(base)
    if isinstance(store, SimpleVectorStore):
        return SimpleEngine(store)

    def rows(ids: Collection[str]) -> dict[str, int]:
        """A FaissVectorStore calls its nodes by the number of their row; which node that is, the index knows."""
        index = retriever_index(base)
        known = {} if index is None else getattr(index.index_struct, "nodes_dict", {})
        return {name: int(row) for row, name in known.items() if name in ids and row.isdecimal()}

    return engine_of(store, rows)


def score_metric(engine: Engine | None) -> Metric:
    """What the scores of nodes are: the engine's own, or what LlamaIndex makes of a distance."""
    if engine is None:
        return UNKNOWN
    return replace(engine.metric, is_exponential=True) if isinstance(engine, ChromaEngine) else engine.metric


def stored_nodes(index: BaseIndex[Any]) -> list[BaseNode]:
    """All nodes of an index, from its docstore or else from its vector store."""
    nodes = [node for node in index.docstore.docs.values() if isinstance(node, BaseNode)]
    if nodes:
        return nodes
    store = getattr(index, "vector_store", None)
    try:
        return list(store.get_nodes(None))  # type: ignore[union-attr]  # what has no such method cannot list either
    except Exception as error:
        raise InvalidInput(f"{type(store or index).__name__} cannot list its nodes: pass them to precompute") from error
