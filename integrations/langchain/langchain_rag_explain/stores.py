"""What LangChain's vector stores and embeddings tell: how texts were embedded, which engine searches, what it keeps."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from inspect import Parameter, signature
from types import FunctionType
from typing import Any

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

from langchain_rag_explain._internals import docstore_documents, open_table
from langchain_rag_explain.postgres import postgres_place, searching_store
from rag_explain.errors import InvalidInput
from rag_explain.results.metric import Metric
from rag_explain.retrieval import Embedder, Engine, Kept, Place, engine_of, has_model


def embedder_of(embeddings: Embeddings | Sequence[Embeddings] | None) -> Embedder | None:
    """The embedding object of a store, as it is asked for vectors: of several, the only one with a model."""
    if isinstance(embeddings, Sequence):
        found = [one for one in map(embedder_of, embeddings) if len(embeddings) == 1 or has_model(one)]
        return found[0] if len(found) == 1 else None
    return None if embeddings is None else Embedder(embeddings, {"query": _query, "document": _document}, _uncached)


def embeddings_in(store: VectorStore) -> Embeddings | Sequence[Embeddings]:
    """The embedding object of a store, or of one that only keeps it: not all stores have LangChain's property."""
    told = store.embeddings
    return [value for value in vars(store).values() if isinstance(value, Embeddings)] if told is None else told


def _uncached(embeddings: Any) -> Any:
    """What LangChain's CacheBackedEmbeddings asks: texts of ours are not kept among the user's."""
    return getattr(embeddings, "underlying_embeddings", embeddings)


def _query(embeddings: Embeddings, text: str) -> list[float]:
    return embeddings.embed_query(text)


def _document(embeddings: Embeddings, text: str) -> list[float]:
    return embeddings.embed_documents([text])[0]


class InMemoryEngine(Engine):
    """LangChain's own store."""

    def told_metric(self) -> Metric:
        return Metric("cosine")

    def vectors(self, ids: Sequence[str]) -> dict[str, list[float]]:
        return {name: self.handle.store[name]["vector"] for name in ids if name in self.handle.store}

    def documents(self) -> list[Kept]:
        return [Kept(name, kept["text"], kept["metadata"]) for name, kept in self.handle.store.items()]


def engine_of_store(store: VectorStore | None, known: Engine | None = None) -> Engine | None:
    """What searches for a store, where it is known; `known` is what did last time."""
    if store is None:
        return None
    if isinstance(store, InMemoryVectorStore):
        return InMemoryEngine(store)
    store = searching_store(store)
    return engine_of(store, postgres_place(store) or _place(store), known)


def _place(store: VectorStore | None) -> Place:
    """Where a store keeps its documents, by the attributes in which LangChain's stores keep that."""

    def told(*names: str) -> Any:
        return next((value for name in names if (value := getattr(store, name, None)) is not None), None)

    def rows(ids: Collection[str]) -> dict[str, int]:
        return {name: row for row, name in told("index_to_docstore_id").items() if name in ids}

    vector = told("vector_name", "_vector_field")
    return Place(
        collection=told("collection_name"),
        key=told("_primary_field") or "id",
        vector=vector if isinstance(vector, str) else None,  # a Milvus may have several
        text=told("content_payload_key", "_text_field"),
        rows=None if told("index_to_docstore_id") is None else rows,
    )


# Where stores write the id of a document that they return without one: in its metadata.
_IDS: tuple[str, ...] = ("_id",)


def document_id(document: Document, store: VectorStore | None) -> str | None:
    """What the store calls this document; None where it does not tell."""
    if document.id is not None:
        return document.id
    key, names = getattr(store, "_primary_field", None), _IDS
    if key is not None:  # a Milvus writes it where it was told to, unless the document's own metadata have a field
        names = () if getattr(store, "_metadata_field", None) else (key,)
    return next((str(document.metadata[name]) for name in names if name in document.metadata), None)


