"""Milvus under LlamaIndex: its asynchronous client, fields of other names, and modes that are no similarity."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from llama_index.retrievers.rag_explain import ExplainingRetriever

from tests.support.models import CORPUS
from tests.support.stacks import llama_index as framework
from tests.support.stacks.milvus_lite import milvus_file
from tests.support.stacks.promises import corpus_of

milvus = pytest.importorskip("llama_index.vector_stores.milvus")
pytest.importorskip("milvus_lite")


@contextmanager
def searched(folder: Path, **settings: Any) -> Iterator[Any]:
    corpus = corpus_of(folder)
    embedding = framework.embedding_of(corpus)
    size = len(embedding.get_text_embedding("a"))
    with milvus_file(folder) as uri:
        store = milvus.MilvusVectorStore(uri, dim=size, **settings)
        yield framework.filled(store, corpus, embedding)
        asyncio.run(store.aclient.close())
        store.client.close()


def test_the_asynchronous_client_finds_the_same_and_its_field_may_have_another_name(tmp_path: Path) -> None:
    with searched(tmp_path, similarity_metric="COSINE", embedding_field="meaning") as plain:
        retriever = ExplainingRetriever(plain)
        nodes: list[Any] = asyncio.run(retriever.aretrieve("the cat?"))
        expected = [(one.node_id, one.score) for one in plain.retrieve("the cat?")]
        assert [(one.node_id, one.score) for one in nodes] == expected
        for one in nodes:
            assert one.hit.metric == "cosine"
            assert one.explanation.surrogate is None
            assert abs(one.hit.gap) < 1e-3
        assert retriever.precompute(progress=False).kept == len(CORPUS)


def test_a_search_by_words_too_says_so(tmp_path: Path) -> None:
    function = milvus.utils.BM25BuiltInFunction(input_field_names="text", output_field_names="sparse_embedding")
    with searched(tmp_path, enable_sparse=True, sparse_embedding_function=function) as plain:
        asked = plain._index.as_retriever(similarity_top_k=3, vector_store_query_mode="hybrid")
        expected = [(one.node_id, one.score) for one in asked.retrieve("the cat?")]
        nodes: list[Any] = ExplainingRetriever(asked).retrieve("the cat?")
        assert [(one.node_id, one.score) for one in nodes] == expected
        for one in nodes:
            assert one.hit.metric == "unknown"
            assert "asked in hybrid mode" in one.explanation.surrogate
