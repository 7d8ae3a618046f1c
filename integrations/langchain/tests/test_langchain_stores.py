"""Every store that people run under LangChain: same results, and scores that are explained."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from langchain_rag_explain import ExplainingRetriever

from tests.support.stacks import Stack
from tests.support.stacks import langchain as framework
from tests.support.stacks.promises import corpus_of, hold_what_was_scored, mark_other_vectors


@pytest.mark.parametrize("stack", framework.STACKS, ids=lambda stack: stack.name)
def test_a_wrapped_store_returns_the_same_and_what_is_explained_is_what_it_scored(stack: Stack, tmp_path: Path) -> None:
    hold_what_was_scored(framework, stack, tmp_path)


@pytest.mark.parametrize("stack", framework.STACKS, ids=lambda stack: stack.name)
def test_vectors_of_other_texts_are_marked(stack: Stack, tmp_path: Path) -> None:
    mark_other_vectors(framework, stack, tmp_path)


@pytest.mark.parametrize("mode", ["sparse", "hybrid"])
def test_a_qdrant_that_mixes_in_sparse_vectors_says_so(mode: str, tmp_path: Path) -> None:
    library = pytest.importorskip("langchain_qdrant")
    models = pytest.importorskip("qdrant_client").models

    class Letters(library.SparseEmbeddings):  # type: ignore[misc,name-defined]
        def embed_documents(self, texts: list[str]) -> list[Any]:
            return [self.embed_query(text) for text in texts]

        def embed_query(self, text: str) -> Any:
            counts = Counter(ord(one) for one in text)
            return library.sparse_embeddings.SparseVector(indices=[*counts], values=[*map(float, counts.values())])

    corpus = corpus_of(tmp_path)
    store = library.QdrantVectorStore.construct_instance(
        embedding=framework.embeddings_of(corpus),
        sparse_embedding=Letters(),
        retrieval_mode=library.RetrievalMode(mode),
        client_options={"location": ":memory:"},
        distance=models.Distance.COSINE,
    )
    plain = framework.filled(store, corpus)
    wrapped = ExplainingRetriever(retriever=plain)
    found: list[Any] = wrapped.invoke("the cat?")
    assert [one.page_content for one in found] == [one.page_content for one in plain.invoke("the cat?")]
    for document in found:
        assert document.hit.metric == "unknown"
        assert f"asked in {mode} mode" in document.explanation.surrogate
