"""Retrievers that hold a BM25 index: what they return is explained with the score that they gave it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
import pytest
import Stemmer
from langchain_core.documents import Document
from llama_index.core.schema import MetadataMode, TextNode
from llama_index.core.vector_stores import FilterOperator, MetadataFilter, MetadataFilters
from llama_index.retrievers.bm25 import BM25Retriever as LlamaBM25
from rank_bm25 import BM25Plus

from rag_explain import Explainer
from rag_explain.errors import InvalidInput, ModelChanged
from rag_explain.texts.passage import Passage

with warnings.catch_warnings():  # langchain-community says that it is no longer maintained
    warnings.simplefilter("ignore", DeprecationWarning)
    from langchain_community.retrievers import BM25Retriever as ChainBM25

DOCUMENTS = (
    "The quick brown fox jumps over the lazy dogs, running fast.",
    "A dog ran. The dog was running after other dogs!",
    "Paris is the capital of France; Berlin is the capital of Germany.",
    "Laptops are slow; my notebook is slower.",
)
QUERY = "dogs running dogs the zebra"
GERMAN = (
    "Der Hund lief über die Wiese, und der Mann sah ihn.",
    "Die Katze schläft, weil sie müde ist.",
    "Ein Vertrag.",
)


def small(text: str) -> list[str]:
    return text.lower().split()


def test_langchains_retriever_is_explained_with_its_own_analyser() -> None:
    documents = [Document(page_content=text, metadata={"n": number}) for number, text in enumerate(DOCUMENTS)]
    retriever = ChainBM25.from_documents(documents, preprocess_func=small, k=4)
    explainer, scores = Explainer(retriever), retriever.vectorizer.get_scores(small(QUERY))
    for document in retriever.invoke(QUERY):
        explanation = explainer.explain(QUERY, document.page_content)
        assert explanation.score == scores[document.metadata["n"]]
        assert abs(explanation.gap or 0.0) < 1e-9


def test_an_index_put_in_the_place_of_another_is_noticed() -> None:
    retriever = ChainBM25.from_texts(list(DOCUMENTS), preprocess_func=small)
    explainer = Explainer(retriever)
    retriever.vectorizer = BM25Plus([small(text) for text in DOCUMENTS])
    with pytest.raises(ModelChanged, match="BM25Retriever holds another index"):
        explainer.explain(QUERY, DOCUMENTS[0])
    assert Explainer(retriever).explain(QUERY, DOCUMENTS[3]).score > 0


def nodes(texts: tuple[str, ...] = DOCUMENTS) -> list[TextNode]:
    return [TextNode(text=text, metadata={"title": f"animal {at % 2}", "at": at}) for at, text in enumerate(texts)]


def passage(node: Any) -> Passage:
    """What the retriever indexed, and where the node's own text stands in it."""
    whole, text = node.get_content(MetadataMode.EMBED), node.get_content()
    return Passage(whole, whole.index(text), whole.index(text) + len(text))


@pytest.mark.parametrize("settings", [{}, {"skip_stemming": True}, {"token_pattern": r"(?u)\b\w+\b"}], ids=str)
def test_llama_indexs_retriever_is_explained_as_it_splits_texts(settings: dict[str, Any]) -> None:
    retriever = LlamaBM25.from_defaults(nodes=nodes(), similarity_top_k=4, **settings)
    explainer = Explainer(retriever)
    for hit in retriever.retrieve(f"animal 1 {QUERY}"):
        explanation = explainer.explain(f"animal 1 {QUERY}", passage(hit.node))
        assert explanation.score == hit.score
        assert abs(explanation.gap or 0.0) < 1e-6
        assert {one.part for one in explanation.document_tokens} == {"metadata", "text"}


def test_the_language_whose_stop_words_were_left_out_is_found_by_the_documents() -> None:
    stemmer = Stemmer.Stemmer("german")
    made = [TextNode(text=text) for text in GERMAN]
    retriever = LlamaBM25.from_defaults(nodes=made, language="de", stemmer=stemmer, similarity_top_k=3)
    explainer = Explainer(retriever)
    query = "Der Hund und die müde Katze"
    for hit in retriever.retrieve(query):
        explanation = explainer.explain(query, hit.node.get_content())
        assert explanation.score == hit.score
        dropped = {one.text.lower() for one in explanation.document_tokens if not one.piece}
        assert dropped <= set(bm25s.stopwords.STOPWORDS_GERMAN)
    assert explainer.explain(query, GERMAN[1]).terms[-1].document == ("Katze",)


def test_a_retriever_that_was_kept_is_the_same(tmp_path: Path) -> None:
    retriever = LlamaBM25.from_defaults(nodes=nodes(), similarity_top_k=2)
    retriever.persist(str(tmp_path))
    loaded = LlamaBM25.from_persist_dir(str(tmp_path), mmap=True)
    assert isinstance(loaded.bm25.scores["data"], np.memmap)
    one, other = Explainer(retriever), Explainer(loaded)
    assert one.scorer.fingerprint == other.scorer.fingerprint
    for hit in loaded.retrieve(QUERY):
        explanation = other.explain(QUERY, passage(hit.node))
        assert explanation.score == hit.score
        np.testing.assert_array_equal(explanation.matrix, one.explain(QUERY, passage(hit.node)).matrix)


def test_what_a_retriever_multiplies_scores_by_is_in_the_explanation() -> None:
    only = MetadataFilters(filters=[MetadataFilter(key="at", value=1, operator=FilterOperator.EQ)])
    retriever = LlamaBM25.from_defaults(nodes=nodes(), similarity_top_k=4, filters=only)
    explainer = Explainer(retriever)
    for hit in retriever.retrieve(QUERY):
        explanation = explainer.explain(QUERY, passage(hit.node))
        assert explanation.score == hit.score
        assert abs(explanation.gap or 0.0) < 1e-6
        is_told = any("filter leaves this document out" in notice.text for notice in explanation.notices)
        assert is_told == (hit.node.metadata["at"] != 1)
    before = explainer.explain(QUERY, passage(nodes()[1]))
    retriever.corpus_weight_mask = [2, 2, 2, 2]
    after = explainer.explain(QUERY, passage(nodes()[1]))
    assert after.score == pytest.approx(2 * before.score)
    assert abs(after.gap or 0.0) < 1e-6
    assert after.fingerprint != before.fingerprint


def test_a_retriever_takes_no_other_analyser() -> None:
    for retriever in (
        ChainBM25.from_texts(list(DOCUMENTS)),
        LlamaBM25.from_defaults(nodes=nodes(), similarity_top_k=2),
    ):
        with pytest.raises(InvalidInput, match="BM25Retriever has its own analyser"):
            Explainer(retriever, analyser=str.split)
