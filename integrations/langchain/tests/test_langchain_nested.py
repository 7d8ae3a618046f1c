"""Retrievers around retrievers: the encoder inside is found, what wrapped ones inside explained is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from langchain_classic.embeddings import CacheBackedEmbeddings
from langchain_classic.retrievers import (
    ContextualCompressionRetriever,
    EnsembleRetriever,
    MergerRetriever,
    MultiQueryRetriever,
)
from langchain_classic.retrievers.document_compressors import (
    DocumentCompressorPipeline,
    EmbeddingsFilter,
    LLMChainExtractor,
    LLMChainFilter,
)
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings, FakeEmbeddings
from langchain_core.language_models import FakeListLLM
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda
from langchain_core.stores import InMemoryByteStore
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_rag_explain import ExplainedDocument, ExplainingRetriever, ExplanationLogHandler, get_explanation
from sentence_transformers import SentenceTransformer

from integrations.langchain.tests.conftest import LocalEmbeddings
from rag_explain import Explainer
from rag_explain.errors import InvalidInput
from rag_explain.log import ExplanationLog
from tests.support.models import CORPUS, tiny

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of langchain-community

QUERY = "why did the dog look at the moon?"


class Prompting(LocalEmbeddings):
    """Puts instructions in front of texts, as embeddings for some models do."""

    def embed_query(self, text: str) -> list[float]:
        return self.client.encode("where: " + text).tolist()  # type: ignore[no-any-return]


class Words(BaseRetriever):
    """A keyword search: the documents with the most words of the query, as plain documents without ids."""

    texts: list[str] = CORPUS

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return [
            Document(text) for text in sorted(self.texts, key=lambda one: -len(set(one.split()) & set(query.split())))
        ]


class Searcher:
    """A class of one's own, of no framework."""

    def __init__(self, store: InMemoryVectorStore) -> None:
        self.kept = store


class Own(BaseRetriever):
    """A retriever of one's own, which keeps what it searches wherever it likes."""

    engine: Any

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return self.engine.kept.similarity_search(query)  # type: ignore[no-any-return]


class Arrays(BaseRetriever):
    """Searches arrays with a model, without a store."""

    model: Any

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return [Document(text) for text in CORPUS]


@cache
def model() -> SentenceTransformer:
    return tiny("bert")


def filled(embeddings: Embeddings | None = None) -> InMemoryVectorStore:
    made = InMemoryVectorStore(embeddings or LocalEmbeddings(model()))
    made.add_texts(CORPUS, ids=[f"doc-{number}" for number in range(len(CORPUS))])
    return made


def queries(retriever: BaseRetriever) -> MultiQueryRetriever:
    return MultiQueryRetriever(retriever=retriever, llm_chain=RunnableLambda(lambda given: ["bees", "the moon"]))


def compressed(retriever: BaseRetriever, compressor: Any = None) -> ContextualCompressionRetriever:
    compressor = compressor or LLMChainFilter.from_llm(FakeListLLM(responses=["YES"]))
    return ContextualCompressionRetriever(base_compressor=compressor, base_retriever=retriever)


def ensemble(*retrievers: Any, **options: Any) -> EnsembleRetriever:
    return EnsembleRetriever(retrievers=list(retrievers), **options)


AROUND: dict[str, Callable[[BaseRetriever], BaseRetriever]] = {
    "ensemble": lambda one: ensemble(Words(), one),
    "with_config": lambda one: ensemble(Words(), one.with_config(tags=["mine"])),
    "chain": lambda one: ensemble(one | RunnableLambda(lambda documents: documents[::-1]), Words()),
    "merger": lambda one: MergerRetriever(retrievers=[Words(), one]),
    "queries": queries,
    "compressed": compressed,
    "deep": lambda one: compressed(ensemble(Words(), queries(compressed(one)))),
    "many": lambda one: ensemble(*[Words()] * 40, one),
}


@pytest.mark.parametrize("name", AROUND)
def test_the_encoder_inside_is_found_with_the_way_in_which_it_is_used(name: str) -> None:
    base = AROUND[name](filled(Prompting(model())).as_retriever())
    wrapped = ExplainingRetriever(retriever=base, unit="token")
    for documents in (wrapped.invoke(QUERY), asyncio.run(wrapped.ainvoke(QUERY))):
        assert documents == base.invoke(QUERY)
        for document in documents:
            why = get_explanation(document)
            assert why is not None
            assert "prompt" in {token.part for token in why.query_tokens}
            assert f"chosen by {type(base).__name__}" in (why.surrogate or "")
            assert [notice.code for notice in why.notices if notice.code == "mismatch"] == []


