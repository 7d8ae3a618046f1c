"""Why not that one, what if and how sure, of stores that LangChain wraps."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langchain_rag_explain import ExplainingRetriever, get_explanation

from integrations.langchain.tests.conftest import LocalEmbeddings
from rag_explain.errors import InvalidInput
from rag_explain.explainer import Explainer
from rag_explain.results.calibration import Calibration
from rag_explain.results.why_not import WhyNot
from tests.support.models import CORPUS, tiny

QUERY = "why did the dog bark at the moon?"
TEXTS = [f"{text} {other}" for text in CORPUS for other in CORPUS]
NUMBERS = [f"{number:08d}-0000-0000-0000-000000000000" for number in range(len(TEXTS))]  # Qdrant's ids are UUIDs


@cache
def model() -> Any:
    return tiny("bert", dtype=torch.float32)


@cache
def order() -> list[str]:
    """All ids by exact search."""
    scores = Explainer(model()).scorer.score(QUERY, TEXTS)
    return [NUMBERS[at] for at in sorted(range(len(TEXTS)), key=lambda at: -scores[at])]


def documents() -> list[Document]:
    found = []
    for name, text in zip(NUMBERS, TEXTS, strict=True):
        book = "handbook" if name in (order()[0], order()[-1]) else name
        found.append(Document(text, id=name, metadata={"lang": "de" if name == order()[1] else "en", "source": book}))
    return found


def chroma() -> VectorStore:
    chromadb = pytest.importorskip("langchain_chroma")
    settings = {"hnsw": {"space": "cosine"}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Chroma's own
        store = chromadb.Chroma("questions", LocalEmbeddings(model()), collection_configuration=settings)
        store.reset_collection()
        store.add_documents(documents())
    return store  # type: ignore[no-any-return]


def qdrant() -> VectorStore:
    client = pytest.importorskip("qdrant_client")
    wrapper = pytest.importorskip("langchain_qdrant")
    handle = client.QdrantClient(":memory:")
    parameters = client.models.VectorParams(size=16, distance=client.models.Distance.COSINE)
    handle.create_collection("questions", vectors_config=parameters)
    store = wrapper.QdrantVectorStore(handle, "questions", LocalEmbeddings(model()))
    store.add_documents(documents())
    return store  # type: ignore[no-any-return]


def qdrant_filter() -> Any:
    models = pytest.importorskip("qdrant_client").models
    condition = models.FieldCondition(key="metadata.lang", match=models.MatchValue(value="en"))
    return models.Filter(must=[condition])


def in_memory() -> VectorStore:
    store = InMemoryVectorStore(LocalEmbeddings(model()))
    store.add_documents(documents())
    return store


STORES: list[tuple[Callable[[], VectorStore], Callable[[], Any]]] = [
    (chroma, lambda: {"lang": "en"}),
    (qdrant, qdrant_filter),
    (in_memory, lambda: lambda document: document.metadata["lang"] == "en"),
]
stores = pytest.mark.parametrize(("build", "condition"), STORES, ids=["chroma", "qdrant", "memory"])


def names(found: WhyNot) -> list[str]:
    return [rung.name for rung in found.rungs]


@stores
def test_every_rung_that_a_store_can_tell(build: Any, condition: Any) -> None:
    retriever = ExplainingRetriever(vectorstore=build(), k=3)
    assert names(retriever.why_not(QUERY, "nobody")) == ["missing"]
    chunks = retriever.why_not(QUERY, "handbook")
    assert names(chunks) == ["chunks"]
    assert f"{order()[0]} at rank 1" in chunks.reason.text
    cut = retriever.why_not(QUERY, order()[12])
    assert (cut.reason.name, cut.rank, cut.total) == ("cut", 13, 25)
    assert names(cut)[-1] == "words"
    assert cut.got == order()[2]
    first = retriever.why_not(QUERY, order()[0])
    assert first.reason.text == "it was returned, at rank 1"
    filtered = retriever.why_not(QUERY, order()[1], filter=condition())
    assert names(filtered) == ["filter"]
    assert retriever.why_not(QUERY, order()[8], filter=condition()).reason.name == "cut"


@stores
def test_a_rank_after_a_what_if_is_that_of_exact_search(build: Any, condition: Any) -> None:
    retriever = ExplainingRetriever(vectorstore=build(), k=3)
    found = retriever.what_if(QUERY, order()[5], without="dog")
    assert (found.rank, found.total) == (6, 25)
    change = next(one for one in found.changes if one.role == "query")
    text = TEXTS[NUMBERS.index(order()[5])]
    scores = Explainer(model()).scorer.score("why did the bark at the moon?", TEXTS)
    assert change.rank == 1 + sum(scores > scores[TEXTS.index(text)] + 1e-6)
    hit = retriever.invoke(QUERY)[0].hit
    own = hit.what_if()
    assert own.rank == 1
    assert [one.text for one in own.changes if one.role == "query"][:3] == ["why", "did", "the"]


@stores
def test_hits_say_where_they_stand_once_the_store_was_calibrated(build: Any, condition: Any, tmp_path: Path) -> None:
    retriever = ExplainingRetriever(vectorstore=build(), k=3)
    assert retriever.invoke(QUERY)[0].hit.standing is None
    found = retriever.calibrate()
    assert found.source == "sentences"
    hit = retriever.invoke(QUERY)[0].hit
    assert hit.standing == pytest.approx(found.standing(hit.explanation.score), abs=1e-3)
    found.save(tmp_path / "calibration.json")
    other = ExplainingRetriever(vectorstore=build(), k=3)
    other.calibration = Calibration.load(tmp_path / "calibration.json")
    assert other.invoke(QUERY)[0].hit.standing == pytest.approx(hit.standing, abs=1e-3)
    third = ExplainingRetriever(vectorstore=build(), explainer=Explainer(tiny("roberta", dtype=torch.float32)))
    with pytest.raises(InvalidInput, match="calibrate again"):
        third.calibration = found


def test_a_document_that_a_stores_own_threshold_cuts() -> None:
    store = qdrant()
    scored = store.similarity_search_with_relevance_scores(QUERY, k=25)
    limit = (scored[1][1] + scored[2][1]) / 2
    options = {"k": 10, "score_threshold": limit}
    retriever = store.as_retriever(search_type="similarity_score_threshold", search_kwargs=options)
    found = ExplainingRetriever(retriever=retriever).why_not(QUERY, str(scored[4][0].metadata["_id"]))
    assert names(found) == ["threshold"]
    assert f"{scored[4][1]:.4f}" in found.reason.text


def test_a_document_that_was_left_out_for_the_sake_of_diversity() -> None:
    retriever = in_memory().as_retriever(search_type="mmr", search_kwargs={"k": 3, "lambda_mult": 0.0, "fetch_k": 25})
    wrapped = ExplainingRetriever(retriever=retriever)
    returned = {document.id for document in wrapped.invoke(QUERY)}
    missed = next(name for name in order()[:3] if name not in returned)
    found = wrapped.why_not(QUERY, missed)
    assert found.reason.name == "stage"
    assert "diversity" in found.reason.text


def test_a_faiss_index_of_documents_is_asked_alike() -> None:
    faiss = pytest.importorskip("langchain_rag_explain.faiss")
    retriever = faiss.FaissDocumentRetriever.from_documents(documents(), LocalEmbeddings(model()), k=3)
    found = retriever.why_not(QUERY, order()[12])
    assert (found.reason.name, found.rank, found.total) == ("cut", 13, 25)
    assert retriever.what_if(QUERY, order()[5], without="dog").rank == 6
    calibration = retriever.calibrate()
    hit = retriever.invoke(QUERY)[0].hit
    assert hit.standing == pytest.approx(calibration.standing(hit.explanation.score), abs=1e-3)


def test_a_limit_is_refused_in_words_and_the_retriever_goes_on() -> None:
    retriever = ExplainingRetriever(retriever=in_memory().as_retriever())
    with pytest.raises(InvalidInput, match="reencode must be 0 or more"):
        retriever.why_not(QUERY, order()[0], reencode=-3)
    assert get_explanation(retriever.invoke(QUERY)[0]) is not None
