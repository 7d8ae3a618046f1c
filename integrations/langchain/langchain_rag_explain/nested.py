"""What is inside a retriever, however deep: the stores that it searches, and what embeds their documents."""

from __future__ import annotations

from collections.abc import Iterator

from langchain_core.documents import BaseDocumentCompressor
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable
from langchain_core.vectorstores import VectorStore

from langchain_rag_explain.stores import embedder_of
from rag_explain.retrieval import Encoder, has_model, held_model, inside


def parts_inside(retriever: BaseRetriever | VectorStore | None, wrapper: type[BaseRetriever]) -> list[object]:
    """The vector stores and wrapped retrievers in it, found by what they are and not by the names of attributes."""
    return inside(retriever, (VectorStore, wrapper), (Runnable,))


def store_encoder(store: VectorStore) -> Encoder:
    """What embeds the documents of a store; it explains too, where its model is here."""
    embeddings = store.embeddings or next(iter(inside(store, (Embeddings,), ())), None)
    embedder = embedder_of(embeddings)
    return (embedder if has_model(embedder) else None), embedder


def loose_encoders(retriever: BaseRetriever | None) -> Iterator[Encoder]:
    """Encoders of a retriever that searches no vector store: embeddings in it, those that filter too, or a model."""
    for embeddings in inside(retriever, (Embeddings,), (Runnable, BaseDocumentCompressor)):
        embedder = embedder_of(embeddings)
        yield (embedder if has_model(embedder) else None), embedder
    model = held_model(retriever)
    if model is not None:
        yield model, None
