"""Whatever ranks documents after the wrapped retriever is named in the log, with its own score or none."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from typing import Any
from uuid import uuid4

import pytest
from langchain_classic.retrievers import (
    ContextualCompressionRetriever,
    EnsembleRetriever,
    MergerRetriever,
    MultiQueryRetriever,
)
from langchain_classic.retrievers.document_compressors import (
    CrossEncoderReranker,
    DocumentCompressorPipeline,
    EmbeddingsFilter,
    LLMChainFilter,
)
from langchain_classic.retrievers.document_compressors.cross_encoder import BaseCrossEncoder
from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.language_models import FakeListLLM
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_rag_explain import ExplainedDocument, ExplainingRetriever, ExplanationLogHandler
from sentence_transformers import CrossEncoder

from integrations.langchain.tests.conftest import LocalEmbeddings
from rag_explain.log import ExplanationLog, Record
from rag_explain.types import Hit
from tests.support.models import CORPUS, cross_encoder_folder, tiny

QUERY = "why did the dog look at the moon?"


class LocalCrossEncoder(BaseCrossEncoder):
    """What HuggingFaceCrossEncoder is at heart."""

    def score(self, text_pairs: list[tuple[str, str]]) -> list[float]:
        return cross_encoder().predict(text_pairs).tolist()


class WritesScores(BaseDocumentCompressor):
    """Copies documents and writes its score into their metadata, as CohereRerank does; or writes in place."""

    is_in_place: bool = False

    def compress_documents(self, documents: Sequence[Document], query: str, callbacks: Any = None) -> list[Document]:
        scores = LocalCrossEncoder().score([(query, document.page_content) for document in documents])
        found = []
        for document, score in sorted(zip(documents, scores, strict=True), key=lambda both: -both[1]):
            kept = document if self.is_in_place else Document(document.page_content, metadata={**document.metadata})
            kept.metadata["relevance_score"] = score
            found.append(kept)
        return found


class Words(BaseRetriever):
    """A leg without our wrapper: the documents with the most words of the query."""

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return [
            Document(text) for text in sorted(CORPUS, key=lambda text: -len(set(text.split()) & set(query.split())))
        ]


@cache
def cross_encoder() -> CrossEncoder:
    return CrossEncoder(str(cross_encoder_folder()), device="cpu")


@pytest.fixture
def wrapped(store) -> ExplainingRetriever:
    return ExplainingRetriever(vectorstore=store, k=4)


def compressed(retriever: BaseRetriever, *compressors: Any) -> ContextualCompressionRetriever:
    compressor = compressors[0] if len(compressors) == 1 else DocumentCompressorPipeline(transformers=list(compressors))
    return ContextualCompressionRetriever(base_compressor=compressor, base_retriever=retriever)


def run(runnable: Any, log: ExplanationLog, *, is_async: bool = False) -> tuple[Any, Record]:
    config = {"callbacks": [ExplanationLogHandler(log)]}
    found = asyncio.run(runnable.ainvoke(QUERY, config)) if is_async else runnable.invoke(QUERY, config)
    (record,) = log.records()
    return found, record


def names(hit: Hit) -> list[tuple[str, str]]:
    return [(stage.name, stage.kind) for stage in hit.stages]


def check_record(record: Record, documents: Sequence[Document], store: InMemoryVectorStore, stage: str) -> None:
    """The order is the documents', each hit begins where the search left it, and no cosine is the final score."""
    searched = store.similarity_search_with_score(QUERY, k=4)
    before = {document.page_content: (rank, score) for rank, (document, score) in enumerate(searched, 1)}
    assert [hit.text for hit in record.hits] == [document.page_content for document in documents]
    assert [hit.rank for hit in record.hits] == list(range(1, len(documents) + 1))
    for hit in record.hits:
        first, *_, last = hit.stages
        assert (first.name, first.kind, first.metric) == ("InMemoryVectorStore", "search", "cosine")
        assert (first.rank, first.score) == (before[hit.text][0], pytest.approx(before[hit.text][1]))
        assert (last.name, last.rank, last.rank_before) == (stage, hit.rank, hit.stages[-2].rank)
        assert hit.gap == pytest.approx(0.0, abs=1e-5)
        if last.kind == "rerank":
            assert hit.metric == "unknown"
            assert f"ranked by {stage}" in hit.explanation.surrogate


@pytest.mark.parametrize("is_async", [False, True])
def test_a_reranker_over_a_wrapped_retriever_is_named_and_its_order_is_logged(wrapped, store, log, is_async):
    outer = compressed(wrapped, CrossEncoderReranker(model=LocalCrossEncoder(), top_n=3))
    documents, record = run(outer, log, is_async=is_async)
    assert [one.id for one in documents] != [one.id for one in wrapped.invoke(QUERY)][:3]
    check_record(record, documents, store, "ContextualCompressionRetriever with CrossEncoderReranker")
    assert {hit.score for hit in record.hits} == {None}  # the reranker does not tell its scores