def test_the_encoder_of_a_retriever_of_ones_own_is_found() -> None:
    for base in (Own(engine=Searcher(filled())), Arrays(model=model())):
        (document, *_) = ExplainingRetriever(retriever=ensemble(base)).invoke(QUERY)
        assert get_explanation(document) is not None


def test_the_store_decides_and_not_what_filters() -> None:
    other = EmbeddingsFilter(embeddings=LocalEmbeddings(tiny("roberta")), k=3)
    for base, encoder in ((filled().as_retriever(), model()), (Words(), tiny("roberta"))):
        for document in ExplainingRetriever(retriever=compressed(base, other)).invoke(QUERY):
            why = get_explanation(document)
            assert why is not None
            own = encoder.similarity(*encoder.encode([QUERY, document.page_content])[:, None])
            assert why.score == pytest.approx(float(own), abs=1e-5)


def test_two_copies_of_one_model_are_one_encoder() -> None:
    one, other = filled(LocalEmbeddings(model())), filled(LocalEmbeddings(tiny("bert")))
    one.similarity_search(QUERY)  # a model that was used is still the same
    (document, *_) = ExplainingRetriever(retriever=ensemble(one.as_retriever(), other.as_retriever())).invoke(QUERY)
    assert get_explanation(document) is not None


def test_several_encoders_are_named_and_one_of_them_can_be_passed() -> None:
    mine, other = Prompting(model()), LocalEmbeddings(tiny("roberta"))
    same = LocalEmbeddings(model())
    for second, kind in ((other, "RobertaModel"), (same, "BertModel")):  # another model, and the same used otherwise
        both = ensemble(filled(mine).as_retriever(), queries(filled(second).as_retriever()))
        with pytest.raises(InvalidInput) as refused:
            ExplainingRetriever(retriever=both)
        assert str(refused.value).startswith(
            f"EnsembleRetriever holds several encoders (Prompting with BertModel and LocalEmbeddings with {kind}): "
        )
        for document in ExplainingRetriever(retriever=both, explainer=mine, unit="token").invoke(QUERY):
            why = get_explanation(document)
            assert why is not None
            assert "prompt" in {token.part for token in why.query_tokens}


def test_one_that_is_added_after_the_wrapper_was_made_is_said_and_the_search_goes_on() -> None:
    both = ensemble(filled().as_retriever(), Words())
    wrapped = ExplainingRetriever(retriever=both)
    both.retrievers[1] = filled(LocalEmbeddings(tiny("roberta"))).as_retriever()
    found = wrapped.invoke(QUERY)
    assert found == both.invoke(QUERY)
    assert all(get_explanation(document) is None for document in found)
    assert "or several" in found[0].hit.reason  # type: ignore[attr-defined]


@pytest.mark.parametrize("is_query_cached", [False, True])
def test_a_cache_around_embeddings_is_looked_through(is_query_cached: bool) -> None:
    cache_of: dict[str, Any] = {"key_encoder": "blake2b", "query_embedding_cache": is_query_cached}
    kept = InMemoryByteStore()
    cached = CacheBackedEmbeddings.from_bytes_store(Prompting(model()), kept, **cache_of)
    for fields in ({"vectorstore": filled(cached)}, {"retriever": ensemble(Words(), filled(cached).as_retriever())}):
        for document in ExplainingRetriever(unit="token", **fields).invoke(QUERY):
            why = get_explanation(document)
            assert why is not None
            assert "prompt" in {token.part for token in why.query_tokens}
            assert "mismatch" not in {notice.code for notice in why.notices}
    assert not any("short text" in key for key in kept.store)
    assert len(kept.store) == len(CORPUS) + is_query_cached  # the probe is not among them


def test_a_cached_vector_of_another_model_is_noticed() -> None:
    kept = InMemoryByteStore()
    options: dict[str, Any] = {"key_encoder": "blake2b", "query_embedding_cache": True}
    CacheBackedEmbeddings.from_bytes_store(LocalEmbeddings(tiny("roberta")), kept, **options).embed_query(QUERY)
    stale = CacheBackedEmbeddings.from_bytes_store(LocalEmbeddings(model()), kept, **options)
    for document in ExplainingRetriever(retriever=filled(stale).as_retriever()).invoke(QUERY):
        assert "CacheBackedEmbeddings gives the query" in (get_explanation(document).surrogate or "")  # type: ignore[union-attr]


