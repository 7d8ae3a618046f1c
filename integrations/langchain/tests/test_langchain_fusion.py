"""What each leg adds to a document's rank, heard while LangChain's retrievers run: exact, and nothing is changed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from langchain_classic.retrievers import (
    ContextualCompressionRetriever,
    EnsembleRetriever,
    MergerRetriever,
    MultiQueryRetriever,
)
from langchain_classic.retrievers.document_compressors import CrossEncoderReranker, DocumentCompressorPipeline
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langchain_rag_explain import ExplainedDocument, ExplainingRetriever

from integrations.langchain.tests.conftest import LocalEmbeddings
from integrations.langchain.tests.test_langchain_stages import LocalCrossEncoder, WritesScores, cross_encoder
from rag_explain.results.stages import Stage, fused, legs_of
from tests.support.models import CORPUS, tiny

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of langchain-community

QUERY = "why did the dog look at the moon?"


class Counts(BaseRetriever):
    """Counts how often it is asked."""

    inner: Any
    asked: int = 0

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        self.asked += 1
        return self.inner.invoke(query, config={"callbacks": run_manager.get_child()})  # type: ignore[no-any-return]


class Shuffles(EnsembleRetriever):
    """An ensemble with an order of its own."""

    def weighted_reciprocal_rank(self, doc_lists: list[list[Document]]) -> list[Document]:
        return super().weighted_reciprocal_rank(doc_lists)[::-1]


class Hears(BaseCallbackHandler):
    """The caller's own handler: which custom events came."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def on_custom_event(self, name: str, data: Any, **more: Any) -> None:
        self.names.append(name)


class Holding(LocalCrossEncoder):
    """Holds its model, as HuggingFaceCrossEncoder does."""

    def __init__(self) -> None:
        self.client = cross_encoder()


