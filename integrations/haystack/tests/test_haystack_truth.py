"""What Haystack's embedders, retrievers and stores really computed is explained, or it is said what differs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from haystack import Document, Pipeline
from haystack.components.joiners import DocumentJoiner
from haystack.components.retrievers import MultiQueryEmbeddingRetriever
from haystack.components.retrievers.in_memory import InMemoryBM25Retriever, InMemoryEmbeddingRetriever
from haystack.document_stores.types import DuplicatePolicy
from haystack_integrations.components.explainers.rag_explain import DocumentExplainer

from integrations.haystack.tests.conftest import (
    QUERY,
    asked,
    document_embedder,
    documents,
    filled,
    retrieval,
    saved,
    text_embedder,
)
from rag_explain import Explainer
from rag_explain.retrieval import Embedder
from tests.support.encodes import encodes

DOCUMENT_SETTINGS: list[dict[str, Any]] = [
    {"prefix": "passage: "},
    {"suffix": " the end"},
    {"meta_fields_to_embed": ["title"]},
    {"meta_fields_to_embed": ["title", "none"], "embedding_separator": " - ", "prefix": "text: ", "suffix": " ."},
]
ALONE = "not by this encoder's similarity alone"


@pytest.mark.parametrize("run", [{}, {"scale_score": True}, {"scale_score": False}], ids=str)
@pytest.mark.parametrize("scale_score", [False, True])
@pytest.mark.parametrize("similarity", ["cosine", "dot_product"])
def test_scores_are_read_as_the_similarities_they_stand_for(
    similarity: str, scale_score: bool, run: dict[str, bool]
) -> None:
    pipeline = retrieval(DocumentExplainer(), filled(similarity=similarity), scale_score=scale_score)
    found = asked(pipeline, retriever=run, explainer={"query": QUERY, **run})
    for document, hit in zip(found["documents"], found["hits"], strict=True):
        assert (hit.score, type(hit.score)) == (document.score, float)
        assert hit.explanation.notices == ()
        assert hit.gap == pytest.approx(0.0, abs=1e-5)
    is_scaled = run.get("scale_score", scale_score)
    assert ("2" in hit.metric or "100" in hit.metric) == is_scaled


def test_a_scale_that_only_the_retriever_was_told_of_is_noticed() -> None:
    found = asked(retrieval(DocumentExplainer(), filled()), retriever={"scale_score": True})
    for hit in found["hits"]:
        assert "the index's score implies a similarity of" in hit.explanation.surrogate


def test_vectors_of_any_length_in_a_store_of_inner_products_are_said_to_rank_by_them() -> None:
    model = saved(normalize=False)
    store = filled(document_embedder(model), "dot_product")
    for hit in asked(retrieval(DocumentExplainer(), store, text_embedder(model)))["hits"]:
        assert hit.explanation.surrogate == (
            "the index compares vectors that are not normalised by inner product; the cosine is explained"
        )
    store = filled(document_embedder(model, normalize_embeddings=True), "dot_product")
    embedder = text_embedder(model, normalize_embeddings=True)
    for hit in asked(retrieval(DocumentExplainer(), store, embedder))["hits"]:
        assert hit.explanation.notices == ()
        assert hit.gap == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"prefix": "query: "},
        {"suffix": " please"},
        {"prefix": "the old bridge: ", "suffix": "?"},
        {"truncate_dim": 8},
        {"tokenizer_kwargs": {"model_max_length": 8}},
        {"encode_kwargs": {"prompt": "paris "}},
    ],
    ids=str,
)
def test_what_the_text_embedder_does_is_what_is_explained(settings: dict[str, Any]) -> None:
    shared = {name: one for name, one in settings.items() if name in ("truncate_dim", "tokenizer_kwargs")}
    store = filled(document_embedder(**shared))
    embedder = text_embedder(**settings)
    found = asked(
        retrieval(DocumentExplainer(unit="token", document_embedder=document_embedder(**shared)), store, embedder)
    )
    for document, hit in zip(found["documents"], found["hits"], strict=True):
        assert hit.explanation.surrogate is None
        assert hit.explanation.score == pytest.approx(document.score, abs=1e-5)
        assert hit.explanation.gap == pytest.approx(0.0, abs=1e-4)
        parts = {token.part for token in hit.explanation.query_tokens}
        assert ("prompt" in parts) == ("prefix" in settings or "encode_kwargs" in settings)
        assert hit.explanation.query == QUERY + settings.get("suffix", "")


@pytest.mark.parametrize("settings", DOCUMENT_SETTINGS, ids=str)
def test_what_the_document_embedder_does_is_what_is_explained(settings: dict[str, Any]) -> None:
    store = filled(document_embedder(**settings))
    explainer = DocumentExplainer(unit="token", document_embedder=document_embedder(**settings))
    for hit in asked(retrieval(explainer, store))["hits"]:
        assert hit.explanation.notices == ()
        assert hit.gap == pytest.approx(0.0, abs=1e-5)
        own = [token for token in hit.explanation.document_tokens if token.part == "text"]
        assert all(hit.text[one.start : one.end] == one.text for one in own)
        parts = {token.part for token in hit.explanation.document_tokens}
        assert ("prompt" in parts) == ("prefix" in settings)
        assert ("metadata" in parts) == ("suffix" in settings or "meta_fields_to_embed" in settings)


@pytest.mark.parametrize("settings", DOCUMENT_SETTINGS, ids=str)
def test_a_document_embedder_that_was_not_passed_is_noticed(settings: dict[str, Any]) -> None:
    for hit in asked(retrieval(DocumentExplainer(), filled(document_embedder(**settings))))["hits"]:
        assert "the index's vector of this document is not the one" in hit.explanation.surrogate


def test_vectors_of_another_model_are_noticed_in_every_document() -> None:
    other = Explainer(saved(architecture="roberta"))
    hits = asked(retrieval(DocumentExplainer(other), filled()))["hits"]
    for hit in hits:
        assert "SentenceTransformersTextEmbedder gives the query another vector" in hit.explanation.surrogate
        assert "the index's vector of this document is not the one" in hit.explanation.surrogate


def test_one_document_with_a_foreign_vector_is_the_one_that_is_marked() -> None:
    store = filled()
    first, *rest = store.filter_documents()
    vector = np.random.default_rng(0).normal(size=16)
    store.write_documents(
        [Document(id=first.id, content=first.content, meta=first.meta, embedding=(vector / 4).tolist())],
        policy=DuplicatePolicy.OVERWRITE,
    )
    pipeline = retrieval(DocumentExplainer(), store)
    hits = asked(pipeline, retriever={"top_k": 5})["hits"]
    assert {hit.id for hit in hits} == {first.id, *(one.id for one in rest)}
    assert [hit.id for hit in hits if hit.explanation.surrogate is not None] == [first.id]


def test_a_query_that_is_not_the_embedded_one_is_noticed() -> None:
    pipeline = retrieval(DocumentExplainer(), filled())
    reasons = [
        hit.explanation.surrogate
        for hit in asked(pipeline, explainer={"query": "honeybees, landmarks and the sun"})["hits"]
    ]
    assert any("the index's score implies a similarity of" in (reason or "") for reason in reasons)
    pipeline = retrieval(DocumentExplainer(), filled())
    pipeline.connect("embedder.embedding", "explainer.query_embedding")
    for hit in asked(pipeline, explainer={"query": "honeybees, landmarks and the sun"})["hits"]:
        assert "SentenceTransformersTextEmbedder gives the query another vector" in hit.explanation.surrogate


def test_where_the_query_embedding_is_connected_the_embedder_is_not_asked() -> None:
    for query, is_connected in (("which cat sat on the bridge?", False), ("which dog sat on the mat?", True)):
        pipeline = retrieval(DocumentExplainer(), filled())
        if is_connected:
            pipeline.connect("embedder.embedding", "explainer.query_embedding")
        hits = asked(pipeline, query)["hits"]
        with encodes() as seen:
            assert [hit.explanation.notices for hit in hits.load()] == [()] * 4
        assert seen.texts.count(query) == (1 if is_connected else 2)


def test_what_the_pipeline_computes_is_computed_once_and_looking_alone_encodes() -> None:
    pipeline = retrieval(DocumentExplainer(), filled())
    asked(pipeline)
    with encodes() as seen:
        hits = asked(pipeline)["hits"]
    assert seen.texts == [QUERY]
    assert [hit.status for hit in hits] == ["pending"] * 4


def test_how_the_embedder_embeds_is_seen_anew_only_where_it_was_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    used = Embedder._used

    def counted(embedder: Embedder, model: Any) -> Any:
        seen.append(model)
        return used(embedder, model)

    monkeypatch.setattr(Embedder, "_used", counted)
    embedder = text_embedder()
    pipeline = retrieval(DocumentExplainer(), filled(), embedder)
    asked(pipeline)
    asked(pipeline)  # Python itself notes on a class how it is copied, when it first is
    seen.clear()
    pipeline.metadata["runs"] = "3"  # a pipeline that says more of itself, as it does for telemetry
    asked(pipeline)
    assert seen == []
    embedder.prefix = "query: "
    for hit in asked(pipeline)["hits"]:
        assert hit.explanation.surrogate is None
        assert hit.explanation.score == pytest.approx(hit.score, abs=1e-5)
    assert seen != []


def hybrid(explainer: DocumentExplainer, join_mode: str = "reciprocal_rank_fusion") -> Pipeline:
    store = filled()
    pipeline = retrieval(None, store)
    pipeline.add_component("bm25", InMemoryBM25Retriever(store))
    pipeline.add_component("joiner", DocumentJoiner(join_mode=join_mode))
    pipeline.add_component("explainer", explainer)
    for sender, receiver in (("retriever", "joiner"), ("bm25", "joiner"), ("joiner", "explainer")):
        pipeline.connect(f"{sender}.documents", f"{receiver}.documents")
    return pipeline


def test_documents_of_a_hybrid_search_are_marked_as_chosen_by_its_parts() -> None:
    for hit in asked(hybrid(DocumentExplainer()), bm25={"query": QUERY})["hits"]:
        assert hit.explanation.surrogate == (
            "the documents were chosen by InMemoryEmbeddingRetriever and InMemoryBM25Retriever and DocumentJoiner, "
            + ALONE
        )
        assert hit.stages[0].name == "InMemoryEmbeddingRetriever and InMemoryBM25Retriever with DocumentJoiner"
        assert hit.metric == "unknown"
    for hit in asked(hybrid(DocumentExplainer(surrogate="mixed by us")), bm25={"query": QUERY})["hits"]:
        assert hit.explanation.surrogate == "mixed by us"


def test_what_was_only_guessed_from_the_pipeline_can_be_taken_back() -> None:
    explainer = DocumentExplainer(surrogate=False)
    for hit in asked(hybrid(explainer), bm25={"query": QUERY})["hits"]:
        assert hit.explanation.surrogate is None


def test_a_search_by_words_is_explained_by_the_encoder_that_was_passed_and_marked() -> None:
    pipeline = Pipeline()
    pipeline.add_component("retriever", InMemoryBM25Retriever(filled()))
    pipeline.add_component("explainer", DocumentExplainer(saved()))
    pipeline.connect("retriever", "explainer")
    hits = pipeline.run({"retriever": {"query": QUERY}, "explainer": {"query": QUERY}})["explainer"]["hits"]
    assert {hit.explanation.surrogate for hit in hits} == {
        f"the documents were chosen by InMemoryBM25Retriever, {ALONE}"
    }


def test_several_queries_at_once_are_said_to_have_chosen() -> None:
    retriever = MultiQueryEmbeddingRetriever(
        retriever=InMemoryEmbeddingRetriever(filled()), query_embedder=text_embedder()
    )
    pipeline = Pipeline()
    pipeline.add_component("retriever", retriever)
    pipeline.add_component("explainer", DocumentExplainer())
    pipeline.connect("retriever", "explainer")
    data = {"retriever": {"queries": [QUERY, "bees"]}, "explainer": {"query": QUERY}}
    for hit in pipeline.run(data)["explainer"]["hits"]:
        assert hit.explanation.surrogate == f"the documents were chosen by MultiQueryEmbeddingRetriever, {ALONE}"


@pytest.mark.filterwarnings("ignore::DeprecationWarning:chromadb")
@pytest.mark.parametrize("function", ["l2", "cosine", "ip"])
def test_another_store_is_known_by_its_engine(function: Any, tmp_path: Any) -> None:
    stores = pytest.importorskip("haystack_integrations.document_stores.chroma")
    retrievers = pytest.importorskip("haystack_integrations.components.retrievers.chroma")
    store = stores.ChromaDocumentStore(
        persist_path=str(tmp_path), collection_name=f"a-{function}", distance_function=function
    )
    kept = document_embedder().run(documents())["documents"]
    store.write_documents([*kept[:4], Document(content=kept[4].content, embedding=kept[0].embedding)])
    pipeline = Pipeline()
    pipeline.add_component("embedder", text_embedder())
    pipeline.add_component("retriever", retrievers.ChromaEmbeddingRetriever(store))
    pipeline.add_component("explainer", DocumentExplainer())
    pipeline.connect("embedder.embedding", "retriever.query_embedding")
    pipeline.connect("retriever.documents", "explainer.documents")
    hits = asked(pipeline)["hits"]
    assert len(hits) == 5
    for hit in hits:
        is_foreign = hit.text == kept[4].content
        assert (hit.explanation.surrogate is not None) == is_foreign
        assert math.isclose(hit.gap, 0.0, abs_tol=1e-4) or is_foreign