def test_all_documents_of_the_stores_inside_are_precomputed() -> None:
    more = InMemoryVectorStore(LocalEmbeddings(model()))
    more.add_texts([text.upper() for text in CORPUS])
    with Explainer(model()) as explainer:
        both = ensemble(Words(), filled().as_retriever(), ExplainingRetriever(vectorstore=more))
        wrapped = ExplainingRetriever(retriever=both, explainer=explainer)
        assert wrapped.precompute(progress=False).built == 2 * len(CORPUS)


# ---------------------------------------------------------------------- wrapped ones inside


def test_an_ensemble_that_keeps_the_other_copy_keeps_the_explanation_inside_a_wrapper() -> None:
    store = filled()
    wrapped = ExplainingRetriever(vectorstore=store, k=3)
    both = ensemble(Words(), wrapped, weights=[0.9, 0.1])
    assert not any(isinstance(document, ExplainedDocument) for document in both.invoke(QUERY))
    outer = ExplainingRetriever(retriever=both)
    scores = {document.page_content: score for document, score in store.similarity_search_with_score(QUERY, k=3)}
    for found in (outer.invoke(QUERY), asyncio.run(outer.ainvoke(QUERY)), outer.batch([QUERY, QUERY])[1]):
        assert found == both.invoke(QUERY)
        for rank, document in enumerate(found, 1):
            assert isinstance(document, ExplainedDocument)
            hit, why = document.hit, document.explanation
            assert why is not None
            assert hit.rank == rank
            assert [stage.name for stage in hit.stages] == ["Words", "InMemoryVectorStore", "EnsembleRetriever"]
            if document.page_content in scores:
                assert hit.stages[1].score == scores[document.page_content]
                assert hit.gap == pytest.approx(0.0, abs=1e-5)
            else:
                assert hit.stages[1].is_missed
                assert "chosen by EnsembleRetriever" in (why.surrogate or "")
    assert {document.page_content for document in found} > set(scores)


def test_the_same_without_the_outer_wrapper_is_still_in_the_log(log: ExplanationLog) -> None:
    both = ensemble(Words(), ExplainingRetriever(vectorstore=filled(), k=3), weights=[0.9, 0.1])
    outer = ExplainingRetriever(retriever=both)
    for retriever in (both, outer):
        retriever.invoke(QUERY, {"callbacks": [ExplanationLogHandler(log)]})
    bare, around = log.records()
    assert (bare.explained, around.explained) == (3, 5)
    for one, other in zip(bare.hits, around.hits, strict=True):
        if one.stages:
            assert (one.rank, one.score, one.gap) == (other.rank, other.score, other.gap)
            assert other.stages == one.stages


def test_a_rewritten_question_is_what_the_explanation_is_of() -> None:
    base = ExplainingRetriever(vectorstore=filled(), k=2)
    found = ExplainingRetriever(retriever=queries(base)).invoke(QUERY)
    assert found == queries(base).invoke(QUERY)
    assert [document.explanation.query for document in found[:2]] == ["bees"] * 2  # type: ignore[attr-defined]
    assert found[-1].explanation.query == "the moon"  # type: ignore[attr-defined]


def test_filters_that_make_new_documents_lose_nothing_inside_a_wrapper() -> None:
    base = ExplainingRetriever(vectorstore=filled(), k=4)
    keep = EmbeddingsFilter(embeddings=LocalEmbeddings(model()), k=3)
    for compressor in (keep, DocumentCompressorPipeline(transformers=[keep])):
        inside = compressed(base, compressor)
        assert not any(isinstance(document, ExplainedDocument) for document in inside.invoke(QUERY))
        found = ExplainingRetriever(retriever=inside).invoke(QUERY)
        assert [one.page_content for one in found] == [one.page_content for one in inside.invoke(QUERY)]
        for document in found:
            assert document.hit.stages[0].name == "InMemoryVectorStore"  # type: ignore[attr-defined]
            assert (document.explanation.surrogate, document.hit.metric) == (None, "cosine")  # type: ignore[attr-defined]


def test_an_extract_is_explained_as_the_text_that_it_is() -> None:
    extract = LLMChainExtractor.from_llm(FakeListLLM(responses=["the dog"]))
    inside = compressed(ExplainingRetriever(vectorstore=filled(), k=2), extract)
    for document in ExplainingRetriever(retriever=inside).invoke(QUERY):
        why = get_explanation(document)
        assert why is not None
        assert why.document == document.page_content == "the dog"
        assert "chosen by ContextualCompressionRetriever with LLMChainExtractor" in (why.surrogate or "")