class Plain(VectorStore):
    """A store of one's own, of which nobody knows whether it keeps vectors."""

    def __init__(self, kept: InMemoryVectorStore) -> None:
        self._ask = kept.max_marginal_relevance_search
        self._embeddings = kept.embeddings

    @property
    def embeddings(self) -> Any:
        return self._embeddings

    def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        raise NotImplementedError

    def max_marginal_relevance_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:  # type: ignore[override]
        return self._ask(query, k=k)

    @classmethod
    def from_texts(cls, *arguments: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def bm25(documents: list[Document]) -> Any:
    from langchain_community.retrievers import BM25Retriever

    found = BM25Retriever.from_documents(documents)
    found.k = 4
    return found


@pytest.fixture
def words() -> Any:
    return bm25([Document(text, id=f"doc-{number}") for number, text in enumerate(CORPUS)])


@pytest.fixture
def vectors(store: InMemoryVectorStore) -> BaseRetriever:
    return store.as_retriever(search_kwargs={"k": 4})


def ensemble(*legs: Any, **options: Any) -> EnsembleRetriever:
    return EnsembleRetriever(retrievers=list(legs), **options)


def ways(base: BaseRetriever) -> Iterator[list[Document]]:
    yield base.invoke(QUERY)
    yield asyncio.run(base.ainvoke(QUERY))


def stages(document: Document) -> tuple[Stage, ...]:
    assert isinstance(document, ExplainedDocument)
    return document.hit.stages


def names(document: Document) -> list[str]:
    return [stage.name for stage in stages(document)]


@pytest.mark.parametrize("weights", [None, [0.3, 0.7], [1.0, 0.0]])
@pytest.mark.parametrize("constant", [1, 60])
def test_what_the_legs_add_is_the_order_of_an_ensemble(weights, constant, words, vectors):
    base = ensemble(words, vectors, c=constant, **({} if weights is None else {"weights": weights}))
    bare = base.invoke(QUERY)
    lists = [[one.page_content for one in leg.invoke(QUERY)] for leg in (words, vectors)]
    for found in ways(ExplainingRetriever(retriever=base)):
        assert found == bare
        totals = []
        for rank, document in enumerate(found, 1):
            first, second, last = stages(document)
            assert (last.name, last.kind, last.rank, last.score, last.legs) == (
                "EnsembleRetriever",
                "fusion",
                rank,
                None,
                2,
            )
            assert "returns no scores" in last.note
            for leg, own, weight in zip((first, second), lists, weights or [0.5, 0.5], strict=True):
                place = own.index(document.page_content) + 1 if document.page_content in own else None
                assert (leg.rank, leg.weight, leg.is_missed) == (place, weight, place is None)
                assert leg.contribution == (0.0 if place is None else weight / (place + constant))
            totals.append(fused(stages(document), 2))
            assert totals[-1] == first.contribution + second.contribution
        assert totals == sorted(totals, reverse=True)


def test_documents_of_an_ensemble_that_are_one_by_a_key_are_one(vectors, store):
    other = bm25([Document(text.upper(), metadata={"key": text}) for text in CORPUS])
    keyed = InMemoryVectorStore(LocalEmbeddings(tiny("bert")))
    keyed.add_documents([Document(text, metadata={"key": text}) for text in CORPUS])
    base = ensemble(other, keyed.as_retriever(), id_key="key")
    found = ExplainingRetriever(retriever=base).invoke(QUERY)
    assert found == base.invoke(QUERY)
    assert any(all(not leg.is_missed for leg in stages(one)[:2]) for one in found)
    assert all(fused(stages(one), 2) is not None for one in found)


def test_every_leg_is_explained_by_what_scored_in_it(words, vectors):
    for document in ExplainingRetriever(retriever=ensemble(words, vectors)).invoke(QUERY):
        word, vector, _ = stages(document)
        if not word.is_missed:
            scores = words.vectorizer.get_scores(words.preprocess_func(QUERY))
            assert word.explanation.score == pytest.approx(scores[CORPUS.index(document.page_content)], abs=1e-9)
        assert vector.is_missed or vector.handle is document.hit.handle
        json.dumps(document.hit.to_dict())


def test_generated_queries_stand_beside_their_legs(vectors):
    base = MultiQueryRetriever(retriever=vectors, llm_chain=RunnableLambda(lambda given: ["bees", "the moon"]))
    for found in ways(ExplainingRetriever(retriever=base)):
        assert found == base.invoke(QUERY)
        for document in found:
            assert names(document) == ["VectorStoreRetriever", "VectorStoreRetriever", "MultiQueryRetriever"]
            assert [one.query for one in stages(document)] == ["bees", "the moon", None]
            assert stages(document)[-1].kind == "merge"
            for leg in stages(document)[:2]:
                assert leg.is_missed or leg.explanation.query == leg.query


def test_a_merger_is_a_list_without_a_score(words, vectors):
    base = MergerRetriever(retrievers=[words, vectors])
    for document in ExplainingRetriever(retriever=base).invoke(QUERY):
        assert [one.kind for one in stages(document)] == ["search", "search", "merge"]
        assert {one.contribution for one in stages(document)} == {None}


def test_a_reranker_over_an_ensemble_has_ranks_before_and_after_and_is_explained(words, vectors):
    reranker = CrossEncoderReranker(model=Holding(), top_n=3)
    inner = ensemble(words, vectors)
    base = ContextualCompressionRetriever(base_compressor=reranker, base_retriever=inner)
    fused_order = [one.page_content for one in inner.invoke(QUERY)]
    for found in ways(ExplainingRetriever(retriever=base)):
        assert found == base.invoke(QUERY)
        for rank, document in enumerate(found, 1):
            last = stages(document)[-1]
            assert names(document)[-1] == "ContextualCompressionRetriever with CrossEncoderReranker"
            assert (last.kind, last.rank, last.score) == ("rerank", rank, None)
            assert last.rank_before == fused_order.index(document.page_content) + 1 == stages(document)[-2].rank
            (own,) = LocalCrossEncoder().score([(QUERY, document.page_content)])
            assert last.explanation.returned == pytest.approx(own, abs=1e-5)


@pytest.mark.parametrize("is_in_place", [False, True])
def test_a_reranker_that_writes_its_score_down_has_it(is_in_place, words):
    fresh = InMemoryVectorStore(LocalEmbeddings(tiny("bert")))
    fresh.add_texts(CORPUS)
    compressor = DocumentCompressorPipeline(transformers=[WritesScores(is_in_place=is_in_place)])
    inner = ensemble(words, fresh.as_retriever())
    base = ContextualCompressionRetriever(base_compressor=compressor, base_retriever=inner)
    for document in ExplainingRetriever(retriever=base).invoke(QUERY):
        last = stages(document)[-1]
        assert last.score == document.metadata["relevance_score"] == document.hit.score
        assert fused(stages(document), 2) is not None


def test_a_wrapped_leg_and_a_leg_that_is_a_chain_tell_their_own(words, store):
    chain = words | RunnableLambda(lambda documents: documents[::-1])
    base = ensemble(chain, ExplainingRetriever(vectorstore=store, k=4))
    for document in ExplainingRetriever(retriever=base).invoke(QUERY):
        assert names(document)[-2:] == ["InMemoryVectorStore", "EnsembleRetriever"]
        assert legs_of(stages(document), len(stages(document)) - 1) == [
            len(stages(document)) - 3,
            len(stages(document)) - 2,
        ]
        if names(document)[0] == "BM25Retriever":
            assert names(document)[1] == "RunnableSequence"
            assert stages(document)[0].rank == 5 - stages(document)[1].rank
        vector = stages(document)[-2]
        assert vector.is_missed or (vector.metric, document.hit.handle is vector.handle) == ("cosine", True)


def test_an_order_of_its_own_is_said_and_not_explained_away(words, vectors):
    base = Shuffles(retrievers=[words, vectors], weights=[0.9, 0.1])
    for document in ExplainingRetriever(retriever=base).invoke(QUERY):
        assert stages(document)[-1].kind == "merge"
        assert "does not sum" in stages(document)[-1].note
        assert {one.contribution for one in stages(document)} == {None}


def test_nothing_is_asked_twice_and_a_callers_handler_hears_what_it_heard_before(words, store):
    leg = Counts(inner=words)
    wrapped = ExplainingRetriever(retriever=ensemble(leg, ExplainingRetriever(vectorstore=store)))
    hears = Hears()
    found = wrapped.invoke(QUERY, config={"callbacks": [hears]})
    assert any(stage.explanation for document in found for stage in stages(document))
    assert leg.asked == 1
    assert hears.names == ["rag_explain.explanation"] * 2


def test_searches_in_threads_do_not_hear_one_another(words, vectors):
    wrapped = [ExplainingRetriever(retriever=ensemble(words, vectors, c=number)) for number in range(1, 9)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda one: one.invoke(QUERY), wrapped))
    for constant, documents in enumerate(found, 1):
        for document in documents:
            known = [leg for leg in stages(document)[:2] if not leg.is_missed]
            assert [leg.contribution for leg in known] == [0.5 / (leg.rank + constant) for leg in known]


