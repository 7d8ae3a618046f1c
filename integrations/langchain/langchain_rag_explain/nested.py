"""What is inside a retriever, however deep: the stores that it searches, and what embeds their documents."""

from __future__ import annotations

from langchain_core.documents import BaseDocumentCompressor
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable
from langchain_core.vectorstores import VectorStore

from langchain_rag_explain.stores import embedder_of, embeddings_in
from rag_explain.retrieval import Encoder, has_model, inside, models_inside


def parts_inside(retriever: BaseRetriever | VectorStore | None, wrapper: type[BaseRetriever]) -> list[object]:
    """The vector stores and wrapped retrievers in it, found by what they are and not by the names of attributes."""
    direct = getattr(retriever, "vectorstore", None)
    if isinstance(direct, VectorStore):  # there is no quicker way to look
        return [direct]
    return inside(retriever, lambda one: isinstance(one, VectorStore | wrapper), (Runnable,))


def store_encoder(store: VectorStore) -> Encoder:
    """What embeds the documents of a store; it explains too, where its model is here."""
    embeddings = embeddings_in(store) or next(iter(inside(store, _is_embeddings, ())), None)
    embedder = embedder_of(embeddings)
    return (embedder if has_model(embedder) else None), embedder


def loose_encoders(retriever: BaseRetriever | None) -> list[Encoder]:
    """Encoders of a retriever that searches no vector store: embeddings in it, also those that filter; else a model."""
    embedders = map(embedder_of, inside(retriever, _is_embeddings, (Runnable, BaseDocumentCompressor)))
    found: list[Encoder] = [(one if has_model(one) else None, one) for one in embedders]
    return found or [(model, None) for model in models_inside(retriever, (Runnable,))]


def _is_embeddings(value: object) -> bool:
    return isinstance(value, Embeddings)