def test_modes_of_the_outer_wrapper_hold_for_the_hits_inside() -> None:
    inside = ensemble(Words(), ExplainingRetriever(vectorstore=filled(), k=3))
    outer = ExplainingRetriever(retriever=inside)

    def statuses(**options: Any) -> list[str]:
        return [document.hit.status for document in outer.invoke(QUERY, **options)]  # type: ignore[attr-defined]

    assert statuses() == ["pending"] * 5
    assert statuses(explain="eager") == ["ready"] * 5
    assert statuses(explain="off") == ["skipped"] * 5
    assert statuses(top=2) == ["pending"] * 2 + ["skipped"] * 3
    silent = ensemble(ExplainingRetriever(vectorstore=filled(), k=3, explain="off"))
    assert [one.hit.status for one in ExplainingRetriever(retriever=silent).invoke(QUERY)] == ["pending"] * 3  # type: ignore[attr-defined]


def test_hits_of_one_call_are_not_seen_by_another() -> None:
    wrapped = ExplainingRetriever(vectorstore=filled(), k=5)
    wrapped.invoke(QUERY)
    for document in ExplainingRetriever(retriever=ensemble(Words()), explainer=model()).invoke(QUERY):
        assert [stage.name for stage in document.hit.stages] == ["Words", "EnsembleRetriever"]  # type: ignore[attr-defined]


def test_a_wrapped_one_inside_tells_its_explainer() -> None:
    remote = InMemoryVectorStore(FakeEmbeddings(size=16))
    remote.add_texts(CORPUS)
    inner = ExplainingRetriever(vectorstore=remote, explainer=Explainer(model()))
    (document, *_) = ExplainingRetriever(retriever=ensemble(Words(), inner)).invoke(QUERY)
    assert get_explanation(document) is not None


# ---------------------------------------------------------------------- what is refused


def test_what_is_of_no_use_is_refused_in_one_sentence() -> None:
    store, words = filled(), Words()
    remote, other = InMemoryVectorStore(FakeEmbeddings(size=3)), InMemoryVectorStore(FakeEmbeddings(size=3))
    none, both = "nothing that embeds was found in ", ensemble(remote.as_retriever(), other.as_retriever())
    for fields, message in (
        ({"retriever": words}, none + "Words: pass explainer=Explainer(model)"),
        ({"retriever": both}, "EnsembleRetriever holds several encoders (FakeEmbeddings"),
        ({"retriever": queries(words)}, none + "MultiQueryRetriever: pass"),
        ({"retriever": 3}, "retriever must be a LangChain retriever, not 3"),
        ({"retriever": store}, "retriever must be a LangChain retriever, not InMemoryVectorStore: pass it as vect"),
        ({"vectorstore": store.as_retriever()}, "not VectorStoreRetriever: pass it as retriever="),
        ({"retriever": RunnableLambda(print)}, "retriever must be a LangChain retriever, not RunnableLambda"),
        ({"vectorstore": store, "explainer": 3}, "explainer must be an Explainer or a model to make one from, not int"),
        ({"vectorstore": store, "metric": "foo"}, "there is no metric 'foo': use one of cosine"),
        ({"vectorstore": store, "metric": 3}, "metric must be the name of a metric, not 3"),
        ({"vectorstore": store, "topp": 3}, "ExplainingRetriever has no field 'topp': use retriever, vectorstore, "),
        ({"vectorstore": store, "k": "many"}, "k must be a whole number, not 'many'"),
        ({"vectorstore": store, "k": -1}, "k must be a number of documents, not -1"),
        ({"vectorstore": store, "top": "x"}, "top must be a whole number, not 'x'"),
        ({"vectorstore": store, "time_limit": "x"}, "time_limit must be a number of seconds, not 'x'"),
        ({"vectorstore": store, "unit": "x"}, "unit must be 'token', 'word' or 'sentence', not 'x'"),
        ({"vectorstore": store, "search_kwargs": 3}, "search_kwargs must be a dictionary, not 3"),
        ({"vectorstore": store, "surrogate": 3}, "surrogate must be a sentence, False or None, not 3"),
        ({"vectorstore": store, "metadata_key": [1]}, "metadata_key must be a string, not list"),
        ({"vectorstore": store, "tags": 3}, "tags must be"),
        ({"vectorstore": store, "explain": None}, "explain must be 'lazy', 'eager' or 'off', not None"),
    ):
        with pytest.raises(InvalidInput) as refused:
            ExplainingRetriever(**fields)
        assert message in str(refused.value)
        assert "\n" not in str(refused.value)
    for given in (3, "text", [3]):
        with pytest.raises(InvalidInput, match="precompute takes a list of documents, or a vector store"):
            ExplainingRetriever(vectorstore=store).precompute(given)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="Words has no vector store: pass the documents to precompute"):
        ExplainingRetriever(retriever=words, explainer=model()).precompute()
