"""DocumentExplainer in real pipelines: same documents, scores and prompts, with reasons beside them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from haystack import Document, Pipeline
from haystack.components.builders import PromptBuilder
from haystack.components.rankers import MetaFieldRanker
from haystack.components.retrievers import TextEmbeddingRetriever
from haystack.components.retrievers.in_memory import InMemoryEmbeddingRetriever
from haystack.core.errors import BreakpointException, SerializationError
from haystack.dataclasses.breakpoints import Breakpoint, PipelineSnapshot
from haystack.tracing.utils import coerce_tag_value
from haystack_integrations.components.explainers.rag_explain import DocumentExplainer, PipelineHit, PipelineHits

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
from rag_explain.encoder.loading import packaged_path
from rag_explain.errors import InvalidInput
from rag_explain.log import ExplanationLog
from rag_explain.results.explanation import Explanation

TEMPLATE = "{{ documents }} {% for one in documents %}{{ one }} {{ one.meta }} {{ one.score }}{% endfor %}"


class Broken(Explainer):
    """An Explainer that fails."""

    def explain_many(self, query: str, documents: Any, *, unit: Any = None, ids: Any = None) -> list[Explanation]:
        raise MemoryError("out of memory")


def test_documents_scores_and_prompts_are_those_of_the_pipeline_without_it() -> None:
    store = filled()
    kept = deepcopy(store.filter_documents())

    def prompt(explainer: DocumentExplainer | None) -> tuple[list[Document], str]:
        pipeline = retrieval(explainer, store)
        pipeline.add_component("prompt", PromptBuilder(TEMPLATE, required_variables=["documents"]))
        pipeline.connect("retriever" if explainer is None else "explainer.documents", "prompt.documents")
        data = {"embedder": {"text": QUERY}} | ({"explainer": {"query": QUERY}} if explainer else {})
        outputs = pipeline.run(data, include_outputs_from={"retriever", "explainer"})
        if explainer is not None:
            explained = [hit.explanation is not None for hit in outputs["explainer"]["hits"].load()]
            assert explained == [explainer.explain != "off"] * 4
            assert outputs["explainer"]["documents"] == outputs["retriever"]["documents"]
        return outputs["retriever"]["documents"], outputs["prompt"]["prompt"]

    expected = prompt(None)
    assert len(expected[0]) == 4
    for explain in ("lazy", "eager", "off"):
        found = prompt(DocumentExplainer(explain=explain))
        assert found == expected
        assert [type(one) for one in found[0]] == [Document] * 4
    assert store.filter_documents() == kept


def test_explanations_are_computed_when_they_are_looked_at() -> None:
    found = asked(retrieval(DocumentExplainer(), filled()))
    assert [hit.status for hit in found["hits"]] == ["pending"] * 4
    for rank, (document, hit) in enumerate(zip(found["documents"], found["hits"], strict=True), 1):
        assert (hit.id, hit.text, hit.rank, hit.score) == (document.id, document.content, rank, document.score)
        assert hit.metadata == document.meta
        assert hit.explanation.surrogate is None
        assert hit.explanation.notices == ()
        assert hit.gap == pytest.approx(0.0, abs=1e-5)
        assert [stage.name for stage in hit.stages] == ["InMemoryEmbeddingRetriever"]


@pytest.mark.parametrize(
    ("settings", "run", "expected"),
    [
        ({"explain": "eager"}, {}, ["ready"] * 4),
        ({"explain": "off"}, {}, ["skipped"] * 4),
        ({"top": 1}, {}, ["pending", "skipped", "skipped", "skipped"]),
        ({}, {"explain": "eager", "top": 2}, ["ready", "ready", "skipped", "skipped"]),
        ({"explain": "eager", "time_limit": 0.0}, {}, ["skipped"] * 4),
    ],
)
def test_what_is_explained_can_be_set_for_all_runs_and_for_one(
    settings: dict[str, Any], run: dict[str, Any], expected: list[str]
) -> None:
    pipeline = retrieval(DocumentExplainer(**settings), filled())
    found = asked(pipeline, explainer={"query": QUERY, **run})
    assert [hit.status for hit in found["hits"]] == expected


def test_it_runs_in_an_event_loop() -> None:
    pipeline = retrieval(DocumentExplainer(explain="eager"), filled())
    data = {"embedder": {"text": QUERY}, "explainer": {"query": QUERY}}

    async def both() -> list[dict[str, Any]]:
        return await asyncio.gather(pipeline.run_async(data), pipeline.run_async(data))

    for outputs in asyncio.run(both()):
        found = outputs["explainer"]
        assert found["documents"] == asked(pipeline)["documents"]
        assert [hit.explanation.surrogate for hit in found["hits"]] == [None] * 4


def test_a_retriever_that_embeds_by_itself_is_looked_into() -> None:
    retriever = TextEmbeddingRetriever(retriever=InMemoryEmbeddingRetriever(filled()), text_embedder=text_embedder())
    pipeline = Pipeline()
    pipeline.add_component("retriever", retriever)
    pipeline.add_component("explainer", DocumentExplainer())
    pipeline.connect("retriever", "explainer")
    for hit in pipeline.run({"retriever": {"query": QUERY}, "explainer": {"query": QUERY}})["explainer"]["hits"]:
        assert hit.explanation.surrogate is None
        assert hit.gap == pytest.approx(0.0, abs=1e-5)
        assert hit.stages[0].name == "TextEmbeddingRetriever"


def test_outside_of_a_pipeline_it_says_that_it_does_not_see_what_scored() -> None:
    found = DocumentExplainer(saved()).run(QUERY, documents())
    assert found["documents"] == documents()
    assert {hit.explanation.surrogate for hit in found["hits"]} == {
        "DocumentExplainer does not see what scored the documents; this encoder's similarity is explained"
    }
    retriever = InMemoryEmbeddingRetriever(filled(), return_embedding=True)
    embedder = text_embedder()
    embedder.warm_up()
    vector = embedder.run(QUERY)["embedding"]
    scored = retriever.run(vector)["documents"]
    for explainer in (embedder, embedder.embedding_backend.model, Explainer(saved()), Path(saved())):
        hits = DocumentExplainer(explainer, metric="cosine").run(QUERY, scored, query_embedding=vector)["hits"]
        assert [hit.explanation.notices for hit in hits] == [()] * 5
        assert [round(hit.gap, 5) for hit in hits] == [0.0] * 5


def test_a_failed_explanation_fails_no_pipeline(caplog: pytest.LogCaptureFixture) -> None:
    for explain in ("lazy", "eager"):
        found = asked(retrieval(DocumentExplainer(Broken(saved()), explain=explain), filled()))
        assert [document.score for document in found["documents"]] == [hit.score for hit in found["hits"]]
        assert [hit.explanation for hit in found["hits"]] == [None] * 4
        assert {hit.reason for hit in found["hits"]} == {"MemoryError: out of memory"}
    assert "could not be explained: MemoryError" in caplog.text


def test_a_document_without_text_is_returned_like_any_other() -> None:
    pictures = [Document(id="a picture", meta={"file": "moon.png"}, score=0.5), Document(id="b", content="the moon")]
    found = DocumentExplainer(saved()).run(QUERY, pictures)
    assert found["documents"] == pictures
    assert [(hit.status, hit.reason) for hit in found["hits"]] == [
        ("skipped", "the document has no text"),
        ("pending", None),
    ]


# ---------------------------------------------------------------------- the model


def test_without_a_model_that_is_here_the_warm_up_says_what_to_pass() -> None:
    with pytest.raises(InvalidInput, match="found in the pipeline before DocumentExplainer: pass explainer="):
        DocumentExplainer().warm_up()


def test_what_no_setting_allows_is_refused_at_once() -> None:
    for settings in ({"explain": "perhaps"}, {"top": -1}, {"metric": "taxicab"}, {"unit": "page"}):
        with pytest.raises(InvalidInput):
            DocumentExplainer(**settings)  # type: ignore[arg-type]
    for wrong, message in (
        ({"explainer": 3}, "explainer must be an Explainer or a model to make one from, not int"),
        ({"document_embedder": "all-MiniLM-L6-v2"}, "document_embedder must be a document embedder, not str"),
        ({"surrogate": 3}, "surrogate must be a sentence, False or None, not 3"),
    ):
        with pytest.raises(InvalidInput, match=message):
            DocumentExplainer(**wrong)  # type: ignore[arg-type]


def test_the_embedder_is_loaded_where_the_explainer_stands_before_it() -> None:
    pipeline = Pipeline()
    pipeline.add_component("explainer", DocumentExplainer())
    pipeline.add_component("embedder", text_embedder())
    pipeline.add_component("retriever", InMemoryEmbeddingRetriever(filled()))
    pipeline.connect("embedder.embedding", "retriever.query_embedding")
    pipeline.connect("retriever.documents", "explainer.documents")
    pipeline.warm_up()
    assert asked(pipeline)["hits"][0].explanation is not None


# ---------------------------------------------------------------------- what a pipeline does with components and data


@pytest.mark.parametrize(
    "make",
    [
        DocumentExplainer,
        lambda: DocumentExplainer(saved(), explain="eager", top=2, time_limit=9.5, unit="token", surrogate=False),
        lambda: DocumentExplainer(Path(saved()), metric="cosine", surrogate="mixed"),
        lambda: DocumentExplainer(
            text_embedder(prefix="query: "), document_embedder=document_embedder(prefix="text: ")
        ),
    ],
)
def test_a_pipeline_is_written_and_read_again(make: Callable[[], DocumentExplainer]) -> None:
    pipeline = retrieval(make(), filled())
    text = pipeline.dumps()
    again = Pipeline.loads(text)
    assert again.dumps() == text
    first, second = asked(pipeline), asked(again)
    assert first["documents"] == second["documents"]
    for one, other in zip(first["hits"], second["hits"], strict=True):
        assert (one.status, one.stages) == (other.status, other.stages)
        assert (one.explanation is None) == (other.explanation is None)
        if one.explanation is not None:
            assert one.explanation.score == pytest.approx(other.explanation.score, abs=1e-6)
            assert one.explanation.surrogate == other.explanation.surrogate


def test_an_explainer_that_cannot_be_written_says_what_to_pass() -> None:
    pipeline = retrieval(DocumentExplainer(Explainer(saved())), filled())
    with pytest.raises(SerializationError, match="an object of Explainer, which cannot be written: pass explainer= as"):
        pipeline.dumps()


def test_copies_of_hits_share_one_explanation() -> None:
    hits = asked(retrieval(DocumentExplainer(), filled()))["hits"]
    copies = deepcopy(hits)
    assert type(copies) is PipelineHits
    explanation = copies[0].explanation
    assert explanation is not None
    assert hits[0].status == "ready"
    assert hits[0].explanation == explanation


def with_ranker(*, connect_hits: bool) -> Pipeline:
    """retriever -> explainer -> ranker -> a second explainer."""
    pipeline = retrieval(DocumentExplainer(), filled())
    pipeline.add_component("ranker", MetaFieldRanker("title", weight=1.0, sort_order="ascending"))
    pipeline.add_component("last", DocumentExplainer())
    pipeline.connect("explainer.documents", "ranker.documents")
    pipeline.connect("ranker.documents", "last.documents")
    if connect_hits:
        pipeline.connect("explainer.hits", "last.hits")
    return pipeline


def test_what_came_after_the_search_is_a_stage_where_the_hits_are_passed_on() -> None:
    data = {"embedder": {"text": QUERY}, "explainer": {"query": QUERY}, "last": {"query": QUERY}}
    outputs = with_ranker(connect_hits=True).run(data, include_outputs_from={"explainer"})
    searched = {hit.id: hit for hit in outputs["explainer"]["hits"]}
    last = outputs["last"]
    assert [hit.id for hit in last["hits"]] == [document.id for document in last["documents"]]
    assert [hit.id for hit in last["hits"]] != list(searched)
    for rank, hit in enumerate(last["hits"], 1):
        search, stage = hit.stages
        assert (search.name, search.rank) == ("InMemoryEmbeddingRetriever", searched[hit.id].rank)
        assert (stage.name, stage.kind, stage.rank) == ("MetaFieldRanker", "rerank", rank)
        assert stage.rank_before == searched[hit.id].rank
        assert hit.explanation.surrogate == (
            "the documents were ranked by MetaFieldRanker, not by this encoder's similarity alone"
        )
        assert hit.gap == pytest.approx(0.0, abs=1e-5)
        assert searched[hit.id].explanation.surrogate is None
        assert searched[hit.id].status == "ready"  # it was computed once, for both


def test_documents_that_something_ranked_anew_are_marked_where_no_hits_are_passed_on() -> None:
    data = {"embedder": {"text": QUERY}, "explainer": {"query": QUERY}, "last": {"query": QUERY}}
    for hit in with_ranker(connect_hits=False).run(data)["last"]["hits"]:
        assert hit.metric == "unknown"
        assert hit.stages[0].name == "InMemoryEmbeddingRetriever with MetaFieldRanker"
        assert hit.explanation.surrogate == (
            "the documents were chosen by MetaFieldRanker, not by this encoder's similarity alone"
        )


@pytest.mark.parametrize("explain", ["lazy", "eager"])
def test_a_pipeline_is_resumed_from_its_snapshot_with_what_was_computed(explain: Any, tmp_path: Path) -> None:
    pipeline = with_ranker(connect_hits=True)
    data: dict[str, Any] = {"embedder": {"text": QUERY}, "explainer": {"query": QUERY, "explain": explain}}
    data["last"] = {"query": QUERY}
    with pytest.raises(BreakpointException) as stopped:
        pipeline.run(data, include_outputs_from={"explainer"}, break_point=Breakpoint("last"))
    snapshot = stopped.value.pipeline_snapshot
    assert snapshot is not None
    written = json.loads(json.dumps(snapshot.to_dict()))
    assert "PipelineHit" in json.dumps(written)
    outputs = with_ranker(connect_hits=True).run({}, pipeline_snapshot=PipelineSnapshot.from_dict(written))
    for hit in (*outputs["explainer"]["hits"], *outputs["last"]["hits"]):
        assert type(hit) is PipelineHit
        if explain == "eager":
            assert hit.explanation.score == pytest.approx(hit.stages[0].score, abs=1e-5)
        else:
            assert (hit.explanation, hit.reason) == (
                None,
                "it was not computed before the pipeline's snapshot was written",
            )


def test_a_tracer_gets_plain_data_and_computes_nothing() -> None:
    found = asked(retrieval(DocumentExplainer(), filled()))
    traced = json.loads(str(coerce_tag_value(found)))
    assert [hit["status"] for hit in traced["hits"]["hits"]] == ["pending"] * 4
    assert [hit.status for hit in found["hits"]] == ["pending"] * 4


def test_answers_are_logged_with_their_hits(tmp_path: Path) -> None:
    found = asked(retrieval(DocumentExplainer(), filled()))
    with ExplanationLog(tmp_path / "log") as log:
        log.record(query=QUERY, answer="It was bored.", hits=found["hits"])
    with ExplanationLog(tmp_path / "log") as log:
        (record,) = log.records()
    assert [hit.id for hit in record.hits] == [document.id for document in found["documents"]]


def test_all_documents_of_the_store_are_precomputed(tmp_path: Path) -> None:
    explainer = DocumentExplainer(Explainer(saved(), store=str(tmp_path)))
    pipeline = retrieval(explainer, filled())
    assert explainer.precompute(unit="sentence").built == 5
    assert explainer.precompute(unit="sentence").kept == 5
    assert explainer.precompute(documents()[:2], unit="sentence").kept == 2
    assert asked(pipeline)["hits"][0].explanation is not None
    with pytest.raises(InvalidInput, match="the retriever has no document store: pass the documents to precompute"):
        DocumentExplainer(saved()).precompute()


@pytest.mark.slow
def test_on_real_weights_every_score_is_explained() -> None:
    model = str(packaged_path())
    pipeline = retrieval(DocumentExplainer(), filled(document_embedder(model), "dot_product"), text_embedder(model))
    found = asked(pipeline, "How do bees find their way?")
    assert found["documents"][0].content.startswith("honeybees")
    for hit in found["hits"]:
        assert hit.explanation.surrogate is None
        assert hit.gap == pytest.approx(0.0, abs=1e-5)
        assert hit.explanation.gap == pytest.approx(0.0, abs=1e-4)