@pytest.mark.parametrize("is_in_place", [False, True])
def test_a_score_that_the_reranker_tells_is_the_hits_score(wrapped, store, log, is_in_place):
    documents, record = run(compressed(wrapped, WritesScores(is_in_place=is_in_place)), log)
    check_record(record, documents, store, "ContextualCompressionRetriever with WritesScores")
    told = [document.metadata["relevance_score"] for document in documents]
    assert [hit.score for hit in record.hits] == [hit.stages[-1].score for hit in record.hits] == pytest.approx(told)
    if is_in_place:
        for document, score in zip(documents, told, strict=True):
            assert (document.hit.score, document.hit.metric) == (score, "unknown")
            assert names(document.hit)[-1] == ("a later stage", "rerank")
            assert "ranked by a later stage" in document.explanation.surrogate
            assert document.hit.gap == pytest.approx(0.0, abs=1e-5)


def test_what_only_leaves_documents_out_is_named_and_is_no_other_ranking(wrapped, store, log):
    answers = FakeListLLM(responses=["NO", "YES", "YES", "YES"])
    documents, record = run(compressed(wrapped, LLMChainFilter.from_llm(answers)), log)
    assert len(documents) == 3
    stage = "ContextualCompressionRetriever with LLMChainFilter"
    check_record(record, documents, store, stage)
    assert all(names(hit)[1:] == [(stage, "filter")] for hit in record.hits)
    assert all(hit.metric == "cosine" and hit.explanation.surrogate is None for hit in record.hits)
    assert [hit.score for hit in record.hits] == [hit.stages[0].score for hit in record.hits]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of langchain-community, which the filter is built from
def test_copies_without_ids_are_known_by_their_text(wrapped, store, log):
    pytest.importorskip("langchain_community.document_transformers")
    documents, record = run(compressed(wrapped, EmbeddingsFilter(embeddings=LocalEmbeddings(tiny("bert")), k=3)), log)
    assert not any(isinstance(document, ExplainedDocument) for document in documents)
    assert [hit.text for hit in record.hits] == [document.page_content for document in documents]
    assert record.explained == 3
    for hit in record.hits:  # nothing moved, but the filter was there
        name = "ContextualCompressionRetriever with EmbeddingsFilter"
        assert names(hit) == [("InMemoryVectorStore", "search"), (name, "filter")]
        assert (hit.rank, hit.metric, hit.explanation.surrogate) == (hit.stages[0].rank, "cosine", None)


def test_stages_inside_one_another_are_all_named(wrapped, store, log):
    inner = compressed(wrapped, CrossEncoderReranker(model=LocalCrossEncoder(), top_n=4))
    answers = FakeListLLM(responses=["NO", "YES", "YES", "YES"])
    named = compressed(inner, LLMChainFilter.from_llm(answers)).with_config(run_name="the filter")
    documents, record = run(named, log)
    check_record(record, documents, store, "the filter")
    for hit in record.hits:
        reranker = "ContextualCompressionRetriever with CrossEncoderReranker"
        assert names(hit)[1:] == [(reranker, "rerank"), ("the filter", "filter")]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("is_first", [False, True])
def test_an_ensemble_with_a_wrapped_leg_is_named(wrapped, store, log, is_first, is_async):
    legs = [wrapped, Words()] if is_first else [Words(), wrapped]
    documents, record = run(
        EnsembleRetriever(retrievers=legs, weights=[0.2, 0.8] if is_first else [0.8, 0.2]), log, is_async=is_async
    )
    assert [hit.text for hit in record.hits] == [document.page_content for document in documents]
    assert [hit.rank for hit in record.hits] == [1, 2, 3, 4, 5]
    known = [hit for hit in record.hits if hit.stages]
    assert len(known) == record.explained == 4  # the fifth was found by the other leg alone
    for hit in known:
        assert names(hit) == [("InMemoryVectorStore", "search"), ("EnsembleRetriever", "rerank")]
        assert (hit.score, hit.metric) == (None, "unknown")
        assert "ranked by EnsembleRetriever" in hit.explanation.surrogate


def test_several_queries_of_one_retriever_do_not_mix_their_ranks(store, log):
    class Lines(RunnableLambda):
        pass

    several = MultiQueryRetriever(
        retriever=ExplainingRetriever(retriever=store.as_retriever(search_kwargs={"k": 3})),
        llm_chain=Lines(lambda given: ["the old bridge in paris", "bees and the sun"]),
        include_original=True,
    )
    documents, record = run(several, log)
    assert [hit.text for hit in record.hits] == [document.page_content for document in documents]
    first = [document.page_content for document in store.similarity_search("the old bridge in paris", k=3)]
    for hit in record.hits[:3]:  # nothing moved before them
        assert names(hit)[0] == ("VectorStoreRetriever", "search")
        assert hit.stages[0].rank == first.index(hit.text) + 1
        assert record.asked(hit.rank - 1) == "the old bridge in paris"
    for hit in record.hits:
        assert [name for name, _ in names(hit)].count("VectorStoreRetriever") == 1
        assert names(hit)[1:] == [("MultiQueryRetriever", "rerank")]


