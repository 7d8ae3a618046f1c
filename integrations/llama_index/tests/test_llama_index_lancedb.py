"""LanceDB under LlamaIndex: modes in which scores are ranks, and indexes that code vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llama_index.retrievers.rag_explain import ExplainingRetriever

from tests.support.models import CORPUS
from tests.support.stacks import HEADER, Corpus
from tests.support.stacks import llama_index as framework
from tests.support.stacks.promises import corpus_of

lancedb = pytest.importorskip("llama_index.vector_stores.lancedb")


def explained(plain: Any) -> list[Any]:
    """The nodes of a wrapped retriever, which are those of the plain one."""
    expected = [(one.node_id, one.score) for one in plain.retrieve("the cat?")]
    nodes = ExplainingRetriever(plain).retrieve("the cat?")
    assert [(one.node_id, one.score) for one in nodes] == expected
    return nodes


@pytest.mark.parametrize("mode", ["fts", "hybrid"])
@pytest.mark.parametrize("is_per_retriever", [False, True])
@pytest.mark.filterwarnings("ignore:create_fts_index is deprecated")  # by LlamaIndex
def test_scores_that_are_ranks_are_said_to_be_no_similarity(mode: str, is_per_retriever: bool, tmp_path: Path) -> None:
    plain: Any = framework.lancedb_retriever(corpus_of(tmp_path), {} if is_per_retriever else {"query_type": mode})
    if is_per_retriever:
        options = {"query_type": mode}
        plain = plain._index.as_retriever(similarity_top_k=3, vector_store_kwargs=options)
    nodes = explained(plain)
    assert nodes
    for one in nodes:
        assert one.hit.metric == "unknown"
        assert f"asked in {mode} mode" in one.explanation.surrogate


@pytest.mark.parametrize("header", ["", HEADER])
def test_vectors_of_other_texts_are_marked_where_scores_are_estimates(header: str, tmp_path: Path) -> None:
    index = pytest.importorskip("lancedb.index")
    texts = [f"{CORPUS[at % len(CORPUS)]} {at}" for at in range(256)]  # the least that an index is trained on
    corpus = Corpus(texts, corpus_of(tmp_path).model, tmp_path, header)
    plain = framework.lancedb_retriever(corpus, {"vector_column_name": "text_vector", "text_key": "body"})
    table = plain._vector_store.table
    table.create_index("text_vector", config=index.IvfPq(distance_type="cosine", num_partitions=1, num_sub_vectors=4))
    for one in explained(plain):
        assert one.hit.metric == "exp(-twice the cosine distance)"
        assert (one.explanation.surrogate is not None) == bool(header)
        assert not header or "vector of this document is not the one" in one.explanation.surrogate
