"""LanceDB under LangChain: its table is opened late, and its documents come without ids."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from langchain_rag_explain import ExplainingRetriever

from rag_explain.errors import InvalidInput
from tests.support.models import CORPUS
from tests.support.stacks import langchain as framework
from tests.support.stacks.promises import corpus_of

lancedb = pytest.importorskip("langchain_lancedb")


def test_a_table_that_was_filled_elsewhere_is_listed_and_its_scores_are_known(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path)
    lancedb.LanceDB.from_texts(list(CORPUS), framework.embeddings_of(corpus), uri=tmp_path / "lancedb")

    def opened() -> Any:
        return lancedb.LanceDB(framework.embeddings_of(corpus), uri=tmp_path / "lancedb")

    assert ExplainingRetriever(vectorstore=opened()).precompute(progress=False).kept == len(CORPUS)
    retriever = ExplainingRetriever(vectorstore=opened(), k=3)
    documents: list[Any] = retriever.invoke("the cat?")
    later: list[Any] = asyncio.run(retriever.ainvoke("the cat?"))
    assert [one.page_content for one in documents] == [one.page_content for one in later]
    for at, one in enumerate(documents, 1):
        assert (one.id, one.hit.id, one.hit.metric) == (None, f"#{at}", "squared L2")
        assert one.explanation.surrogate is None
        assert abs(one.hit.gap) < 1e-3


def test_a_store_without_a_table_finds_nothing_and_cannot_be_listed(tmp_path: Path) -> None:
    store = lancedb.LanceDB(framework.embeddings_of(corpus_of(tmp_path)), uri=tmp_path / "lancedb")
    retriever = ExplainingRetriever(vectorstore=store)
    assert retriever.invoke("the cat?") == []
    with pytest.raises(InvalidInput, match="LanceDB cannot list its documents"):
        retriever.precompute()
