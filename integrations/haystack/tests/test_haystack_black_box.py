"""Haystack's own OpenAI embedders against a real server: explained by their vectors, on demand, never for a log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from haystack import Document, Pipeline
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.components.retrievers.in_memory import InMemoryEmbeddingRetriever
from haystack.document_stores.in_memory import InMemoryDocumentStore
from haystack.utils import Secret
from haystack_integrations.components.explainers.rag_explain import DocumentExplainer

from rag_explain.log import ExplanationLog, records
from rag_explain.results.notices import BLACK_BOX
from tests.support.embedders import Asked
from tests.support.embedding_server import KEY, EmbeddingServer
from tests.support.models import tiny

QUERY = "why did the dog look at the moon?"
WORDS = 8
TEXTS = [f"The dog saw {number} moons. Paris is old! A cat ({number}) looked." for number in ("two", "three", "four")]
PROBES = 9  # four in each role, and one again
asked = Asked(tiny("bert"))


@pytest.fixture
def server() -> Iterator[EmbeddingServer]:
    with EmbeddingServer(lambda texts: asked(texts, "document")).running() as running:
        yield running


def settings(server: EmbeddingServer) -> dict[str, Any]:
    return {"api_base_url": server.url, "api_key": Secret.from_token(KEY), "model": "tiny"}


def pipeline(server: EmbeddingServer, explainer: DocumentExplainer, prefix: str = "") -> Pipeline:
    store = InMemoryDocumentStore(embedding_similarity_function="cosine")
    embedder = OpenAIDocumentEmbedder(progress_bar=False, prefix=prefix, **settings(server))
    store.write_documents(embedder.run([Document(content=text) for text in TEXTS])["documents"])
    made = Pipeline()
    made.add_component("embedder", OpenAITextEmbedder(**settings(server)))
    made.add_component("retriever", InMemoryEmbeddingRetriever(store))
    made.add_component("explainer", explainer)
    made.connect("embedder.embedding", "retriever.query_embedding")
    made.connect("retriever.documents", "explainer.documents")
    return made


def hits(made: Pipeline) -> Any:
    return made.run({"embedder": {"text": QUERY}, "explainer": {"query": QUERY}})["explainer"]["hits"]


def sent(server: EmbeddingServer) -> int:
    """How many texts were sent since this was asked last."""
    count = len(server.texts)
    server.calls.clear()
    return count


def test_nothing_is_sent_before_an_explanation_is_looked_at(server: EmbeddingServer) -> None:
    made = pipeline(server, DocumentExplainer())
    sent(server)
    found = hits(made)
    assert server.texts == [QUERY]
    sent(server)
    first = found[0].explanation
    assert sent(server) == PROBES + WORDS + 1 + 4
    assert (first.method, first.unit, first.surrogate) == ("occlusion", "sentence", None)
    assert first.score == pytest.approx(found[0].score, abs=1e-5)
    (told,) = [notice for notice in first.notices if notice.code == BLACK_BOX]
    assert told.text.startswith("OpenAITextEmbedder holds no model that can be looked into")


def test_a_document_embedder_s_prefix_is_in_front_of_what_is_sent(server: EmbeddingServer) -> None:
    embedder = OpenAIDocumentEmbedder(progress_bar=False, prefix="text: ", **settings(server))
    made = pipeline(server, DocumentExplainer(document_embedder=embedder), "text: ")
    found = hits(made)
    sent(server)
    assert found[0].explanation.surrogate is None
    # The whole by itself, to be compared with the index's vector, and then the parts together.
    assert [len(call["input"]) for call in server.calls if call["input"][0].startswith("text: ")][-2:] == [1, 3]
    without = hits(pipeline(server, DocumentExplainer(), "text: "))[0].explanation
    assert "the index's vector of this document is not the one" in without.surrogate


def test_a_log_sends_nothing_and_the_budget_is_a_setting(server: EmbeddingServer, tmp_path: Path) -> None:
    explainer = DocumentExplainer(max_calls=PROBES + WORDS + 1 + 4)
    assert DocumentExplainer.from_dict(explainer.to_dict()).max_calls == explainer.max_calls
    made = pipeline(server, explainer)
    found = hits(made)
    sent(server)
    with ExplanationLog(tmp_path) as log:
        log.record(query=QUERY, hits=found)
    assert sent(server) == 0
    (record,) = records(tmp_path)
    assert {hit.status for hit in record.logged_hits} == {"pending"}
    found.load()
    assert [hit.status for hit in found] == ["ready", "failed", "failed"]
    assert sent(server) == PROBES + WORDS + 1 + 4