def test_merged_legs_are_named(store, log):
    other = InMemoryVectorStore(LocalEmbeddings(tiny("bert")))
    other.add_texts([text.upper() for text in CORPUS])
    legs = [ExplainingRetriever(vectorstore=one, k=2) for one in (store, other)]
    documents, record = run(MergerRetriever(retrievers=legs), log)
    assert [hit.text for hit in record.hits] == [document.page_content for document in documents]
    assert [hit.stages[0].rank for hit in record.hits] == [1, 1, 2, 2]
    assert all(names(hit)[1:] == [("MergerRetriever", "rerank")] for hit in record.hits)
    assert {hit.score for hit in record.hits} == {None}


def test_a_wrapper_around_a_reranker_names_it_and_takes_the_score_it_tells(store, log):
    plain = store.as_retriever(search_kwargs={"k": 4})
    outer = ExplainingRetriever(
        retriever=compressed(plain, CrossEncoderReranker(model=LocalCrossEncoder())), explainer=tiny("bert")
    )
    documents, record = run(outer, log)
    name = "ContextualCompressionRetriever with CrossEncoderReranker"
    for document, hit in zip(documents, record.hits, strict=True):
        assert (hit.score, hit.metric) == (document.hit.score, document.hit.metric) == (None, "unknown")
        assert names(hit) == names(document.hit) == [("VectorStoreRetriever", "search"), (name, "rerank")]
        assert f"chosen by {name}" in document.explanation.surrogate
    told = ExplainingRetriever(retriever=compressed(plain, WritesScores()), explainer=tiny("bert"), metric="cosine")
    for document in told.invoke(QUERY):
        assert document.hit.score == document.metadata["relevance_score"]
        assert document.explanation is not None
        assert (document.hit.metric, document.hit.gap) == ("unknown", None)
        assert "chosen by ContextualCompressionRetriever with WritesScores" in document.explanation.surrogate
        assert "implies" not in document.explanation.surrogate


def test_a_step_of_the_chain_that_reranks_is_named(wrapped, store, log):
    def by_cross_encoder(documents: list[Document]) -> list[Document]:
        return CrossEncoderReranker(model=LocalCrossEncoder(), top_n=3).compress_documents(documents, QUERY)

    chain = {"context": wrapped | by_cross_encoder, "question": RunnablePassthrough()} | RunnablePassthrough()
    found, record = run(chain, log)
    check_record(record, found["context"], store, "by_cross_encoder")
    assert {hit.score for hit in record.hits} == {None}


def test_a_step_that_merges_two_retrievers_is_told_once(store, log):
    legs = {name: ExplainingRetriever(vectorstore=store, k=2).with_config(run_name=name) for name in ("one", "two")}

    def merge(found: dict[str, list[Document]]) -> list[Document]:
        return [found["two"][0], found["one"][1]]

    _, record = run(legs | RunnableLambda(merge) | (lambda found: "said"), log)
    assert [hit.stages[0].rank for hit in record.hits] == [1, 2]
    assert record.answer == "said"


def test_documents_that_this_chain_did_not_find_are_no_stage_of_it(wrapped, log):
    earlier = wrapped.invoke("the sun")
    found, record = run(wrapped | (lambda documents: [*earlier, *reversed(documents)]), log)
    assert len(found) == 8
    assert [hit.rank for hit in record.hits] == [1, 2, 3, 4]
    assert all(names(hit) == [("InMemoryVectorStore", "search")] for hit in record.hits)


@pytest.mark.parametrize("metric", [None, "cosine"])
@pytest.mark.parametrize(
    ("search_type", "options"),
    [("mmr", {"k": 4}), ("similarity_score_threshold", {"k": 4, "score_threshold": -1.0})],
)
def test_scores_of_other_searches_are_no_similarities(store, search_type, options, metric):
    if search_type == "similarity_score_threshold":  # the store in memory has no relevance scores
        kind = pytest.importorskip("langchain_chroma").Chroma
        space = {"hnsw:space": "cosine"}
        store = kind(uuid4().hex, LocalEmbeddings(tiny("bert")), collection_metadata=space)
        store.add_texts(CORPUS)
    base = store.as_retriever(search_type=search_type, search_kwargs=options)
    found = ExplainingRetriever(retriever=base, metric=metric).invoke(QUERY)
    assert found == base.invoke(QUERY)
    for document in found:
        assert document.explanation is not None
        assert (document.hit.score, document.hit.gap) == (None, None)
        assert ("MMR" in (document.explanation.surrogate or "")) == (search_type == "mmr")


def test_the_documents_are_those_of_the_bare_retrievers(wrapped, store, log):
    plain = store.as_retriever(search_kwargs={"k": 4})
    for compressor in (CrossEncoderReranker(model=LocalCrossEncoder()), WritesScores()):
        assert compressed(wrapped, compressor).invoke(QUERY) == compressed(plain, compressor).invoke(QUERY)
        assert store.similarity_search(QUERY)[0].metadata == {}
