"""LangChain's stores, filled through LangChain as people do."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from uuid import uuid4

from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langchain_huggingface import HuggingFaceEmbeddings
from langchain_rag_explain import ExplainingRetriever
from langchain_rag_explain.stores import embedder_of, embeddings_in
from pydantic import PrivateAttr

from tests.support import postgres
from tests.support.stacks import TOP, Corpus, Seen, Stack, summed_up
from tests.support.stacks.milvus_lite import milvus_file, old_connection


class Filling(HuggingFaceEmbeddings):
    """Embeds other texts than it is given as long as it has a header: the model that searches is the same."""

    _header: str = PrivateAttr(default="")

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return super().embed_documents([self._header + text for text in texts])


def is_asynchronous(store: VectorStore) -> bool:
    """Whether a store answers in a loop only."""
    return getattr(store, "async_mode", False)


def filled(store: VectorStore, corpus: Corpus) -> BaseRetriever:
    """The retriever of a store, with all texts in it."""
    embeddings: Any = embedder_of(embeddings_in(store)).holder
    embeddings._header = corpus.header
    metadatas = [{"number": at} for at in range(len(corpus.ids))]
    options: dict[str, Any] = {"ids": list(corpus.ids), "metadatas": metadatas}
    if is_asynchronous(store):
        asyncio.run(store.aadd_texts(list(corpus.texts), **options))
    else:
        store.add_texts(list(corpus.texts), **options)
    embeddings._header = ""
    return store.as_retriever(search_kwargs={"k": TOP})


def embeddings_of(corpus: Corpus) -> Filling:
    return _embeddings(corpus.model)


@lru_cache(maxsize=1)
def _embeddings(model: str) -> Filling:
    unit = {"normalize_embeddings": True}
    return Filling(model_name=model, model_kwargs={"device": "cpu"}, encode_kwargs=unit)


@contextmanager
def in_memory(corpus: Corpus, setting: str) -> Iterator[BaseRetriever]:
    yield filled(InMemoryVectorStore(embeddings_of(corpus)), corpus)


@contextmanager
def chroma(corpus: Corpus, setting: str) -> Iterator[BaseRetriever]:
    from langchain_chroma import Chroma

    options = {"collection_name": uuid4().hex, "collection_metadata": {"hnsw:space": setting}}
    yield filled(Chroma(embedding_function=embeddings_of(corpus), **options), corpus)


@contextmanager
def qdrant(corpus: Corpus, setting: str) -> Iterator[BaseRetriever]:
    from langchain_qdrant import QdrantVectorStore
    from qdrant_client import QdrantClient, models

    client, embeddings, distance = QdrantClient(":memory:"), embeddings_of(corpus), models.Distance(setting)
    size = len(embeddings.embed_query("a"))
    client.create_collection("documents", vectors_config=models.VectorParams(size=size, distance=distance))
    yield filled(QdrantVectorStore(client, "documents", embeddings, distance=distance), corpus)
    client.close()


@contextmanager
def faiss(corpus: Corpus, setting: str) -> Iterator[BaseRetriever]:
    from faiss import IndexFlatIP, IndexFlatL2

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`langchain-community` is being sunset")
        from langchain_community.docstore.in_memory import InMemoryDocstore
        from langchain_community.vectorstores import FAISS
        from langchain_community.vectorstores.utils import DistanceStrategy

    embeddings = embeddings_of(corpus)
    size = len(embeddings.embed_query("a"))
    index, strategy = {
        "IndexFlatL2": (IndexFlatL2(size), DistanceStrategy.EUCLIDEAN_DISTANCE),
        "IndexFlatIP": (IndexFlatIP(size), DistanceStrategy.MAX_INNER_PRODUCT),
    }[setting]
    yield filled(FAISS(embeddings, index, InMemoryDocstore(), {}, distance_strategy=strategy), corpus)


@contextmanager
def pgvector(corpus: Corpus, setting: str) -> Iterator[BaseRetriever]:
    from langchain_postgres import PGVector
    from langchain_postgres.vectorstores import DistanceStrategy

    with postgres.engine() as engine:
        options = {"collection_name": uuid4().hex, "distance_strategy": DistanceStrategy(setting)}
        store = PGVector(embeddings_of(corpus), connection=engine, **options)
        yield filled(store, corpus)
        store.delete_collection()  # ids are those of one document in all collections


@contextmanager
def async_pgvector(corpus: Corpus, setting: str) -> Iterator[BaseRetriever]:
    from langchain_postgres import PGVector
    from langchain_postgres.vectorstores import DistanceStrategy

    options = {"collection_name": uuid4().hex, "distance_strategy": DistanceStrategy(setting)}
    store = PGVector(embeddings_of(corpus), connection=postgres.async_engine(), create_extension=False, **options)
    yield filled(store, corpus)
    asyncio.run(store.adelete_collection())


@contextmanager
def pgvector_store(corpus: Corpus, setting: str) -> Iterator[BaseRetriever]:
    from langchain_postgres import PGEngine, PGVectorStore
    from langchain_postgres.v2.indexes import DistanceStrategy

    engine, embeddings, table = PGEngine.from_connection_string(postgres.url("asyncpg")), embeddings_of(corpus), uuid4()
    columns = {"id_column": "Name of it", "content_column": "said", "embedding_column": "the vector"}
    try:
        engine.init_vectorstore_table(str(table), len(embeddings.embed_query("a")), **columns)
        strategy = DistanceStrategy[setting]
        store = PGVectorStore.create_sync(engine, embeddings, str(table), distance_strategy=strategy, **columns)
        yield filled(store, corpus)
    finally:
        engine._run_as_sync(engine.close())


@contextmanager
def milvus(corpus: Corpus, setting: str) -> Iterator[BaseRetriever]:
    from langchain_milvus import Milvus

    with milvus_file(corpus.folder) as uri:
        options = {"metric_type": setting, "index_type": "FLAT"}
        store = Milvus(embeddings_of(corpus), connection_args={"uri": uri}, index_params=options)
        with old_connection(store.alias, uri):
            yield filled(store, corpus)
        asyncio.run(store.aclient.close())
        store.client.close()


@contextmanager
def lancedb(corpus: Corpus, setting: str) -> Iterator[BaseRetriever]:
    from lancedb.index import IvfFlat
    from langchain_lancedb import LanceDB

    store = LanceDB(embeddings_of(corpus), corpus.folder / "lancedb")
    retriever = filled(store, corpus)
    if setting != "l2":  # a table without an index compares by l2
        store._table.create_index("vector", config=IvfFlat(distance_type=setting, num_partitions=1))
    yield retriever


STACKS = [
    Stack("in memory", "cosine", "langchain_core", in_memory, "cosine"),
    Stack("Chroma", "l2", "langchain_chroma", chroma, "squared L2"),
    Stack("Chroma", "cosine", "langchain_chroma", chroma, "cosine distance"),
    Stack("Chroma", "ip", "langchain_chroma", chroma, "1 - inner product"),
    Stack("Qdrant", "Cosine", "langchain_qdrant", qdrant, "cosine"),
    Stack("Qdrant", "Dot", "langchain_qdrant", qdrant, "inner product"),
    Stack("Qdrant", "Euclid", "langchain_qdrant", qdrant, "L2"),
    Stack("PGVector", "cosine", "langchain_postgres", pgvector, "cosine distance"),
    Stack("PGVector", "l2", "langchain_postgres", pgvector, "L2"),
    Stack("PGVector", "inner", "langchain_postgres", pgvector, "negative inner product"),
    Stack("asynchronous PGVector", "cosine", "langchain_postgres", async_pgvector, "cosine distance"),
    Stack("PGVectorStore", "COSINE_DISTANCE", "langchain_postgres", pgvector_store, "cosine distance"),
    Stack("PGVectorStore", "EUCLIDEAN", "langchain_postgres", pgvector_store, "L2"),
    Stack("PGVectorStore", "INNER_PRODUCT", "langchain_postgres", pgvector_store, "inner product"),
    Stack("Milvus Lite", "COSINE", "langchain_milvus", milvus, "cosine"),
    Stack("Milvus Lite", "IP", "langchain_milvus", milvus, "inner product"),
    Stack("Milvus Lite", "L2", "langchain_milvus", milvus, "squared L2"),
    Stack("LanceDB", "l2", "langchain_lancedb", lancedb, "squared L2", has_vectors=False),
    Stack("LanceDB", "cosine", "langchain_lancedb", lancedb, "cosine distance", has_vectors=False),
    Stack("LanceDB", "dot", "langchain_lancedb", lancedb, "1 - inner product", has_vectors=False),
    Stack("FAISS", "IndexFlatL2", "langchain_community", faiss, "squared L2"),
    Stack("FAISS", "IndexFlatIP", "langchain_community", faiss, "inner product"),
]


def seen(plain: Any, queries: Sequence[str]) -> Seen:
    """The same queries with and without the wrapper, in its one-line form."""
    wrapped, store, loops = ExplainingRetriever(retriever=plain), plain.vectorstore, is_asynchronous(plain.vectorstore)
    built = wrapped.precompute(progress=False)
    options = {name: value for name, value in plain.search_kwargs.items() if name == "k"}

    def invoked(retriever: Any, query: str) -> Any:
        return asyncio.run(retriever.ainvoke(query)) if loops else retriever.invoke(query)

    def scored(query: str) -> Any:
        found = store.asimilarity_search_with_score if loops else store.similarity_search_with_score
        return asyncio.run(found(query, **options)) if loops else found(query, **options)

    found = [scored(query) for query in queries]
    assert [[one.page_content for one in invoked(plain, query)] for query in queries] == [
        [document.page_content for document, _ in one] for one in found
    ]
    documents: list[list[Any]] = [invoked(wrapped, query) for query in queries]
    return summed_up(
        [[(document.page_content, float(score)) for document, score in one] for one in found],
        [[document.hit for document in one] for one in documents],
        built,
        wrapped,
    )
