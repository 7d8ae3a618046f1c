"""Every store that people run under LlamaIndex: same results, and scores that are explained."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from llama_index.retrievers.rag_explain import ExplainingRetriever

from rag_explain.results.stages import fused
from tests.support.stacks import TOP, Stack
from tests.support.stacks import llama_index as framework
from tests.support.stacks.promises import corpus_of, hold_what_was_scored, mark_other_vectors


@pytest.mark.parametrize("stack", framework.STACKS, ids=lambda stack: stack.name)
def test_a_wrapped_store_returns_the_same_and_what_is_explained_is_what_it_scored(stack: Stack, tmp_path: Path) -> None:
    hold_what_was_scored(framework, stack, tmp_path)


@pytest.mark.parametrize("stack", framework.STACKS, ids=lambda stack: stack.name)
def test_vectors_of_other_texts_are_marked(stack: Stack, tmp_path: Path) -> None:
    mark_other_vectors(framework, stack, tmp_path)


@pytest.mark.filterwarnings("ignore:Payload indexes have no effect")
@pytest.mark.parametrize("alpha", [None, 0.25])
def test_the_legs_that_a_qdrant_fuses_are_hidden_unless_they_are_asked_for(alpha: float | None, tmp_path: Path) -> None:
    library = pytest.importorskip("llama_index.vector_stores.qdrant")
    client = pytest.importorskip("qdrant_client").QdrantClient(":memory:")
    corpus, asked = corpus_of(tmp_path), list[str]()

    def letters(texts: list[str]) -> Any:
        asked.extend(texts)
        counts = [Counter(map(ord, text)) for text in texts]
        return [[*one] for one in counts], [[*map(float, one.values())] for one in counts]

    store = library.QdrantVectorStore(
        "both", client=client, enable_hybrid=True, sparse_doc_fn=letters, sparse_query_fn=letters
    )
    index = framework.filled(store, corpus, framework.embedding_of(corpus))._index  # type: ignore[attr-defined]
    base = index.as_retriever(similarity_top_k=TOP, vector_store_query_mode="hybrid", alpha=alpha)
    bare, query = base.retrieve("the cat?"), "the cat?"
    for node in ExplainingRetriever(base).retrieve(query):
        assert [stage.kind for stage in node.hit.stages] == ["search"]
        assert "ask_legs=True" in node.explanation.surrogate
    del asked[:]
    found = ExplainingRetriever(base, ask_legs=True).retrieve(query)
    assert [(one.node.node_id, one.score) for one in found] == [(one.node.node_id, one.score) for one in bare]
    assert asked == [query]  # nothing is asked for before it is looked at
    for node in found:
        dense, sparse, last = node.hit.stages
        assert (last.kind, last.metric, last.legs) == ("fusion", "relative score", 2)
        assert (dense.weight, sparse.weight) == (alpha or 0.5, 1 - (alpha or 0.5))
        assert fused(node.hit.stages, 2) == pytest.approx(node.score, rel=1e-12)
        assert "queries of their own" in last.note
        assert dense.is_missed or dense.metric == "cosine"
        assert dense.is_missed or dense.explanation is node.explanation
        assert sparse.explanation is None
    assert asked == [query] * 2
    client.close()
