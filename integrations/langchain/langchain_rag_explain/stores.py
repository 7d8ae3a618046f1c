"""What LangChain's vector stores and embeddings tell: how texts were embedded, which engine searches, what it keeps."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from types import FunctionType

from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

from langchain_rag_explain._internals import docstore_documents
from rag_explain.errors import InvalidInput
from rag_explain.results.metric import Metric
from rag_explain.retrieval import TOLERANCE, Embedder, Engine, engine_of


def embedder_of(embeddings: Embeddings | None) -> Embedder | None:
    """The embedding object of a store, as it is asked for vectors."""
    return None if embeddings is None else Embedder(embeddings, {"query": _query, "document": _document})


def _query(embeddings: Embeddings, text: str) -> list[float]:
    return embeddings.embed_query(text)


def _document(embeddings: Embeddings, text: str) -> list[float]:
    return embeddings.embed_documents([text])[0]


class InMemoryEngine:
    """LangChain's own store."""

    metric, tolerance = Metric("cosine"), TOLERANCE

    def __init__(self, store: InMemoryVectorStore) -> None:
        self._store = store

    def vectors(self, ids: Sequence[str]) -> dict[str, list[float]]:
        return {name: self._store.store[name]["vector"] for name in ids if name in self._store.store}

    def documents(self) -> list[tuple[str, str]]:
        return [(name, kept["text"]) for name, kept in self._store.store.items()]


def engine_of_store(store: VectorStore | None) -> Engine | None:
    """What searches for a store, where it is known."""
    if isinstance(store, InMemoryVectorStore):
        return InMemoryEngine(store)

    def rows(ids: Collection[str]) -> dict[str, int]:
        return {name: row for row, name in getattr(store, "index_to_docstore_id", {}).items() if name in ids}

    return engine_of(store, rows)


# Stores whose `similarity_search` is their `similarity_search_with_score` without the scores, sync and async.
_SAME_SEARCH = {
    ("langchain_core.vectorstores.in_memory", "InMemoryVectorStore"),
    ("langchain_community.vectorstores.faiss", "FAISS"),
}


def tells_scores(store: VectorStore) -> bool:
    """Whether a store that is asked for scores too is known to run the very same search.

    Only the class itself is known: one derived from it may search otherwise, and so may a method that was replaced, in
    the object or in its class, as libraries do that watch it.
    """
    kind = type(store)
    if (kind.__module__, kind.__qualname__) not in _SAME_SEARCH or any("search" in name for name in vars(store)):
        return False
    methods = (vars(kind).get(name) for name in ("similarity_search", "asimilarity_search"))
    return all(
        isinstance(method, FunctionType) and method.__module__ == kind.__module__ and not hasattr(method, "__wrapped__")
        for method in methods
    )


def stored_documents(store: VectorStore | None) -> Iterable[tuple[str, str]]:
    """The id and the text of all documents of a store, for the stores that can list them."""
    engine, kept = engine_of_store(store), docstore_documents(store)
    listed = None if engine is None else engine.documents()
    if listed is None and kept is not None:
        listed = [(name, document.page_content) for name, document in kept.items()]
    if listed is None:
        raise InvalidInput(f"{type(store).__name__} cannot list its documents: pass them to precompute")
    return listed


def stage_name(found_by: object) -> str:
    """The class of a retriever or store, with those of its compressors, which rerank or filter, where it has some."""
    compressor = getattr(found_by, "base_compressor", None)
    inside = () if compressor is None else getattr(compressor, "transformers", (compressor,))
    return type(found_by).__name__ + (" with " if inside else "") + " and ".join(type(one).__name__ for one in inside)
