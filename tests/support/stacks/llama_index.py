"""LlamaIndex's stores, filled through LlamaIndex as people do. Metadata are embedded with the text, as by default."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from uuid import uuid4

from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.schema import TextNode
from llama_index.embeddings.huggingface import HuggingFaceEmbedding
from llama_index.retrievers.rag_explain import ExplainingRetriever

from tests.support import postgres
from tests.support.stacks import TOP, Corpus, Seen, Stack, summed_up
from tests.support.stacks.milvus_lite import milvus_file


class Filling(HuggingFaceEmbedding):
    """Embeds other texts than it is given as long as it has a header: the model that searches is the same."""

    _header: str = PrivateAttr(default="")

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return super()._get_text_embeddings([self._header + text for text in texts])


def filled(store: Any, corpus: Corpus, embedding: Filling) -> BaseRetriever:
    """The retriever of a store, with all nodes in it; None: LlamaIndex's own store."""
    embedding._header = corpus.header
    nodes = [
        TextNode(text=text, id_=name, metadata={"chapter": f"number {at}"})
        for at, (name, text) in enumerate(zip(corpus.ids, corpus.texts, strict=True))
    ]
    context = StorageContext.from_defaults(vector_store=store)
    index = VectorStoreIndex(nodes, storage_context=context, embed_model=embedding)
    embedding._header = ""
    return index.as_retriever(similarity_top_k=TOP)


def embedding_of(corpus: Corpus) -> Filling:
    return _embedding(corpus.model)


@lru_cache(maxsize=1)
def _embedding(model: str) -> Filling:
    return Filling(model, device="cpu")


@contextmanager
def simple(corpus: Corpus, setting: str) -> Iterator[BaseRetriever]:
    yield filled(None, corpus, embedding_of(corpus))


@contextmanager
def chroma(corpus: Corpus, setting: str) -> Iterator[BaseRetriever]:
    import chromadb
    from llama_index.vector_stores.chroma import ChromaVectorStore

    collection = chromadb.EphemeralClient().create_collection(uuid4().hex, metadata={"hnsw:space": setting})
    yield filled(ChromaVectorStore(chroma_collection=collection), corpus, embedding_of(corpus))


@contextmanager
def qdrant(corpus: Corpus, setting: str) -> Iterator[BaseRetriever]:
    from llama_index.vector_stores.qdrant import QdrantVectorStore
    from qdrant_client import QdrantClient, models

    client, embedding = QdrantClient(":memory:"), embedding_of(corpus)
    size = len(embedding.get_text_embedding("a"))
    vectors = models.VectorParams(size=size, distance=models.Distance(setting))
    store = QdrantVectorStore("documents", client=client, dense_config=vectors)
    with warnings.catch_warnings():  # LlamaIndex makes an index of payloads, which a local Qdrant does without
        warnings.filterwarnings("ignore", "Payload indexes have no effect")
        retriever = filled(store, corpus, embedding)
    yield retriever
    client.close()


@contextmanager
def faiss(corpus: Corpus, setting: str) -> Iterator[BaseRetriever]:
    import faiss as library
    from llama_index.vector_stores.faiss import FaissVectorStore

    embedding = embedding_of(corpus)
    index = getattr(library, setting)(len(embedding.get_text_embedding("a")))
    yield filled(FaissVectorStore(faiss_index=index), corpus, embedding)


@contextmanager
def pgvector(corpus: Corpus, setting: str) -> Iterator[BaseRetriever]:
    from llama_index.vector_stores.postgres import PGVectorStore

    embedding = embedding_of(corpus)
    size = len(embedding.get_text_embedding("a"))
    hnsw = {"hnsw_m": 16, "hnsw_ef_construction": 64, "hnsw_ef_search": 40, "hnsw_dist_method": setting}
    with postgres.engine("psycopg2") as engine:
        store = PGVectorStore(
            engine=engine,
            async_engine=postgres.async_engine(),
            table_name=f"t{uuid4().hex}",
            schema_name="Kept_here",
            embed_dim=size,
            hnsw_kwargs=None if setting == "none" else hnsw,
        )
        yield filled(store, corpus, embedding)


