"""Every private name of LlamaIndex that is used here, and for what. A test per name notices when one is renamed."""

from __future__ import annotations

import copy
from inspect import unwrap
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.indices.base import BaseIndex
from llama_index.core.indices.vector_store.retrievers import VectorIndexRetriever
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.core.vector_stores.types import VectorStoreQueryMode


def retriever_index(retriever: BaseRetriever) -> BaseIndex[Any] | None:
    """`_index`: what a retriever searches, None where it has no index."""
    return getattr(retriever, "_index", None)


def retriever_store(retriever: BaseRetriever) -> object | None:
    """`_vector_store`: what scores the nodes of a retriever over vectors, None for any other."""
    return getattr(retriever, "_vector_store", None)


def query_mode(retriever: BaseRetriever) -> VectorStoreQueryMode:
    """`_vector_store_query_mode`: whether nodes are ranked by similarity alone, by MMR, with keywords and so on."""
    mode: VectorStoreQueryMode = getattr(retriever, "_vector_store_query_mode", VectorStoreQueryMode.DEFAULT)
    return mode


def search_options(retriever: BaseRetriever) -> dict[str, Any]:
    """`_kwargs`: what a retriever over vectors passes on to its store in each search."""
    options = getattr(retriever, "_kwargs", None)
    return options if isinstance(options, dict) else {}


def embedding_model(retriever: BaseRetriever) -> object | None:
    """`_embed_model`: what embeds the query of a retriever over vectors, None for any other."""
    return getattr(retriever, "_embed_model", None)


def query_embedding(model: Any, text: str) -> Any:
    """`_get_query_embedding`: what an embedding model computes for a query, without the span that LlamaIndex adds."""
    return unwrap(type(model)._get_query_embedding)(model, text)


def text_embedding(model: Any, text: str) -> Any:
    """`_get_text_embedding`: what an embedding model computes for a node, without the span that LlamaIndex adds."""
    return unwrap(type(model)._get_text_embedding)(model, text)


def fused_retrievers(retriever: QueryFusionRetriever) -> list[BaseRetriever]:
    """`_retrievers`: what a fusion asks, in order."""
    return retriever._retrievers


def fusion_weights(retriever: QueryFusionRetriever) -> list[float]:
    """`_retriever_weights`: what each of them counts."""
    return retriever._retriever_weights


def fuses_inside(retriever: BaseRetriever) -> bool:
    """`_hybrid_fusion_fn`: whether the store of a retriever (a hybrid QdrantVectorStore) fuses what it finds itself."""
    store = retriever_store(retriever)
    return query_mode(retriever) == VectorStoreQueryMode.HYBRID and hasattr(store, "_hybrid_fusion_fn")


def found_in_mode(retriever: Any, mode: VectorStoreQueryMode, bundle: QueryBundle) -> list[NodeWithScore]:
    """`_retrieve`: what a retriever over vectors finds in another mode, without the span that LlamaIndex adds."""
    other = copy.copy(retriever)
    other._vector_store_query_mode = mode
    found: list[NodeWithScore] = unwrap(type(other)._retrieve)(other, bundle)
    return found


def vector_share(retriever: Any) -> float:
    """`_alpha`: what vectors count in a hybrid search; words count the rest."""
    return 0.5 if retriever._alpha is None else float(retriever._alpha)


def connected(store: Any) -> Any:
    """`_initialize`: a PGVectorStore, which connects to its database when it is first used, connected."""
    store._initialize()
    return store


def unfiltered(retriever: BaseRetriever, k: int) -> tuple[BaseRetriever, BaseRetriever] | None:
    """`_filters`: a VectorIndexRetriever that returns k nodes, and the same without its metadata filters; None where it
    has none, or is of another class."""
    if type(retriever) is not VectorIndexRetriever or retriever._filters is None:
        return None
    wide, open_ = copy.copy(retriever), copy.copy(retriever)
    wide.similarity_top_k = open_.similarity_top_k = k
    open_._filters = None
    return wide, open_
