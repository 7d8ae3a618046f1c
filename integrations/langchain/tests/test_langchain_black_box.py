"""Embeddings without a model explain by their own vectors: in one line, on demand, in a budget, never for a log."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
from langchain_classic.embeddings import CacheBackedEmbeddings
from langchain_classic.retrievers import EnsembleRetriever
from langchain_core.embeddings import Embeddings, FakeEmbeddings
from langchain_core.stores import InMemoryByteStore
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_rag_explain import ExplainingRetriever, ExplanationLogHandler, get_explanation
from langchain_rag_explain.faiss import FaissDocumentRetriever

from rag_explain import Explainer, Explanation
from rag_explain.errors import InvalidInput
from rag_explain.log import ExplanationLog, records
from rag_explain.results.hits import Hits
from rag_explain.results.notices import BLACK_BOX, PARTIAL, TAKEN
from rag_explain.scorers import OpenAICompatible
from tests.support.embedders import Asked
from tests.support.embedding_server import Client, EmbeddingServer
from tests.support.models import tiny

QUERY = "why did the dog look at the moon?"
WORDS = 8
TEXTS = [f"The dog saw {number} moons. Paris is old! A cat ({number}) looked." for number in ("two", "three", "four")]
PROBES = 9  # four in each role, and one again
ONE = WORDS + 1 + 4  # a look at one document: the query without each word, the document without each sentence
asked = Asked(tiny("bert"))


class Remote(Embeddings):
    """An API, as people write it for LangChain."""

    def __init__(self, server: EmbeddingServer) -> None:
        self.client, self.model = Client(server), "tiny"

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return self.client(texts)

    def embed_query(self, text: str) -> list[float]:
        return self.client([text])[0]


@pytest.fixture
def server() -> Iterator[EmbeddingServer]:
    with EmbeddingServer(lambda texts: asked(texts, "document")).running() as running:
        yield running


def filled(embeddings: Embeddings, texts: list[str] = TEXTS) -> InMemoryVectorStore:
    store = InMemoryVectorStore(embeddings)
    store.add_texts(texts)
    return store


def explanation(document: Any) -> Explanation:
    found = get_explanation(document)
    assert found is not None, document.hit.reason
    return found


def codes(found: Explanation) -> set[str]:
    return {notice.code for notice in found.notices}


def sent(server: EmbeddingServer) -> int:
    """How many texts were sent since this was asked last."""
    count = len(server.texts)
    server.calls.clear()
    return count


def test_one_line_explains_and_nothing_is_sent_before_an_explanation_is_looked_at(server: EmbeddingServer) -> None:
    store = filled(Remote(server))
    sent(server)
    wrapped = ExplainingRetriever(vectorstore=store)
    assert sent(server) == 0
    first, second, _ = wrapped.invoke(QUERY)
    wrapped.invoke(QUERY, explain="off")
    wrapped.invoke(QUERY, top=1)
    assert server.texts == [QUERY] * 3  # of the searches
    sent(server)
    found = explanation(first)
    assert sent(server) == PROBES + ONE
    assert found.method == "occlusion"
    assert (found.unit, found.surrogate) == ("sentence", None)
    direct = Explainer(lambda texts: asked(texts, "document")).explain(QUERY, first.page_content)
    np.testing.assert_allclose(found.matrix, direct.matrix, atol=2e-6)
    assert found.score == pytest.approx(first.hit.score, abs=1e-5)  # type: ignore[attr-defined]
    (told,) = [notice for notice in found.notices if notice.code == BLACK_BOX]
    assert told.level == "note"
    assert told.text == (
        "Remote holds no model that can be looked into: this is explained by the vectors that it gives for edited "
        f"texts ({PROBES + ONE} were sent for this query, of at most 64)."
    )
    explanation(second)
    assert sent(server) == 3  # the whole is the index's vector
    explanation(first)
    first.hit.highlights  # type: ignore[attr-defined]  # noqa: B018
    assert sent(server) == 0


def test_the_same_as_a_retriever_and_deep_inside_another_one(server: EmbeddingServer) -> None:
    store = filled(Remote(server))
    for retriever in (store.as_retriever(), EnsembleRetriever(retrievers=[store.as_retriever()], weights=[1.0])):
        document = ExplainingRetriever(retriever=retriever).invoke(QUERY)[0]
        assert BLACK_BOX in codes(explanation(document))
    local = ExplainingRetriever(vectorstore=store, explainer=Remote(server))
    assert BLACK_BOX in codes(explanation(local.invoke(QUERY)[0]))


def test_wrappers_around_one_object_pay_for_its_probes_once(server: EmbeddingServer) -> None:
    store = filled(Remote(server))
    one, other = ExplainingRetriever(vectorstore=store), ExplainingRetriever(retriever=store.as_retriever())
    explanation(one.invoke(QUERY)[0])
    sent(server)
    explanation(other.invoke(QUERY)[0])
    assert server.texts == [QUERY]  # of the search: the rest is kept
    other.vectorstore = None
    store.embedding.model = "another"  # type: ignore[attr-defined]
    document = other.invoke(QUERY)[0]
    sent(server)
    assert explanation(document).model == "Remote another"
    assert sent(server) == PROBES + ONE


def test_sixty_four_texts_are_sent_for_a_query_and_what_does_not_fit_says_so(server: EmbeddingServer) -> None:
    texts = [". ".join(f"The dog saw {number} moons {place}" for place in range(12)) + "." for number in range(6)]
    store = filled(Remote(server), texts)
    documents: Any = ExplainingRetriever(vectorstore=store, k=6).invoke(QUERY)
    sent(server)
    documents[0].hit.highlights  # noqa: B018
    found = [document.explanation for document in documents]
    assert sent(server) == 64
    assert [one is not None for one in found] == [True] * 4 + [False] * 2
    assert [PARTIAL in codes(one) for one in found if one] == [False] * 3 + [True]
    assert all("max_calls is spent before all texts were embedded" in document.hit.reason for document in documents[4:])
    for limit, expected in ((None, PROBES + WORDS + 1 + 1 + 6 * 12), (30, 30), (0, 0)):
        wrapped = ExplainingRetriever(vectorstore=filled(Remote(server), texts), k=6, max_calls=limit)
        fresh: Any = wrapped.invoke(QUERY)
        sent(server)
        [document.explanation for document in fresh]
        assert sent(server) == expected
    # Another query has a budget of its own, and what was paid for is kept.
    again: Any = ExplainingRetriever(vectorstore=store, k=6).invoke(QUERY)
    sent(server)
    assert all(document.explanation is not None for document in again)
    assert sent(server) == 1 + 6 * 12 - (64 - PROBES - WORDS - 1)


def test_a_log_sends_nothing_and_says_that_no_explanation_was_made(server: EmbeddingServer, tmp_path: Path) -> None:
    wrapped = ExplainingRetriever(vectorstore=filled(Remote(server)))
    sent(server)
    with ExplanationLog(tmp_path) as log:
        handler = {"callbacks": [ExplanationLogHandler(log)]}
        wrapped.invoke(QUERY, config=handler)
        seen: Any = wrapped.invoke(QUERY)[1]
        assert server.texts == [QUERY] * 2
        assert seen.explanation is not None
        sent(server)
        log.record(query=QUERY, hits=[seen.hit])
    assert sent(server) == 0
    first, looked_at = records(tmp_path)
    assert {hit.status for hit in first.logged_hits} == {"pending"}
    assert "explaining it would send texts to Remote, which a log alone never does" in first.logged_hits[0].reason
    assert first.hits[0].explanation is None
    assert looked_at.hits[0].explanation is not None


def test_explanations_that_are_asked_for_with_the_search_are_logged(server: EmbeddingServer, tmp_path: Path) -> None:
    wrapped = ExplainingRetriever(vectorstore=filled(Remote(server)), explain="eager", metadata_key="why")
    sent(server)
    documents = wrapped.invoke(QUERY)
    assert sent(server) == 1 + PROBES + WORDS + 1 + 1 + 3 * 3
    assert all("why" in document.metadata for document in documents)
    with ExplanationLog(tmp_path) as log:
        log.record(query=QUERY, hits=[document.hit for document in documents])  # type: ignore[attr-defined]
    assert all(hit.explanation is not None for record in records(tmp_path) for hit in record.hits)
    assert sent(server) == 0


@pytest.mark.parametrize("made", ["explainer", "factory", "address", "function"])
def test_a_log_sends_nothing_either_for_an_explainer_that_was_given(
    server: EmbeddingServer, tmp_path: Path, made: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", server.key or "")
    name = f"openai-compatible:{server.url}#tiny"
    given: dict[str, Any] = {"factory": lambda: Explainer(name), "address": name, "function": Client(server)}
    given["explainer"] = Explainer(name)
    wrapped = ExplainingRetriever(vectorstore=filled(Remote(server)), explainer=given[made])
    with ExplanationLog(tmp_path) as log:
        documents: Any = wrapped.invoke(QUERY)
        sent(server)
        log.record(query=QUERY, hits=[document.hit for document in documents])
    assert sent(server) == 0
    (record,) = records(tmp_path)
    assert record.hits[0].explanation is None
    assert "would send texts" in record.hits[0].reason or "max_calls is spent (0 texts)" in record.hits[0].reason
    assert explanation(wrapped.invoke(QUERY)[0]).score is not None
    assert sent(server) > 1


@pytest.mark.parametrize("explain", ["lazy", "eager"])
def test_a_service_that_fails_fails_no_search_and_is_asked_again_in_the_next_one(
    server: EmbeddingServer, explain: Any, caplog: pytest.LogCaptureFixture
) -> None:
    wrapped = ExplainingRetriever(vectorstore=filled(Remote(server)), explain=explain)
    server.faults[:] = ["", "500"]
    documents: Any = wrapped.invoke(QUERY)
    assert len(documents) == 3
    assert [document.explanation for document in documents] == [None] * 3
    assert all("Remote tiny failed (HTTPError" in document.hit.reason for document in documents)
    assert explanation(wrapped.invoke(QUERY)[0]).score is not None
    assert "documents are returned without explanations: Remote tiny failed" in caplog.text


def test_a_service_that_cannot_be_asked_any_more_is_not_asked_for_every_hit(
    server: EmbeddingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", server.key or "")
    explainer = Explainer(OpenAICompatible(server.url, "tiny", attempts=2, first_wait=0.01))
    documents: Any = ExplainingRetriever(vectorstore=filled(Remote(server)), explainer=explainer).invoke(QUERY)
    sent(server)
    server.faults[:] = ["500"] * 20
    documents[0].hit.highlights  # noqa: B018
    Hits(document.hit for document in documents).load()
    assert [document.hit.status for document in documents] == ["failed"] * 3
    assert len(server.calls) <= 4  # two attempts for each part that was looked at
    assert all("tiny at 127.0.0.1 is busy" in document.hit.reason for document in documents)


def test_asynchronous_searches_do_the_same(server: EmbeddingServer) -> None:
    store = filled(Remote(server))
    sent(server)
    lazy = asyncio.run(ExplainingRetriever(vectorstore=store).ainvoke(QUERY))
    assert server.texts == [QUERY]
    explanation(lazy[0])
    assert sent(server) == 1 + PROBES + ONE
    eager: Any = asyncio.run(ExplainingRetriever(retriever=store.as_retriever(), explain="eager").ainvoke(QUERY))
    assert [document.hit.status for document in eager] == ["ready"] * 3
    assert len({document.id for document in eager}) == 3


def test_a_faiss_index_of_such_embeddings_is_explained_too(server: EmbeddingServer, tmp_path: Path) -> None:
    retriever = FaissDocumentRetriever.from_documents(TEXTS, Remote(server), max_calls=40)
    sent(server)
    document = retriever.invoke(QUERY)[0]
    assert sent(server) == 1
    assert explanation(document).surrogate is None
    assert sent(server) == PROBES + ONE
    with pytest.raises(InvalidInput, match="how Remote embeds cannot be written down"):
        retriever.save(tmp_path / "index")


def test_vectors_that_are_not_of_length_one_are_explained_as_the_index_compares_them(server: EmbeddingServer) -> None:
    vectors = np.asarray(Client(server)(TEXTS), np.float32)
    assert abs(np.linalg.norm(vectors[0]) - 1) > 0.1
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    retriever = FaissDocumentRetriever(index=index, documents=TEXTS, embeddings=Remote(server))
    found = explanation(retriever.invoke(QUERY)[0])
    assert (found.measure, found.surrogate) == ("dot", None)


def test_a_cache_of_the_user_is_left_as_it_is(server: EmbeddingServer) -> None:
    kept = InMemoryByteStore()
    cached = CacheBackedEmbeddings.from_bytes_store(Remote(server), kept, key_encoder="blake2b")
    wrapped = ExplainingRetriever(vectorstore=filled(cached))
    before = set(kept.yield_keys())
    assert explanation(wrapped.invoke(QUERY)[0]).model == "Remote tiny"
    assert set(kept.yield_keys()) == before


def test_the_index_s_vectors_are_taken_after_one_was_compared_and_only_the_parts_are_paid_for(
    server: EmbeddingServer,
) -> None:
    store = filled(Remote(server))
    wrapped = ExplainingRetriever(vectorstore=store)
    documents: Any = wrapped.invoke(QUERY)
    sent(server)
    found = [explanation(document) for document in documents]
    wholes = [text for text in server.texts if text in TEXTS]
    assert wholes == [documents[0].page_content]
    local = Explainer(lambda texts: asked(texts, "document"))
    for document, one in zip(documents, found, strict=True):
        np.testing.assert_allclose(one.matrix, local.explain(QUERY, document.page_content).matrix, atol=2e-6)
        assert one.surrogate is None
    assert [TAKEN in codes(one) for one in found] == [False, True, True]
    fresh: Any = ExplainingRetriever(vectorstore=store).invoke("the cat")  # kept factors say so too
    assert [TAKEN in codes(explanation(one)) for one in fresh] == [one.page_content not in wholes for one in fresh]


def test_vectors_of_another_text_or_model_are_not_taken_and_that_is_said(server: EmbeddingServer) -> None:
    def header(store: Any, text: str) -> Any:
        return asked([f"Acme Corp Internal Handbook. {text}"], "document")[0].tolist()

    def other(store: Any, text: str) -> Any:
        return np.random.default_rng(len(text)).normal(size=16).tolist()

    for vector in (header, other):
        store = filled(Remote(server))
        for kept in store.store.values():
            kept["vector"] = vector(store, kept["text"])
        documents: Any = ExplainingRetriever(vectorstore=store).invoke(QUERY)
        sent(server)
        found = [explanation(document) for document in documents]
        assert {text for text in server.texts if text in TEXTS} == set(TEXTS)
        assert all("the index's vector of this document is not the one" in (one.surrogate or "") for one in found)
        assert not any(TAKEN in codes(one) for one in found)


def test_a_model_that_is_another_by_little_is_another_where_the_service_answers_alike(server: EmbeddingServer) -> None:
    near = Asked(tiny("bert"), shift=0.008)
    store = filled(Remote(server))
    for kept in store.store.values():
        kept["vector"] = near([kept["text"]], "document")[0].tolist()
    found = explanation(ExplainingRetriever(vectorstore=store).invoke(QUERY)[0])
    assert "the index's vector of this document is not the one" in (found.surrogate or "")


def test_a_service_whose_vectors_differ_each_time_is_no_other_model() -> None:
    noisy = Asked(tiny("bert"), noise=0.004)
    with EmbeddingServer(lambda texts: noisy(texts, "document")).running() as server:
        for kind in ("vectorstore", "retriever"):
            store: Any = filled(Remote(server))
            given = store if kind == "vectorstore" else store.as_retriever()
            documents: Any = ExplainingRetriever(**{kind: given}).invoke(QUERY)
            found = [explanation(document) for document in documents]
            assert [one.surrogate for one in found] == [None] * 3
            assert any("another vector each time" in notice.text for notice in found[0].notices)
    with EmbeddingServer(lambda texts: noisy(texts, "document")).running() as server:
        store = filled(Remote(server))
        for kept in store.store.values():
            kept["vector"] = asked(["Acme Corp Internal Handbook. " + kept["text"]], "document")[0].tolist()
        assert explanation(ExplainingRetriever(vectorstore=store).invoke(QUERY)[0]).surrogate is not None


def test_what_gives_no_meaning_to_a_difference_is_refused_when_it_is_looked_at() -> None:
    document: Any = ExplainingRetriever(vectorstore=filled(FakeEmbeddings(size=8))).invoke(QUERY)[0]
    assert document.explanation is None
    assert "FakeEmbeddings gives a text another vector each time" in document.hit.reason


def test_an_object_that_asks_another_model_since_the_search_says_so(server: EmbeddingServer) -> None:
    store = filled(Remote(server))
    document = ExplainingRetriever(vectorstore=store).invoke(QUERY)[0]
    store.embedding.model = "another"  # type: ignore[attr-defined]
    assert "Remote embeds otherwise than in the search" in (explanation(document).surrogate or "")


def test_an_index_of_another_model_is_noticed(server: EmbeddingServer) -> None:
    store = filled(Remote(server))
    vectors = np.random.default_rng(0).normal(size=(3, 16))
    for kept, vector in zip(store.store.values(), vectors, strict=True):
        kept["vector"] = vector.tolist()
    found = explanation(ExplainingRetriever(vectorstore=store).invoke(QUERY)[0])
    assert "the index's vector of this document is not the one that this encoder computes" in (found.surrogate or "")