@pytest.mark.parametrize("balance", [0.2, 0.5, 1.0])
def test_terms_of_mmr_name_the_document_that_is_repeated(balance, store):
    base = store.as_retriever(search_type="mmr", search_kwargs={"k": 4, "lambda_mult": balance})
    found = ExplainingRetriever(retriever=base).invoke(QUERY)
    assert found == base.invoke(QUERY)
    chosen: list[str] = []
    for document in found:
        (stage,) = stages(document)
        relevance, *redundancy = stage.terms
        assert relevance.contribution == pytest.approx(balance * document.explanation.score, abs=1e-5)
        assert [one.document in chosen for one in redundancy] == [True] * bool(chosen)
        for one in redundancy:
            assert one.contribution == pytest.approx(-(1 - balance) * one.score)
        chosen.append(document.id)


def test_a_store_that_gives_no_vectors_says_so(store):
    for document in ExplainingRetriever(retriever=Plain(store).as_retriever(search_type="mmr")).invoke(QUERY):
        (stage,) = stages(document)
        assert (stage.kind, stage.terms) == ("mmr", ())
        assert "gives no vectors" in stage.split.reason
        assert document.hit.to_dict()["stages"][0]["note"].startswith("the store gives no vectors of its documents")


def test_why_not_tells_which_leg_found_a_document_and_what_a_reranker_left_out(words, vectors):
    inner = ensemble(words, vectors)
    reranker = CrossEncoderReranker(model=Holding(), top_n=1)
    base = ContextualCompressionRetriever(base_compressor=reranker, base_retriever=inner)
    wrapped = ExplainingRetriever(retriever=base)
    (returned,) = base.invoke(QUERY)
    fused_order = inner.invoke(QUERY)
    near = [one.id for one in vectors.invoke(QUERY)]
    by_words = [one.id for one in words.invoke(QUERY)]
    assert len(fused_order) > 1
    for rank, document in enumerate(fused_order, 1):
        if document.page_content == returned.page_content:
            continue
        found = wrapped.why_not(QUERY, document.id)
        told = [
            f"{name} has it at rank {order.index(document.id) + 1}"
            if document.id in order
            else f"{name} did not find it"
            for name, order in (("BM25Retriever", by_words), ("VectorStoreRetriever", near))
        ]
        told.append(f"EnsembleRetriever has it at rank {rank}")
        assert found.reason.name == "stage"
        outer = "ContextualCompressionRetriever with CrossEncoderReranker"
        assert found.reason.text == f"{', '.join(told)}: {outer}, which returned 1, left it out"


def test_why_not_tells_a_document_that_no_leg_brought(store):
    few = [bm25([Document(CORPUS[0], id="doc-0")]), store.as_retriever(search_kwargs={"k": 1})]
    wrapped = ExplainingRetriever(retriever=ensemble(*few))
    order = [one.id for one in store.similarity_search(QUERY, k=len(CORPUS))]
    far = order[-1] if order[-1] != "doc-0" else order[-2]
    found = wrapped.why_not(QUERY, far)
    place = f"by similarity it stands at rank {order.index(far) + 1} of {len(CORPUS)}"
    assert found.reason.name == "cut"
    gave = "BM25Retriever gave 1, VectorStoreRetriever gave 1"
    assert found.reason.text == f"no search inside found it: {gave}; {place}"
    assert found.contrast is not None


def test_why_not_of_what_was_returned_after_another_one_shows_the_stages_of_both(words, vectors):
    wrapped = ExplainingRetriever(retriever=ensemble(words, vectors))
    first, second = wrapped.invoke(QUERY)[:2]
    found = wrapped.why_not(QUERY, second.hit.id)
    assert found.reason.name == "stage"
    assert found.reason.text.startswith(f"it was returned, at rank 2, after {first.hit.id} at rank 1: BM25Retriever")
    assert [one.name for one in found.contrast.stages][-1] == "EnsembleRetriever"
