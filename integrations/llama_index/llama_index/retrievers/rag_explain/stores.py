"""What LlamaIndex's stores and embedding models tell: how texts were embedded, which engine searches, what it keeps."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.indices.base import BaseIndex
from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.utils import metadata_dict_to_node
from llama_index.retrievers.rag_explain._internals import (
    connected,
    query_embedding,
    retriever_index,
    retriever_store,
    search_options,
    text_embedding,
)

from rag_explain.errors import InvalidInput
from rag_explain.results.metric import UNKNOWN, Metric
from rag_explain.retrieval import Embedder, Engine, Kept, Place, engine_of

_CONTENT = "_node_content"  # where LlamaIndex writes a node, as JSON


def embedder_of(model: object | None) -> Embedder | None:
    """An embedding model, as it is asked for vectors: past its cache, its rate limit and the traces of it."""
    return None if model is None else Embedder(model, {"query": query_embedding, "document": text_embedding}, _uncached)


def _uncached(model: Any) -> Any:
    """The model without its cache: texts of ours are not kept among the user's. What is sent is limited and traced."""
    has_cache = getattr(model, "embeddings_cache", None) is not None
    return model.model_copy(update={"embeddings_cache": None}) if has_cache else model


class SimpleEngine(Engine):
    """LlamaIndex's own store."""

    def told_metric(self) -> Metric:
        return Metric("cosine")

    def vectors(self, ids: Sequence[str]) -> dict[str, list[float]]:
        kept = self.handle.data.embedding_dict
        return {name: kept[name] for name in ids if name in kept}


def engine_of_retriever(base: BaseRetriever, known: Engine | None = None) -> Engine | None:
    """What searches for a retriever, where it is known; `known` is what did last time."""
    return _engine_of_store(retriever_store(base), retriever_index(base), known)


def _engine_of_store(store: object, index: BaseIndex[Any] | None, known: Engine | None = None) -> Engine | None:
    if store is None:
        return None
    if isinstance(store, SimpleVectorStore):
        return SimpleEngine(store)
    return engine_of(store, _postgres_place(store) or _place(store, index), known)


def _postgres_place(store: Any) -> Place | None:
    """Where a PGVectorStore keeps its nodes; None for any other store.

    It ranks by cosine distance whatever its index was made for, and returns what that leaves of 1.
    """
    kinds = ((kind.__module__, kind.__qualname__) for kind in type(store).__mro__)
    if ("llama_index.vector_stores.postgres.base", "PGVectorStore") not in kinds:
        return None
    return Place(
        collection=f"data_{store.table_name}",
        key="node_id",
        vector="embedding",
        text="text",
        schema=store.schema_name,
        metric=Metric("cosine"),
    )


def _place(store: object, index: BaseIndex[Any] | None) -> Place:
    """Where a store keeps its nodes, by the attributes in which LlamaIndex's stores keep that."""

    def told(*names: str) -> Any:
        return next((value for name in names if (value := getattr(store, name, None)) is not None), None)

    def rows(ids: Collection[str]) -> dict[str, int]:
        """A FaissVectorStore calls its nodes by the number of their row; which node that is, the index knows."""
        known = {} if index is None else getattr(index.index_struct, "nodes_dict", {})
        return {name: int(row) for row, name in known.items() if name in ids and row.isdecimal()}

    keeps_nodes = bool(told("stores_text"))
    has_fields = told("embedding_field", "vector_column_name") is not None  # Milvus, LanceDB: no payload of any shape
    return Place(
        collection=told("collection_name"),
        vector=told("dense_vector_name", "embedding_field", "vector_column_name"),
        text=told("text_key") if has_fields else None,
        is_refined=told("refine_factor") is not None,
        rows=None if keeps_nodes else rows,
        is_exponential=told("collection_kwargs", "vector_column_name") is not None,  # Chroma, LanceDB
    )


def other_search(base: BaseRetriever) -> str | None:
    """The mode in which a store searches by its own settings, where that is not by similarity; None where it is."""
    store = retriever_store(base)
    if not hasattr(store, "vector_column_name"):  # LanceDB
        return None
    kind = search_options(base).get("query_type", getattr(store, "query_type", None))
    return None if kind in (None, "vector") else str(kind)


def score_metric(engine: Engine | None) -> Metric:
    """What the scores of nodes are: the engine's own, or what LlamaIndex makes of a distance."""
    return UNKNOWN if engine is None else replace(engine.metric, is_exponential=engine.place.is_exponential)


def stored_nodes(index: BaseIndex[Any]) -> list[BaseNode]:
    """All nodes of an index: from its docstore, from the engine of its vector store, or from that itself."""
    nodes = [node for node in index.docstore.docs.values() if isinstance(node, BaseNode)]
    if nodes:
        return nodes
    store = getattr(index, "vector_store", None)
    try:
        engine = _engine_of_store(connected(store) if _postgres_place(store) else store, index)
        listed = None if engine is None else engine.documents()
        # What has no such method cannot list its nodes either.
        return list(store.get_nodes(None)) if listed is None else [_node(one) for one in listed]  # type: ignore[union-attr]
    except Exception as error:
        raise InvalidInput(f"{type(store or index).__name__} cannot list its nodes: pass them to precompute") from error


def _node(kept: Kept) -> BaseNode:
    """A node from what LlamaIndex writes beside its vector, at one place or another."""
    inner = [one for one in kept.fields.values() if isinstance(one, dict)]
    written = next(one for one in (kept.fields, *inner) if _CONTENT in one)
    return metadata_dict_to_node(dict(written), text=kept.text)
