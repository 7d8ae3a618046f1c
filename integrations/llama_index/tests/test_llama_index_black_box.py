"""Embedding models that are elsewhere explain by their own vectors: on demand, in a budget, and never for a log."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import MockEmbedding, VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import TextNode
from llama_index.core.storage.kvstore import SimpleKVStore
from llama_index.retrievers.rag_explain import (
    ExplainingRetriever,
    ExplanationPostprocessor,
    get_explanation,
    log_queries,
)

from rag_explain import Explanation
from rag_explain.log import ExplanationLog, records
from rag_explain.results.notices import BLACK_BOX, PARTIAL
from tests.support.embedders import Asked
from tests.support.embedding_server import Client, EmbeddingServer
from tests.support.models import tiny

QUERY = "why did the dog look at the moon?"
WORDS = 8
TEXTS = [f"The dog saw {number} moons. Paris is old! A cat ({number}) looked." for number in ("two", "three", "four")]
PROBES = 9  # four in each role, and one again
asked = Asked(tiny("bert"))


class Remote(BaseEmbedding):
    """An API, as people write it for LlamaIndex."""

    _client: Client = PrivateAttr()

    def __init__(self, server: EmbeddingServer, **fields: Any) -> None:
        super().__init__(model_name="tiny", **fields)
        self._client = Client(server)

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._client([query])[0]

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._client([text])[0]

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return self._client(texts)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return await asyncio.to_thread(self._get_query_embedding, query)


@pytest.fixture
def server() -> Iterator[EmbeddingServer]:
    with EmbeddingServer(lambda texts: asked(texts, "document")).running() as running:
        yield running


def index(model: BaseEmbedding, texts: list[str] = TEXTS) -> VectorStoreIndex:
    return VectorStoreIndex([TextNode(text=text) for text in texts], embed_model=model)


def explanation(node: Any) -> Explanation:
    found = get_explanation(node)
    assert found is not None, node.hit.reason
    return found


def sent(server: EmbeddingServer) -> int:
    """How many texts were sent since this was asked last."""
    count = len(server.texts)
    server.calls.clear()
    return count


def test_one_line_explains_and_nothing_is_sent_before_an_explanation_is_looked_at(server: EmbeddingServer) -> None:
    base = index(Remote(server)).as_retriever()
    sent(server)
    wrapped = ExplainingRetriever(base)
    assert sent(server) == 0
    first, second = wrapped.retrieve(QUERY)
    wrapped.with_explain("off").retrieve(QUERY)
    other, _ = asyncio.run(wrapped.aretrieve(QUERY))
    assert server.texts == [QUERY] * 3
    sent(server)
    found = explanation(first)
    assert sent(server) == PROBES + WORDS + 1 + 4
    assert found.method == "occlusion"
    assert (found.unit, found.surrogate) == ("sentence", None)
    assert found.score == pytest.approx(first.score, abs=1e-5)
    assert [notice.level for notice in found.notices if notice.code == BLACK_BOX] == ["note"]
    explanation(second)
    assert sent(server) == 3  # the whole is the index's vector
    explanation(other)
    assert sent(server) == 0
    assert max(len(call["input"]) for call in server.calls or [{"input": []}]) <= base._embed_model.embed_batch_size  # type: ignore[union-attr]


def test_what_is_embedded_with_the_text_stays_where_it_is(server: EmbeddingServer) -> None:
    nodes = [TextNode(text=text, metadata={"source": "a report of 1999"}) for text in TEXTS]
    base = VectorStoreIndex(nodes, embed_model=Remote(server)).as_retriever()
    node = ExplainingRetriever(base).retrieve(QUERY)[0]
    sent(server)
    found = explanation(node)
    assert found.surrogate is None
    documents = [text for text in server.texts if "moons" in text or "Paris" in text]
    assert len(documents) == 4
    assert all(text.startswith("source: a report of 1999") for text in documents)


def test_a_postprocessor_takes_such_a_model_too(server: EmbeddingServer) -> None:
    nodes = index(Remote(server)).as_retriever().retrieve(QUERY)
    sent(server)
    explained = ExplanationPostprocessor(explainer=Remote(server), metric="cosine").postprocess_nodes(
        nodes, query_str=QUERY
    )
    assert sent(server) == 0
    assert explanation(explained[0]).surrogate is None


def test_no_more_is_sent_for_a_query_than_was_said(server: EmbeddingServer) -> None:
    wrapped = ExplainingRetriever(index(Remote(server)).as_retriever(), max_calls=PROBES + WORDS + 1 + 4 + 2)
    nodes: Any = wrapped.retrieve(QUERY)
    sent(server)
    first, second = [node.explanation for node in nodes]
    assert sent(server) == PROBES + WORDS + 1 + 4 + 2
    assert PARTIAL not in {notice.code for notice in first.notices}
    assert PARTIAL in {notice.code for notice in second.notices}


def test_a_log_sends_nothing_and_says_that_no_explanation_was_made(server: EmbeddingServer, tmp_path: Path) -> None:
    wrapped = ExplainingRetriever(index(Remote(server)).as_retriever())
    engine = RetrieverQueryEngine.from_args(wrapped, llm=MockLLM())
    sent(server)
    with ExplanationLog(tmp_path) as log, log_queries(log):
        engine.query(QUERY)
        log.flush()
    assert server.texts == [QUERY]
    (record,) = records(tmp_path)
    assert {hit.status for hit in record.logged_hits} == {"pending"}
    assert "explaining it would send texts to Remote, which a log alone never does" in str(record.logged_hits[0].reason)


def test_the_user_s_cache_is_left_as_it_is_and_a_limit_is_kept_to(server: EmbeddingServer) -> None:
    cache, waited = SimpleKVStore(), []

    class Limit:
        def acquire(self) -> None:
            waited.append(1)

    wrapped = ExplainingRetriever(index(Remote(server, embeddings_cache=cache, rate_limiter=Limit())).as_retriever())
    node = wrapped.retrieve(QUERY)[0]
    before, calls = set(cache.get_all("embeddings")), len(waited)
    explanation(node)
    assert set(cache.get_all("embeddings")) == before
    assert len(waited) > calls


def test_what_gives_every_text_the_same_vector_is_refused_when_it_is_looked_at() -> None:
    node: Any = ExplainingRetriever(index(MockEmbedding(embed_dim=3)).as_retriever()).retrieve(QUERY)[0]
    assert node.explanation is None
    assert "MockEmbedding unknown gives every text the same vector" in node.hit.reason