@contextmanager
def milvus(corpus: Corpus, setting: str) -> Iterator[BaseRetriever]:
    from llama_index.vector_stores.milvus import MilvusVectorStore

    embedding = embedding_of(corpus)
    size = len(embedding.get_text_embedding("a"))
    with milvus_file(corpus.folder) as uri:
        store = MilvusVectorStore(uri, dim=size, similarity_metric=setting, use_async_client=False)
        yield filled(store, corpus, embedding)
        store.client.close()


def lancedb_retriever(corpus: Corpus, settings: Mapping[str, Any]) -> Any:
    """The retriever of a filled LanceDB store with these settings."""
    from llama_index.vector_stores.lancedb import LanceDBVectorStore

    with warnings.catch_warnings():  # it looks whether there is a table by LanceDB's old way
        warnings.filterwarnings("ignore", r"table_names\(\) is deprecated")
        store = LanceDBVectorStore(str(corpus.folder / "lancedb"), **settings)
    return filled(store, corpus, embedding_of(corpus))


@contextmanager
def lancedb(corpus: Corpus, setting: str) -> Iterator[BaseRetriever]:
    from lancedb.index import IvfFlat

    retriever = lancedb_retriever(corpus, {})
    if setting != "l2":  # a table without an index compares by l2
        config = IvfFlat(distance_type=setting, num_partitions=1)
        retriever._vector_store.table.create_index("vector", config=config)
    yield retriever


STACKS = [
    Stack("simple", "cosine", "llama_index.core", simple, "cosine"),
    Stack("Chroma", "l2", "llama_index.vector_stores.chroma", chroma, "exp(-squared L2)"),
    Stack("Chroma", "cosine", "llama_index.vector_stores.chroma", chroma, "exp(-cosine distance)"),
    Stack("Chroma", "ip", "llama_index.vector_stores.chroma", chroma, "exp(-(1 - inner product))"),
    Stack("Qdrant", "Cosine", "llama_index.vector_stores.qdrant", qdrant, "cosine"),
    Stack("Qdrant", "Dot", "llama_index.vector_stores.qdrant", qdrant, "inner product"),
    Stack("Qdrant", "Euclid", "llama_index.vector_stores.qdrant", qdrant, "L2"),
    Stack("Postgres", "none", "llama_index.vector_stores.postgres", pgvector, "cosine"),
    Stack("Postgres", "vector_l2_ops", "llama_index.vector_stores.postgres", pgvector, "cosine"),
    Stack("Milvus Lite", "COSINE", "llama_index.vector_stores.milvus", milvus, "cosine"),
    Stack("Milvus Lite", "IP", "llama_index.vector_stores.milvus", milvus, "inner product"),
    Stack("Milvus Lite", "L2", "llama_index.vector_stores.milvus", milvus, "squared L2"),
    Stack("LanceDB", "l2", "llama_index.vector_stores.lancedb", lancedb, "exp(-squared L2)"),
    Stack("LanceDB", "cosine", "llama_index.vector_stores.lancedb", lancedb, "exp(-cosine distance)"),
    Stack("LanceDB", "dot", "llama_index.vector_stores.lancedb", lancedb, "exp(-(1 - inner product))"),
    Stack("FAISS", "IndexFlatL2", "llama_index.vector_stores.faiss", faiss, "squared L2"),
    Stack("FAISS", "IndexFlatIP", "llama_index.vector_stores.faiss", faiss, "inner product"),
]


def seen(plain: Any, queries: Sequence[str]) -> Seen:
    """The same queries with and without the wrapper, in its one-line form."""
    wrapped = ExplainingRetriever(plain)
    built = wrapped.precompute(progress=False)
    found = [[(one.node.text, one.score) for one in plain.retrieve(query)] for query in queries]
    nodes: list[list[Any]] = [wrapped.retrieve(query) for query in queries]  # type: ignore[misc]
    return summed_up(found, [[node.hit for node in one] for one in nodes], built, wrapped)
