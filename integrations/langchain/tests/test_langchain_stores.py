"""Every store that people run under LangChain: same results, and scores that are explained."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from langchain_rag_explain import ExplainingRetriever

from rag_explain.results.stages import fused
from tests.support.stacks import Stack
from tests.support.stacks import langchain as framework
from tests.support.stacks.promises import corpus_of, hold_what_was_scored, mark_other_vectors


@pytest.mark.parametrize("stack", framework.STACKS, ids=lambda stack: stack.name)
def test_a_wrapped_store_returns_the_same_and_what_is_explained_is_what_it_scored(stack: Stack, tmp_path: Path) -> None:
    hold_what_was_scored(framework, stack, tmp_path)


@pytest.mark.parametrize("stack", framework.STACKS, ids=lambda stack: stack.name)
def test_vectors_of_other_texts_are_marked(stack: Stack, tmp_path: Path) -> None:
    mark_other_vectors(framework, stack, tmp_path)


QUERY = "the cat?"


def letters() -> Any:
    """Sparse vectors of letters, and how often they are asked for."""
    library = pytest.importorskip("langchain_qdrant")

    class Letters(library.SparseEmbeddings):  # type: ignore[misc,name-defined]
        asked = 0

        def embed_documents(self, texts: list[str]) -> list[Any]:
            return [_letters(text) for text in texts]

        def embed_query(self, text: str) -> Any:
            self.asked += 1
            return _letters(text)

    def _letters(text: str) -> Any:
        counts = Counter(ord(one) for one in text)
        return library.sparse_embeddings.SparseVector(indices=[*counts], values=[*map(float, counts.values())])

    return Letters()


def qdrant(folder: Path, sparse: Any, mode: str = "hybrid") -> Any:
    """The retriever of a store that holds both kinds of vectors."""
    library = pytest.importorskip("langchain_qdrant")
    corpus = corpus_of(folder)
    store = library.QdrantVectorStore.construct_instance(
        embedding=framework.embeddings_of(corpus),
        sparse_embedding=sparse,
        retrieval_mode=library.RetrievalMode(mode),
        client_options={"location": ":memory:"},
        distance=pytest.importorskip("qdrant_client").models.Distance.COSINE,
    )
    return framework.filled(store, corpus)


@pytest.mark.parametrize("mode", ["sparse", "hybrid"])
def test_a_qdrant_that_mixes_in_sparse_vectors_says_so(mode: str, tmp_path: Path) -> None:
    plain = qdrant(tmp_path, letters(), mode)
    wrapped = ExplainingRetriever(retriever=plain)
    found: list[Any] = wrapped.invoke(QUERY)
    assert [one.page_content for one in found] == [one.page_content for one in plain.invoke(QUERY)]
    for document in found:
        assert document.hit.metric == "unknown"
        assert f"asked in {mode} mode" in document.explanation.surrogate
        assert ("ask_legs=True" in document.explanation.surrogate) == (mode == "hybrid")
        assert [stage.kind for stage in document.hit.stages] == ["search"]


def fusions() -> list[Any]:
    models = pytest.importorskip("qdrant_client").models
    plain = [None, models.FusionQuery(fusion=models.Fusion.RRF), models.FusionQuery(fusion=models.Fusion.DBSF)]
    return [*plain, models.RrfQuery(rrf=models.Rrf(k=7))]


@pytest.mark.parametrize("way", ["retriever", "vectorstore"])
@pytest.mark.parametrize("number", range(4))
def test_the_legs_that_qdrant_fuses_are_asked_for_where_that_is_wanted(number: int, way: str, tmp_path: Path) -> None:
    sparse = letters()
    plain = qdrant(tmp_path, sparse)
    plain.search_kwargs = options = {"k": 3, **({"hybrid_fusion": fusions()[number]} if number else {})}
    bare = plain.vectorstore.similarity_search_with_score(QUERY, **options)
    given = {"retriever": plain} if way == "retriever" else {"vectorstore": plain.vectorstore, "search_kwargs": options}
    before = sparse.asked
    found: list[Any] = ExplainingRetriever(**given, ask_legs=True).invoke(QUERY)
    assert sparse.asked == before + 1  # nothing is asked for before it is looked at
    assert [(one.page_content, one.hit.score) for one in found] == [(one.page_content, score) for one, score in bare]
    for rank, document in enumerate(found, 1):
        dense, letters_leg, last = document.hit.stages
        assert [one.name.split()[-1] for one in (dense, letters_leg)] == ["dense", "sparse"]
        assert (last.kind, last.rank, last.legs) == ("fusion", rank, 2)
        assert fused(document.hit.stages, 2) == pytest.approx(document.hit.score, rel=1e-12)
        assert "queries of their own" in last.note
        if not dense.is_missed:
            assert dense.metric == "cosine"
            assert dense.explanation is document.explanation
            assert dense.score == pytest.approx(document.explanation.score, abs=1e-5)
        assert letters_leg.explanation is None
    assert sparse.asked == before + 2  # once for all of them
    for document in ExplainingRetriever(**given, ask_legs=True).invoke(QUERY, explain="off"):
        assert [stage.kind for stage in document.hit.stages] == ["search"]
    assert sparse.asked == before + 3


def test_legs_of_an_unknown_fusion_or_a_changed_store_are_shown_without_contributions(tmp_path: Path) -> None:
    models = pytest.importorskip("qdrant_client").models
    plain = qdrant(tmp_path, letters())
    plain.search_kwargs = {"k": 3, "hybrid_fusion": models.RrfQuery(rrf=models.Rrf(weights=[1.0, 3.0]))}
    for document in ExplainingRetriever(retriever=plain, ask_legs=True).invoke(QUERY):
        assert [stage.contribution for stage in document.hit.stages] == [None, None, None]
    plain.search_kwargs = {"k": 3}
    first, *_, last = ExplainingRetriever(retriever=plain, ask_legs=True).invoke(QUERY)
    plain.vectorstore.delete([first.metadata["_id"]])
    assert last.hit.stages[-1].kind == "merge"
    assert "it is not shown" in last.hit.stages[-1].note
    plain.vectorstore.client.close()
    fresh = qdrant(tmp_path, letters())
    document = ExplainingRetriever(retriever=fresh, ask_legs=True).invoke(QUERY)[0]
    fresh.vectorstore.client.close()
    (only,) = document.hit.stages
    assert only.score == document.hit.score
    assert "asked for again, which failed" in only.note
