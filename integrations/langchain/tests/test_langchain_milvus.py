"""Milvus under LangChain: however its fields are called, and where its scores are no similarity."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from langchain_rag_explain import ExplainingRetriever

from rag_explain import Explainer
from tests.support.models import CORPUS
from tests.support.stacks import HEADER
from tests.support.stacks import langchain as framework
from tests.support.stacks.milvus_lite import milvus_file, old_connection
from tests.support.stacks.promises import corpus_of

milvus = pytest.importorskip("langchain_milvus")
pytest.importorskip("milvus_lite")

SPARSE = {"index_type": "SPARSE_INVERTED_INDEX", "metric_type": "BM25"}
BY_WORDS = {"metric_type": "BM25"}  # langchain-milvus asks for what Milvus Lite does not do otherwise
DENSE = {"index_type": "FLAT", "metric_type": "COSINE"}
IDS = ["it's", 'so "called"', "back\\slash", "Zoë 猫", *map(str, range(4, len(CORPUS)))]


@contextmanager
def searched(folder: Path, header: str = "", **settings: Any) -> Iterator[Any]:
    """A plain retriever over a store with these settings, whose documents have metadata that look like ids."""
    corpus = corpus_of(folder, header)
    with milvus_file(folder) as uri:
        embeddings = settings.pop("embeddings", framework.embeddings_of(corpus))
        store = milvus.Milvus(embeddings, connection_args={"uri": uri}, **settings)
        if embeddings is not None:
            embeddings._header = header
        with old_connection(store.alias, uri):
            ids = None if settings.get("auto_id") else IDS
            other = {"_id": "x", **({"pk": "y"} if "primary_field" in settings else {})}
            store.add_texts(list(CORPUS), [other for _ in CORPUS], ids=ids)
            if embeddings is not None:
                embeddings._header = ""
            yield store.as_retriever(search_kwargs={"k": 3})
        asyncio.run(store.aclient.close())
        store.client.close()


def found(plain: Any, **options: Any) -> list[Any]:
    """The documents of a wrapped retriever, which are those of the plain one."""
    documents = ExplainingRetriever(retriever=plain, **options).invoke("the cat?")
    assert documents
    assert [one.page_content for one in documents] == [one.page_content for one in plain.invoke("the cat?")]
    return documents


@pytest.mark.parametrize(
    ("settings", "ids"),
    [
        ({"primary_field": "key", "text_field": "body", "vector_field": "meaning"}, set(IDS)),
        ({"primary_field": "key", "auto_id": True}, set(map(str, range(1, len(CORPUS) + 1)))),
        ({"primary_field": "key", "metadata_field": "about"}, {"#1", "#2", "#3"}),  # where ids are not given
    ],
)
@pytest.mark.filterwarnings("ignore:`metadata_field` is about to be deprecated")  # by langchain-milvus
def test_ids_are_read_where_the_store_writes_them(settings: dict[str, Any], ids: set[str], tmp_path: Path) -> None:
    with searched(tmp_path, **settings) as plain:
        documents = found(plain)
        assert {one.hit.id for one in documents} <= ids
        assert {one.hit.metric for one in documents} == {"squared L2"}
        for one in documents:
            assert one.explanation.surrogate is None
            assert abs(one.hit.gap) < 1e-3
        wrapped = ExplainingRetriever(retriever=plain)
        later: list[Any] = asyncio.run(wrapped.ainvoke("the cat?"))
        assert [one.hit.id for one in later] == [one.hit.id for one in documents]
        assert [one.hit.score for one in later] == [one.hit.score for one in documents]
        assert wrapped.precompute(progress=False).kept == len(CORPUS)


def test_filters_thresholds_and_diversity_find_the_same(tmp_path: Path) -> None:
    with searched(tmp_path, index_params=DENSE) as plain:
        store = plain.vectorstore
        for one in found(store.as_retriever(search_kwargs={"k": 3, "expr": 'pk != "it\'s"'})):
            assert one.hit.id in IDS[1:]
            assert one.explanation.surrogate is None
            assert abs(one.hit.gap) < 1e-3
        threshold = {"k": 3, "score_threshold": 0.9}
        for one in found(store.as_retriever(search_type="similarity_score_threshold", search_kwargs=threshold)):
            assert one.explanation.surrogate is None
        for one in found(store.as_retriever(search_type="mmr", search_kwargs={"k": 2})):
            assert "MMR" in one.explanation.surrogate


@pytest.mark.parametrize("header", ["", HEADER])
def test_vectors_of_other_texts_are_marked_where_scores_are_estimates(header: str, tmp_path: Path) -> None:
    index = {"index_type": "IVF_SQ8", "metric_type": "COSINE", "params": {"nlist": 1}}
    with searched(tmp_path, header, index_params=index) as plain:
        for one in found(plain):
            assert (one.explanation.surrogate is not None) == bool(header)
            assert not header or "vector of this document is not the one" in one.explanation.surrogate


@pytest.mark.filterwarnings("ignore:The 'ranker_type' and 'ranker_params' parameters")  # by langchain-milvus, unasked
def test_a_search_by_words_too_says_so(tmp_path: Path) -> None:
    function = milvus.BM25BuiltInFunction()
    fields = {"vector_field": ["dense", "sparse"], "index_params": [DENSE, SPARSE], "search_params": [{}, BY_WORDS]}
    with searched(tmp_path, builtin_function=function, **fields) as plain:
        documents = found(plain)
    for one in documents:
        assert one.hit.metric == "unknown"
        assert "asked in hybrid mode" in one.explanation.surrogate


def test_a_search_by_words_alone_says_so(tmp_path: Path) -> None:
    function = milvus.BM25BuiltInFunction()
    corpus = corpus_of(tmp_path)
    fields = {"vector_field": "sparse", "index_params": SPARSE, "search_params": BY_WORDS}
    with searched(tmp_path, embeddings=None, builtin_function=function, **fields) as plain:
        documents = found(plain, explainer=Explainer(corpus.model))
    for one in documents:
        assert one.hit.metric == "unknown"
        assert "asked in sparse mode" in one.explanation.surrogate