def other_search(store: VectorStore | None, options: Mapping[str, Any]) -> str | None:
    """Why a store's own scores are not the similarity of two vectors, by its settings; None where they are.

    `options` are those of the search, which may set a mode for it alone.
    """
    mode = getattr(getattr(store, "retrieval_mode", None), "value", "dense")
    is_mixed = options.get("hybrid_search_config", getattr(searching_store(store), "hybrid_search_config", None))
    if is_mixed or getattr(store, "_is_multi_vector", False):  # PGVectorStore; Milvus
        mode = "hybrid"
    elif getattr(store, "_is_sparse", False):
        mode = "sparse"
    elif getattr(store, "_is_function_only", False):  # embeds in the server
        mode = "built-in function"
    if mode == "dense":
        return None
    hidden = "; its server fuses, and tells nothing of the legs: ask_legs=True asks for them too"
    return f"the store was asked in {mode} mode, not by this encoder's similarity alone{hidden * fuses_inside(store)}"


def fuses_inside(store: object) -> bool:
    """Whether this is a QdrantVectorStore in hybrid mode, by its shape."""
    mode = getattr(getattr(store, "retrieval_mode", None), "value", None)
    return mode == "hybrid" and hasattr(store, "sparse_vector_name")


# Stores whose `similarity_search` is their `similarity_search_with_score` without the scores, sync and async.
_SAME_SEARCH = {
    ("langchain_core.vectorstores.in_memory", "InMemoryVectorStore"),
    ("langchain_community.vectorstores.faiss", "FAISS"),
    ("langchain_chroma.vectorstores", "Chroma"),
    ("langchain_lancedb.vectorstores", "LanceDB"),
    ("langchain_milvus.vectorstores.milvus", "Milvus"),
    ("langchain_qdrant.qdrant", "QdrantVectorStore"),
    ("langchain_postgres.vectorstores", "PGVector"),
    ("langchain_postgres.v2.vectorstores", "PGVectorStore"),
    ("langchain_postgres.v2.async_vectorstore", "AsyncPGVectorStore"),
}


def tells_scores(store: VectorStore) -> bool:
    """Whether a store that is asked for scores too is known to run the very same search.

    Only the class itself is known: one derived from it may search otherwise, and so may a method that was replaced, in
    the object or in its class, as libraries do that watch it.
    """
    kind = type(store)
    if (kind.__module__, kind.__qualname__) not in _SAME_SEARCH or _is_patched(store):
        return False
    own, inherited = (kind.__module__, VectorStore.__module__)  # the asynchronous one of VectorStore runs the other
    sync, other = (getattr(kind, name) for name in ("similarity_search", "asimilarity_search"))
    return _is_of(sync, own) and (_is_of(other, own) or _is_of(other, inherited))


def _is_patched(store: VectorStore) -> bool:
    """Whether the object has a search of its own; Milvus keeps settings of such names there too."""
    return any("search" in name and callable(value) for name, value in vars(store).items())


def _is_of(method: object, module: str) -> bool:
    """Whether a method is what this module defines, and nothing that was put in its place."""
    return isinstance(method, FunctionType) and method.__module__ == module and not hasattr(method, "__wrapped__")


def scored_options(store: VectorStore, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a search that the scored one takes too: PGVector's plain one takes others, and ignores them."""
    taken = signature(store.similarity_search_with_score).parameters
    takes_all = any(one.kind is Parameter.VAR_KEYWORD for one in taken.values())
    return {name: value for name, value in options.items() if takes_all or name in taken}


def stored_documents(store: VectorStore) -> Iterator[tuple[str | None, str]]:
    """The id and the text of all documents of a store, for the stores that can list them."""
    open_table(store)
    engine, kept = engine_of_store(store), docstore_documents(store)
    listed = None if engine is None else engine.documents()
    if listed is None and kept is not None:
        listed = [Kept(name, document.page_content, {}) for name, document in kept.items()]
    if listed is None:
        raise InvalidInput(f"{type(store).__name__} cannot list its documents: pass them to precompute")
    return ((one.id, one.text) for one in listed if one.text)


def stage_name(found_by: object) -> str:
    """The class of a retriever or store, with those of its compressors, which rerank or filter, where it has some."""
    compressor = getattr(found_by, "base_compressor", None)
    inside = () if compressor is None else getattr(compressor, "transformers", (compressor,))
    return type(found_by).__name__ + (" with " if inside else "") + " and ".join(type(one).__name__ for one in inside)
