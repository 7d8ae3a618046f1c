"""What is inside a retriever, however deep: the retrievers that embed queries or search an index, and what embeds."""

from __future__ import annotations

from typing import Any

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.indices.base import BaseIndex
from llama_index.core.schema import BaseNode, IndexNode
from llama_index.retrievers.rag_explain._internals import embedding_model, retriever_index
from llama_index.retrievers.rag_explain.stores import embedder_of, stored_nodes

from rag_explain.retrieval import Encoder, has_model, inside, models_inside

_PASSED = (BaseRetriever, BaseQueryEngine)


def retrievers_inside(base: BaseRetriever, wrapper: type[BaseRetriever]) -> list[Any]:
    """Those that embed the query or search an index, and the wrapped ones, found by what they are."""

    def is_wanted(one: object) -> bool:
        if not isinstance(one, BaseRetriever) or isinstance(one, wrapper):
            return isinstance(one, BaseRetriever)
        return embedding_model(one) is not None or retriever_index(one) is not None

    return inside(base, is_wanted, _PASSED)


def retriever_encoder(retriever: BaseRetriever) -> Encoder:
    """What embeds the query of a retriever; it explains too, where its model is here."""
    embedder = embedder_of(embedding_model(retriever))
    return (embedder if has_model(embedder) else None), embedder


def loose_encoders(base: BaseRetriever) -> list[Encoder]:
    """Encoders of a retriever in which nothing embeds queries with a model that is here: what else holds one."""
    embedders = list(map(embedder_of, inside(base, lambda one: isinstance(one, BaseEmbedding), _PASSED)))
    found: list[Encoder] = [(one, one) for one in embedders if has_model(one)]
    models: list[Encoder] = [(model, None) for model in models_inside(base, _PASSED)]
    return found or models or [(None, one) for one in embedders]


def returned_nodes(base: BaseRetriever, indexes: list[BaseIndex[Any]]) -> list[BaseNode]:
    """All nodes of these indexes, and for an IndexNode the node to which it leads: that is what is returned for it."""
    led_to = inside(base, lambda one: isinstance(one, BaseNode), _PASSED)
    names = {node.node_id for node in led_to}
    stored = [node for index in indexes for node in stored_nodes(index)]
    return [node for node in stored if not (isinstance(node, IndexNode) and node.index_id in names)] + led_to
