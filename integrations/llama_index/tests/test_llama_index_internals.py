"""The private names of LlamaIndex that are used: each is still there, and means what it is used for."""

from __future__ import annotations

from llama_index.core.vector_stores import ExactMatchFilter, MetadataFilters, SimpleVectorStore
from llama_index.core.vector_stores.types import VectorStoreQueryMode
from llama_index.retrievers.rag_explain._internals import (
    embedding_model,
    query_embedding,
    query_mode,
    retriever_index,
    retriever_store,
    search_options,
    text_embedding,
    unfiltered,
)

from integrations.llama_index.tests.test_llama_index_retrievers import LocalEmbedding, Static, index, model


def test_index() -> None:
    made = index()
    assert retriever_index(made.as_retriever()) is made
    assert retriever_index(Static([])) is None


def test_vector_store() -> None:
    made = index()
    store = retriever_store(made.as_retriever())
    assert isinstance(store, SimpleVectorStore)
    assert store is made.vector_store
    assert retriever_store(Static([])) is None


def test_vector_store_query_mode() -> None:
    assert query_mode(index().as_retriever()) == VectorStoreQueryMode.DEFAULT
    assert query_mode(index().as_retriever(vector_store_query_mode="mmr")) == VectorStoreQueryMode.MMR


def test_kwargs() -> None:
    assert search_options(index().as_retriever(vector_store_kwargs={"query_type": "fts"})) == {"query_type": "fts"}
    assert search_options(index().as_retriever()) == {}
    assert search_options(Static([])) == {}


def test_embed_model() -> None:
    assert isinstance(embedding_model(index().as_retriever()), LocalEmbedding)
    assert embedding_model(Static([])) is None


def test_get_query_embedding_and_get_text_embedding() -> None:
    embedding = LocalEmbedding(model())
    assert query_embedding(embedding, "the cat") == embedding.get_query_embedding("the cat")
    assert text_embedding(embedding, "the cat") == embedding.get_text_embedding("the cat")


def test_filters() -> None:
    filters = MetadataFilters(filters=[ExactMatchFilter(key="lang", value="en")])
    made = index()
    retriever = made.as_retriever(similarity_top_k=2, filters=filters)
    wide = unfiltered(retriever, 9)
    assert wide is not None
    assert [one._filters for one in wide] == [filters, None]
    assert [one.similarity_top_k for one in wide] == [9, 9]
    assert (retriever._filters, retriever.similarity_top_k) == (filters, 2)  # it is left as it was
    assert unfiltered(made.as_retriever(), 9) is None
