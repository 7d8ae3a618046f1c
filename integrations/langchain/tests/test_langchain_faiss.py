"""FaissDocumentRetriever over real FAISS indexes: what the index finds, as it was given, with the reasons."""

from __future__ import annotations

import asyncio
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import copy, deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
import torch
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import ConfigurableField
from langchain_rag_explain import EVENT, ExplainedDocument, ExplanationLogHandler, get_explanation
from langchain_rag_explain.faiss import FaissDocumentRetriever
from sentence_transformers import MultiVectorEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize

from integrations.langchain.tests.conftest import LocalEmbeddings
from integrations.langchain.tests.test_langchain_retrievers import Recorder, RemoteEmbeddings
from integrations.langchain.tests.test_langchain_truth import Shouting, embeddings_of, saved
from rag_explain import Explainer
from rag_explain.encoder.loading import packaged_path
from rag_explain.errors import FormatError, InvalidInput
from rag_explain.faiss import FaissRetriever
from rag_explain.log import ExplanationLog
from rag_explain.results.explanation import Explanation
from rag_explain.texts.passage import Passage
from tests.support.models import CORPUS, folder, tiny

QUERY = "why did the dog\nlook at the moon?"
TEXTS = [f"{text} ({number})" for number in range(8) for text in CORPUS]


@cache
def model() -> SentenceTransformer:
    return SentenceTransformer(saved(), device="cpu")


@cache
def hugging_face() -> Embeddings:
    """Documents without a prompt, queries with one."""
    return embeddings_of("huggingface", saved(), query_encode_kwargs={"prompt_name": "query"})


def documents(texts: list[str] = TEXTS) -> list[Document]:
    return [Document(text, id=f"id-{n}", metadata={"n": n, "deep": {"a": n}}) for n, text in enumerate(texts)]


def flat(embeddings: Embeddings, texts: list[str] = TEXTS, kind: type = faiss.IndexFlatIP) -> Any:
    vectors = np.array(embeddings.embed_documents(texts), np.float32)
    index = kind(vectors.shape[1])
    index.add(vectors)
    return index


def explanation_of(document: Document) -> Explanation:
    found = get_explanation(document)
    assert found is not None, document.hit.reason  # type: ignore[attr-defined]
    return found


def by_hand(index: Any, query: Any, k: int) -> tuple[list[float], list[int]]:
    scores, rows = index.search(np.array([query], np.float32), k)
    return scores[0].tolist(), rows[0].tolist()


INDEXES: dict[str, Callable[[int], Any]] = {
    "flat-ip": faiss.IndexFlatIP,
    "flat-l2": faiss.IndexFlatL2,
    "hnsw-l2": lambda width: faiss.IndexHNSWFlat(width, 8),
    "hnsw-ip": lambda width: faiss.IndexHNSWFlat(width, 8, faiss.METRIC_INNER_PRODUCT),
    "idmap-ip": lambda width: faiss.IndexIDMap(faiss.IndexFlatIP(width)),
    "idmap2-l2": lambda width: faiss.IndexIDMap2(faiss.IndexFlatL2(width)),
}
# What embeds, and what it embeds documents and a query with, by hand.
ENCODERS: dict[str, Callable[[], tuple[Any, Any, Any]]] = {
    "embeddings": lambda: (
        hugging_face(),
        hugging_face().embed_documents(TEXTS),
        hugging_face().embed_query(QUERY),
    ),
    "model": lambda: (model(), model().encode_document(TEXTS), model().encode_query(QUERY)),
    "explainer": lambda: (
        Explainer(model()),
        model().encode_document(TEXTS),
        Explainer(model()).scorer.embed([QUERY], "query")[0],
    ),
}


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("name", INDEXES)
def test_it_finds_what_a_search_by_hand_finds(name: str, encoder: str) -> None:
    embeddings, vectors, asked = ENCODERS[encoder]()
    index, rows = INDEXES[name](len(asked)), list(range(len(TEXTS)))
    if "idmap" in name:
        rows = [7 * row + 1000 for row in rows]
        index.add_with_ids(np.array(vectors), np.array(rows))
    else:
        index.add(np.array(vectors))
    given: Any = dict(zip(rows, documents(), strict=True)) if "idmap" in name else documents()
    scores, found = by_hand(index, asked, 5)
    expected = [documents()[rows.index(row)] for row in found]
    retriever = FaissDocumentRetriever(index=index, documents=given, embeddings=embeddings, k=5)
    for answer in (
        retriever.invoke(QUERY),
        retriever.invoke(QUERY, explain="eager"),
        retriever.invoke(QUERY, explain="off"),
        asyncio.run(retriever.ainvoke(QUERY)),
        asyncio.run(retriever.ainvoke(QUERY, explain="eager")),
        retriever.batch([QUERY, QUERY])[1],
    ):
        assert answer == expected
        assert [(one.id, one.metadata) for one in answer] == [(one.id, one.metadata) for one in expected]
        assert [one.hit.score for one in answer] == scores  # type: ignore[attr-defined]
    for document, score in zip(retriever.invoke(QUERY), scores, strict=True):
        assert isinstance(document, ExplainedDocument)
        explanation = explanation_of(document)
        assert (explanation.surrogate, explanation.notices) == (None, ())
        assert document.hit.metric == ("cosine" if "ip" in name else "squared L2")
        assert document.hit.similarity == pytest.approx(score if "ip" in name else 1 - score / 2, abs=1e-5)
        assert document.hit.gap == pytest.approx(0.0, abs=1e-5)
        assert (explanation.query, explanation.document) == (QUERY, document.page_content)


@pytest.mark.parametrize(
    ("package", "options"),
    [
        ("huggingface", {"encode_kwargs": {"prompt": "a "}, "query_encode_kwargs": {"prompt_name": "other"}}),
        ("huggingface", {"encode_kwargs": {"truncate_dim": 8, "normalize_embeddings": True}}),
        ("huggingface", {"model_kwargs": {"default_prompt_name": "other"}}),
        ("bge", {"query_instruction": "where: ", "embed_instruction": "the capital: "}),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of langchain-community, where the ones for BGE models are
def test_prompts_and_instructions_of_the_embeddings_are_followed(package: str, options: dict[str, Any]) -> None:
    embeddings = embeddings_of(package, saved(), **options)
    retriever = FaissDocumentRetriever.from_documents(documents(), embeddings, k=4, unit="token")
    unit = np.array([[*vector] for vector in embeddings.embed_documents(TEXTS)])
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    asked = np.array(embeddings.embed_query(QUERY))
    cosines = unit @ asked / np.linalg.norm(asked)
    found = retriever.invoke(QUERY)
    assert [one.metadata["n"] for one in found] == np.argsort(-cosines)[:4].tolist()
    for document in found:
        explanation = explanation_of(document)
        assert explanation.surrogate is None
        assert explanation.score == pytest.approx(cosines[document.metadata["n"]], abs=1e-5)
        has_prompt = "truncate_dim" not in str(options)
        assert ("prompt" in {token.part for token in explanation.query_tokens}) == has_prompt


def test_from_documents_searches_by_what_the_model_was_made_for() -> None:
    for encoder, build in ENCODERS.items():
        found = FaissDocumentRetriever.from_documents(documents(), build()[0]).invoke(QUERY)
        assert len(found) == 4
        for document in found:
            assert explanation_of(document).surrogate is None, encoder
    by_dot = tiny("roberta", dtype=torch.float32, similarity_fn_name="dot")
    for given in (by_dot, LocalEmbeddings(by_dot), Explainer(by_dot)):
        retriever = FaissDocumentRetriever.from_documents((text for text in TEXTS), given)
        assert not retriever.normalize
        products = by_dot.encode_document(TEXTS) @ by_dot.encode_query(QUERY)
        for document in retriever.invoke(QUERY):
            explanation = explanation_of(document)
            assert (explanation.measure, explanation.surrogate) == ("dot", None)
            assert document.hit.score == pytest.approx(products[TEXTS.index(document.page_content)], rel=1e-5)  # type: ignore[attr-defined]
            assert document.hit.gap == pytest.approx(0.0, abs=1e-4)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [faiss.IndexFlatIP, faiss.IndexFlatL2])
def test_vectors_that_are_not_normalised_are_searched_as_they_are_and_it_is_said(kind: type) -> None:
    embeddings = LocalEmbeddings(tiny("roberta", dtype=torch.float32))
    index = flat(embeddings, kind=kind)
    scores, rows = by_hand(index, embeddings.embed_query(QUERY), 4)
    found = FaissDocumentRetriever(index=index, documents=documents(), embeddings=embeddings).invoke(QUERY)
    assert [(one.metadata["n"], one.hit.score) for one in found] == list(zip(rows, scores, strict=True))  # type: ignore[attr-defined]
    for document in found:
        assert "not normalised by " in (explanation_of(document).surrogate or "")
    scaled = np.array(embeddings.embed_documents(TEXTS), np.float32)
    faiss.normalize_L2(scaled)
    index = kind(scaled.shape[1])
    index.add(scaled)
    for document in FaissDocumentRetriever(
        index=index, documents=documents(), embeddings=embeddings, normalize=True
    ).invoke(QUERY):
        assert explanation_of(document).surrogate is None
        assert document.hit.gap == pytest.approx(0.0, abs=1e-5)  # type: ignore[attr-defined]


def test_documents_without_ids_duplicates_and_plain_texts() -> None:
    same = Document(TEXTS[0], metadata={"n": 0})
    given: list[Document | str] = [same, Document(TEXTS[0], id="twice"), Document(TEXTS[0], id="twice"), same, TEXTS[0]]
    for texts in (given, dict(enumerate(given))):
        index = flat(hugging_face(), [TEXTS[0]] * 5)
        found = FaissDocumentRetriever(index=index, documents=texts, embeddings=hugging_face(), k=5).invoke(QUERY)
        assert len(found) == 5
        rows = by_hand(index, hugging_face().embed_query(QUERY), 5)[1]
        assert [one.id for one in found] == [[None, "twice", "twice", None, None][row] for row in rows]
        assert [one.hit.id for one in found] == [["0", "twice", "twice", "3", "4"][row] for row in rows]  # type: ignore[attr-defined]
        assert all(explanation_of(one).score == pytest.approx(found[0].hit.score, abs=1e-6) for one in found)  # type: ignore[attr-defined]
    many = faiss.IndexIDMap(faiss.IndexFlatIP(16))  # one id for two vectors
    many.add_with_ids(np.array(hugging_face().embed_documents(TEXTS[:2]), np.float32), np.array([7, 7]))
    found = FaissDocumentRetriever(index=many, documents={7: TEXTS[0]}, embeddings=hugging_face()).invoke(QUERY)
    assert [one.page_content for one in found] == [TEXTS[0]] * 2


def test_how_many_is_said_in_the_constructor_or_for_one_call() -> None:
    few = documents()[:3]
    retriever = FaissDocumentRetriever.from_documents(few, hugging_face(), k=2)
    assert [len(retriever.invoke(QUERY)), len(retriever.invoke(QUERY, k=1)), len(retriever.invoke(QUERY, k=9))] == [
        2,
        1,
        3,
    ]
    assert len(asyncio.run(retriever.ainvoke(QUERY, k=3))) == 3
    retriever.k = 3
    assert len(retriever.invoke(QUERY)) == 3
    for wrong in (0, -1):
        with pytest.raises(InvalidInput, match=f"k must be at least 1, not {wrong}"):
            retriever.invoke(QUERY, k=wrong)
    empty = FaissDocumentRetriever(index=faiss.IndexFlatIP(16), documents=[], embeddings=hugging_face())
    assert empty.invoke(QUERY) == asyncio.run(empty.ainvoke(QUERY, explain="eager")) == []


def test_what_is_added_to_index_and_documents_is_found() -> None:
    retriever = FaissDocumentRetriever.from_documents(TEXTS[:1], hugging_face())
    assert len(retriever.invoke(QUERY)) == 1
    retriever.index.add(np.array(hugging_face().embed_documents([QUERY]), np.float32))
    retriever.documents.append(Document(QUERY, id="new"))
    assert {one.id for one in retriever.invoke(QUERY)} == {None, "new"}
    assert all(explanation_of(one).surrogate is None for one in retriever.invoke(QUERY))


def test_a_row_without_a_document_is_left_out_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    index = flat(hugging_face(), TEXTS[:4])
    retriever = FaissDocumentRetriever(index=index, documents={0: TEXTS[0], 2: TEXTS[2]}, embeddings=hugging_face())
    rows = by_hand(index, hugging_face().embed_query(QUERY), 4)[1]
    found = retriever.invoke(QUERY)
    assert [one.page_content for one in found] == [TEXTS[row] for row in rows if row in (0, 2)]
    assert [one.hit.rank for one in found] == [rank for rank, row in enumerate(rows, 1) if row in (0, 2)]  # type: ignore[attr-defined]
    assert "2 of the rows that were found have no document" in caplog.text
    negative = faiss.IndexIDMap(faiss.IndexFlatIP(16))  # Python would count from the end of a list
    negative.add_with_ids(np.array(hugging_face().embed_documents(TEXTS[:2]), np.float32), np.array([0, -2]))
    found = FaissDocumentRetriever(index=negative, documents=TEXTS[:2], embeddings=hugging_face()).invoke(QUERY)
    assert [one.page_content for one in found] == [TEXTS[0]]


HOSTILE = [
    "",
    " \n\t ",
    "[SEP] [CLS] </s> <s> <mask>",
    "\x00\x07 \u202e moon \ufeff",
    "<script>alert('moon')</script> {{ moon }} {moon}",
    "🌙" * 50,
    "the moon " * 4000,
    "e\u0301" * 30 + "ﬃ",
]


def test_hostile_texts_are_found_as_they_are() -> None:
    retriever = FaissDocumentRetriever.from_documents(documents(HOSTILE), hugging_face(), k=len(HOSTILE))
    for query in HOSTILE:
        scores, rows = by_hand(retriever.index, hugging_face().embed_query(query), len(HOSTILE))
        found = retriever.invoke(query, explain="eager")
        assert [(one.metadata["n"], one.page_content) for one in found] == [(row, HOSTILE[row]) for row in rows]
        assert [one.hit.score for one in found] == pytest.approx(scores, abs=1e-6)  # type: ignore[attr-defined]
        assert {one.hit.status for one in found} == {"ready"}  # type: ignore[attr-defined]
        assert all(one.hit.gap == pytest.approx(0.0, abs=1e-5) for one in found)  # type: ignore[attr-defined]
    unreadable = FaissDocumentRetriever(
        index=flat(hugging_face(), TEXTS[:2]), documents=["half \ud800", TEXTS[1]], embeddings=hugging_face()
    )
    for document in unreadable.invoke(QUERY, explain="eager"):  # no tokenizer takes one half of a pair
        is_readable = document.page_content == TEXTS[1]
        assert document.hit.status == ("ready" if is_readable else "failed")  # type: ignore[attr-defined]


def test_the_documents_given_are_never_touched() -> None:
    kept = documents()
    before = [one.model_dump_json() for one in kept]
    retriever = FaissDocumentRetriever.from_documents(kept, hugging_face(), explain="eager", metadata_key="why")
    found = retriever.invoke(QUERY)
    assert all(explanation_of(Document(**one.model_dump())).query == QUERY for one in found)
    found[0].metadata["mine"] = True
    found[0].page_content = "changed"
    assert [one.model_dump_json() for one in kept] == before
    assert all(type(one) is Document for one in kept)
    plain = [kept[one.metadata["n"]] for one in retriever.invoke(QUERY)]
    lazy = FaissDocumentRetriever.from_documents(kept, hugging_face()).invoke(QUERY)
    prompt = ChatPromptTemplate.from_template("{documents}")
    assert prompt.invoke({"documents": lazy}).to_string() == prompt.invoke({"documents": plain}).to_string()


def test_per_call_and_configurable_modes() -> None:
    retriever = FaissDocumentRetriever.from_documents(documents(), hugging_face(), k=3)

    def statuses(found: list[Document]) -> list[str]:
        return [one.hit.status for one in found]  # type: ignore[attr-defined]

    assert statuses(retriever.invoke(QUERY)) == ["pending"] * 3
    assert statuses(retriever.invoke(QUERY, top=1)) == ["pending", "skipped", "skipped"]
    assert statuses(retriever.invoke(QUERY, explain="off")) == ["skipped"] * 3
    assert statuses(asyncio.run(retriever.ainvoke(QUERY, explain="eager", top=2))) == ["ready", "ready", "skipped"]
    switch = retriever.configurable_fields(explain=ConfigurableField(id="explain"), k=ConfigurableField(id="k"))
    assert statuses(switch.invoke(QUERY, {"configurable": {"explain": "eager", "k": 2}})) == ["ready"] * 2
    late = FaissDocumentRetriever.from_documents(documents(), hugging_face(), k=2, explain="eager", time_limit=0.0)
    assert statuses(late.invoke(QUERY)) == ["skipped"] * 2
    retriever.explain = "eager"  # what is set later counts too
    assert statuses(retriever.invoke(QUERY)) == ["ready"] * 3
    assert {explanation_of(one).unit for one in retriever.invoke(QUERY)} == {"sentence"}
    retriever.unit = "token"
    assert {explanation_of(one).unit for one in retriever.invoke(QUERY)} == {"token"}
    with pytest.raises(InvalidInput, match="explain must be 'lazy', 'eager' or 'off', not 'later'"):
        retriever.invoke(QUERY, explain="later")


def test_embeddings_and_index_that_are_exchanged_or_changed_count_from_then_on() -> None:
    embeddings: Any = embeddings_of("huggingface", saved())
    retriever = FaissDocumentRetriever.from_documents(documents(), embeddings, unit="token")
    plain = retriever.invoke(QUERY)
    embeddings.query_encode_kwargs["prompt_name"] = "query"
    asked = embeddings.embed_query(QUERY)
    expected = by_hand(retriever.index, asked, 4)[0]
    assert [one.hit.score for one in retriever.invoke(QUERY)] == pytest.approx(expected, abs=1e-6)  # type: ignore[attr-defined]
    for document in retriever.invoke(QUERY):
        explanation = explanation_of(document)
        assert explanation.surrogate is None
        assert "prompt" in {token.part for token in explanation.query_tokens}
    for document in plain:  # found before
        assert explanation_of(document).surrogate is None
        assert "prompt" not in {token.part for token in explanation_of(document).query_tokens}
    other = LocalEmbeddings(tiny(dtype=torch.float32, after=lambda: [Normalize()]))
    retriever.index, retriever.documents, retriever.embeddings = flat(other, CORPUS), list(CORPUS), other
    found = retriever.invoke(QUERY)
    assert [one.page_content for one in found] == [
        CORPUS[row] for row in by_hand(retriever.index, other.embed_query(QUERY), 4)[1]
    ]
    assert {explanation_of(one).surrogate for one in found} == {None}


def test_an_index_of_other_vectors_is_marked_in_every_document() -> None:
    header = flat(hugging_face(), [f"the old bridge: {text}" for text in TEXTS])
    noise = faiss.IndexFlatIP(16)
    vectors = np.random.default_rng(0).normal(size=(len(TEXTS), 16)).astype(np.float32)
    faiss.normalize_L2(vectors)
    noise.add(vectors)
    for index in (header, noise):
        retriever = FaissDocumentRetriever(index=index, documents=documents(), embeddings=hugging_face(), k=20)
        found = retriever.invoke(QUERY)
        assert len(found) == 20
        message = "the index's vector of this document is not the one that this encoder computes"
        assert all(message in (explanation_of(one).surrogate or "") for one in found)


def test_embeddings_that_do_something_of_their_own_are_searched_with_and_marked() -> None:
    shouting = Shouting(model())
    retriever = FaissDocumentRetriever.from_documents(documents(), shouting)
    scores, rows = by_hand(retriever.index, shouting.embed_query(QUERY), 4)
    found = retriever.invoke(QUERY)
    assert [one.metadata["n"] for one in found] == rows
    assert [one.hit.score for one in found] == pytest.approx(scores, abs=1e-6)  # type: ignore[attr-defined]
    assert all("Shouting gives the query another vector" in (explanation_of(one).surrogate or "") for one in found)


def test_embeddings_elsewhere_search_and_another_encoder_explains_as_a_stand_in(tmp_path: Path) -> None:
    remote = RemoteEmbeddings()
    index = flat(remote)
    given: dict[str, Any] = {"index": index, "documents": documents(), "embeddings": remote}
    explainer = Explainer(model())
    retriever = FaissDocumentRetriever(**given, explainer=explainer)
    found = retriever.invoke(QUERY)
    assert [one.metadata["n"] for one in found] == by_hand(index, remote.embed_query(QUERY), 4)[1]
    assert all("built with another model" in (explanation_of(one).surrogate or "") for one in found)
    with pytest.raises(InvalidInput, match="how RemoteEmbeddings embeds cannot be written down"):
        retriever.save(tmp_path / "index")
    assert len(FaissDocumentRetriever.from_documents(TEXTS, remote, explainer=explainer).invoke(QUERY)) == 4


def test_a_model_that_cannot_be_explained_searches_all_the_same() -> None:
    hooked = tiny("roberta", after=lambda: [Normalize()], dtype=torch.float32)
    handle = hooked[0].register_forward_hook(
        lambda module, given, output: {**output, "token_embeddings": output["token_embeddings"].roll(1, -1)}
    )
    for embeddings in (hooked, LocalEmbeddings(hooked)):
        retriever = FaissDocumentRetriever.from_documents(documents(), embeddings)
        scores, rows = by_hand(retriever.index, hooked.encode_query(QUERY), 4)
        for found in (retriever.invoke(QUERY), asyncio.run(retriever.ainvoke(QUERY, explain="eager"))):
            assert [one.metadata["n"] for one in found] == rows
            assert [one.hit.score for one in found] == pytest.approx(scores, abs=1e-6)  # type: ignore[attr-defined]
            assert [get_explanation(one) for one in found] == [None] * 4
            assert all(one.hit.status == "failed" and one.hit.reason for one in found)  # type: ignore[attr-defined]
    handle.remove()
    assert explanation_of(retriever.invoke(QUERY)[0]).query == QUERY


def test_threads_and_async_calls_agree_with_one_by_one() -> None:
    retriever = FaissDocumentRetriever.from_documents(documents(), hugging_face(), k=3, explain="eager")
    queries = [f"where is the {word}?" for word in ("cat", "dog", "moon", "bridge")]
    alone = {query: retriever.invoke(query) for query in queries}
    with ThreadPoolExecutor(16) as pool:
        threaded = list(pool.map(retriever.invoke, queries * 4))

    async def many() -> list[list[Document]]:
        return await asyncio.gather(*(retriever.ainvoke(query) for query in queries * 4))

    for answers in (threaded, asyncio.run(many())):
        for query, found in zip(queries * 4, answers, strict=True):
            assert found == alone[query]
            assert [one.hit.score for one in found] == [one.hit.score for one in alone[query]]  # type: ignore[attr-defined]
            for one, other in zip(found, alone[query], strict=True):
                np.testing.assert_allclose(explanation_of(one).matrix, explanation_of(other).matrix, atol=1e-6)


def test_the_event_loop_goes_on_while_it_computes() -> None:
    class Waiting(LocalEmbeddings):
        """Answers once the event loop has gone on: on the loop itself that would be never."""

        went_on: Any = None

        def embed_query(self, text: str) -> list[float]:
            if self.went_on is not None:
                assert asyncio.run_coroutine_threadsafe(self.beat(), self.went_on).result(60) == "on"
            return super().embed_query(text)

        async def beat(self) -> str:
            return "on"

    embeddings = Waiting(model())
    retriever = FaissDocumentRetriever.from_documents(documents(), embeddings, k=2)

    async def ask() -> list[Document]:
        embeddings.went_on = asyncio.get_running_loop()
        return await retriever.ainvoke(QUERY)

    assert len(asyncio.run(ask())) == 2


def test_traces_and_events_are_those_of_a_retriever_that_explains() -> None:
    retriever = FaissDocumentRetriever.from_documents(documents(), hugging_face(), k=2)
    recorder = Recorder()
    retriever.invoke(QUERY, {"callbacks": [recorder]}, explain="eager")
    asyncio.run(retriever.ainvoke(QUERY, {"callbacks": [recorder]}))
    assert [name for name, *_ in recorder.starts] == ["FaissDocumentRetriever"] * 2
    assert (
        recorder.metadata[0].items()
        >= {
            "ls_retriever_name": "rag_explain",
            "ls_vector_store_provider": "FAISS",
            "ls_embedding_provider": "HuggingFaceEmbeddings",
        }.items()
    )
    (name, eager), (_, lazy) = recorder.events
    assert name == EVENT
    assert Explanation.from_dict(eager["hits"][0]["explanation"]).query == QUERY
    assert lazy["hits"][0]["explanation"] is None
    assert TEXTS[0] not in repr(retriever)  # a trace shows it


def test_the_log_has_its_hits(log: ExplanationLog) -> None:
    retriever = FaissDocumentRetriever.from_documents(documents(), hugging_face(), k=2)
    found = retriever.invoke(QUERY, {"callbacks": [ExplanationLogHandler(log)]})
    (record,) = log.records()
    assert [(hit.id, hit.score) for hit in record.hits] == [(one.id, one.hit.score) for one in found]  # type: ignore[attr-defined]
    assert record.explained == 2


def test_factors_of_all_documents_are_kept_beforehand() -> None:
    own = tiny("roberta", after=lambda: [Normalize()], dtype=torch.float32)
    retriever = FaissDocumentRetriever.from_documents(documents(CORPUS), LocalEmbeddings(own), explain="eager")
    assert retriever.precompute(progress=False).built == len(CORPUS)
    assert {explanation_of(one).provenance["path"] for one in retriever.invoke(QUERY)} == {"memory"}
    with Explainer(own) as explainer:
        kept = FaissDocumentRetriever.from_documents(documents(CORPUS), explainer, explain="eager")
        assert kept.precompute(progress=False).built == len(CORPUS)
        explainer.store.forget(["id-0"])
        paths = {one.id: explanation_of(one).provenance["path"] for one in kept.invoke(QUERY, k=5)}
        assert [path == "memory" for _, path in sorted(paths.items())] == [False, True, True, True, True]


@pytest.mark.parametrize("encoder", ENCODERS)
def test_saved_and_loaded_it_finds_the_same_and_holds_no_pickle(encoder: str, tmp_path: Path) -> None:
    embeddings = ENCODERS[encoder]()[0]
    given = [*documents(), Document("without an id"), "a plain text"]
    retriever = FaissDocumentRetriever.from_documents(given, embeddings, k=len(given))
    retriever.save(tmp_path / "index")
    loaded = FaissDocumentRetriever.load(tmp_path / "index", embeddings, k=len(given))
    one, other = retriever.invoke(QUERY), loaded.invoke(QUERY)
    assert one == other
    assert [document.hit.score for document in one] == [document.hit.score for document in other]  # type: ignore[attr-defined]
    assert explanation_of(other[0]).surrogate is None
    names = {"documents.jsonl", "index.faiss", "manifest.json"}
    assert {path.name for path in (tmp_path / "index").iterdir()} == names
    with pytest.raises(InvalidInput, match="differ from those of"):
        FaissDocumentRetriever.load(tmp_path / "index", tiny("bert"))
    (tmp_path / "index" / "manifest.json").write_text("{}")
    with pytest.raises(FormatError):
        FaissDocumentRetriever.load(tmp_path / "index", embeddings)


def test_a_saved_index_is_refused_for_what_embeds_otherwise(tmp_path: Path) -> None:
    FaissDocumentRetriever.from_documents(documents(), hugging_face()).save(tmp_path / "index")
    message = "weights, settings or embeddings differ from those of "
    for other in (embeddings_of("huggingface", saved()), Shouting(model()), model()):
        with pytest.raises(InvalidInput, match=message + type(other).__name__):
            FaissDocumentRetriever.load(tmp_path / "index", other)
    with pytest.raises(InvalidInput, match="how Shouting embeds cannot be written down"):
        FaissDocumentRetriever.from_documents(TEXTS, Shouting(model())).save(tmp_path / "other")
    with pytest.raises(InvalidInput, match="RemoteEmbeddings holds no SentenceTransformer"):
        FaissDocumentRetriever.load(tmp_path / "index", RemoteEmbeddings())


def test_an_index_of_rag_explain_is_loaded_with_an_explainer(tmp_path: Path) -> None:
    explainer = Explainer(model())
    names = [f"file:{n}" for n in range(len(TEXTS))]
    made = FaissRetriever.from_texts(TEXTS, explainer, ids=names, metadata=[{"source": "file"}] * len(TEXTS))
    made.save(tmp_path / "index")
    found = FaissDocumentRetriever.load(tmp_path / "index", explainer, k=10).invoke(QUERY)
    assert [(one.id, one.metadata) for one in found] == [(hit.id, hit.metadata) for hit in made.search(QUERY)]
    FaissRetriever.from_texts([Passage("a header: the moon", 10)], Explainer(model())).save(tmp_path / "passages")
    with pytest.raises(InvalidInput, match="holds passages of texts: search it with FaissRetriever"):
        FaissDocumentRetriever.load(tmp_path / "passages", Explainer(model()))


def test_what_is_refused_is_not_hidden_behind_an_error_of_pydantic() -> None:
    index, given = flat(hugging_face()), documents()
    for message, fields in {
        "Embeddings, a SentenceTransformer or an Explainer, not str": {"embeddings": "all-MiniLM-L6-v2"},
        "or an Explainer, not MultiVectorEncoder": {"embeddings": MultiVectorEncoder(str(folder("bert")))},
        "or an Explainer, not NoneType": {"embeddings": None},
        "an Explainer as embeddings explains too": dict.fromkeys(("embeddings", "explainer"), Explainer(model())),
        "explainer must be Explainer(model), not SentenceTransformer": {"explainer": model()},
        "index must be a FAISS index": {"index": faiss.IndexBinaryFlat(8)},
        "documents must be a list of Documents": {"documents": "one text"},
        "40 vectors and only 39 documents": {"documents": given[:-1]},
        "explain must be": {"explain": "soon"},
        "top must be": {"top": -1},
        "time_limit must be": {"time_limit": -1.0},
        "k must be a whole number, not 'many'": {"k": "many"},
        "FaissDocumentRetriever has no field 'normalise': use index, documents, embeddings": {"normalise": True},
    }.items():
        with pytest.raises(InvalidInput) as refused:
            FaissDocumentRetriever(**{"index": index, "documents": given, "embeddings": hugging_face(), **fields})
        assert type(refused.value) is InvalidInput
        assert message in str(refused.value)
    with pytest.raises(InvalidInput, match="embeddings must be LangChain Embeddings, a SentenceTransformer or an"):
        FaissDocumentRetriever(index=index, documents=given)
    wide = FaissDocumentRetriever(index=faiss.IndexFlatIP(8), documents=[], embeddings=hugging_face())
    with pytest.raises(InvalidInput, match="the index has 8 dimensions and HuggingFaceEmbeddings gives 16"):
        wide.invoke(QUERY)
    for wrong, message in (([], "at least one document"), ("one text", "a list of Documents"), ([1], "not int")):
        with pytest.raises(InvalidInput, match=message):
            FaissDocumentRetriever.from_documents(wrong, hugging_face())  # type: ignore[arg-type]  # the mistake


def test_copies_search_what_is_theirs_and_a_pickle_is_refused() -> None:
    retriever = FaissDocumentRetriever.from_documents(documents(), LocalEmbeddings(model()), k=2)
    for other in (copy(retriever), deepcopy(retriever), retriever.model_copy(update={"k": 1})):
        assert other.invoke(QUERY)[0] == retriever.invoke(QUERY)[0]
        assert explanation_of(other.invoke(QUERY)[0]).surrogate is None
    with pytest.raises(InvalidInput, match=r"FaissDocumentRetriever cannot be pickled: use save\(folder\)"):
        pickle.dumps(retriever)
    other = deepcopy(retriever)
    other.index.add(np.array([other.embeddings.embed_query(QUERY)], np.float32))
    other.documents.append("new")
    assert other.invoke(QUERY)[0].page_content == "new"
    assert len(retriever.invoke(QUERY, k=1000)) == len(TEXTS)


def test_neither_faiss_nor_langchain_community_is_loaded_before_it_is_asked_for() -> None:
    for module, absent in (
        ("langchain_rag_explain", {"faiss", "langchain_community", "torch"}),
        ("langchain_rag_explain.faiss", {"langchain_community", "langchain_classic"}),
    ):
        code = f"import sys, {module}; print(' '.join(sys.modules))"
        done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
        assert not absent & {name.split(".")[0] for name in done.stdout.split()}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of langchain-community
@pytest.mark.parametrize("strategy", ["EUCLIDEAN_DISTANCE", "MAX_INNER_PRODUCT"])
def test_the_index_and_documents_of_an_archived_store_move_as_they_are(strategy: str) -> None:
    stores = pytest.importorskip("langchain_community.vectorstores")
    store = stores.FAISS.from_documents(documents(), hugging_face(), distance_strategy=strategy)
    names = store.index_to_docstore_id
    given = {row: store.docstore.search(name) for row, name in names.items()}
    retriever = FaissDocumentRetriever(index=store.index, documents=given, embeddings=store.embeddings)
    expected = store.similarity_search_with_score(QUERY, k=4)
    found = retriever.invoke(QUERY)
    assert found == [document for document, _ in expected]
    assert [one.hit.score for one in found] == [float(score) for _, score in expected]  # type: ignore[attr-defined]
    assert {explanation_of(one).surrogate for one in found} == {None}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of langchain-community
def test_the_code_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", readme.partition("## A FAISS index")[2].partition("\n## ")[0], re.DOTALL)
    names: dict[str, Any] = {}
    exec(code[0].replace("sentence-transformers/all-MiniLM-L6-v2", str(packaged_path())), names)
    found = names["retriever"].invoke("the capital", k=2)  # the loaded one
    assert [one.id for one in found] == ["berlin", "bees"]
    printed = capsys.readouterr().out
    assert "Honeybees" in printed
    assert "bees 0.67" in printed
    stores = pytest.importorskip("langchain_community.vectorstores")
    names["store"] = stores.FAISS.from_documents(names["documents"], names["embeddings"])
    exec(code[1], names)
    assert names["retriever"].invoke("the capital") == names["store"].similarity_search("the capital")


@pytest.mark.slow
def test_on_real_weights_with_hugging_face_embeddings() -> None:
    embeddings = embeddings_of("huggingface", str(packaged_path()), query_encode_kwargs={"prompt": "question: "})
    retriever = FaissDocumentRetriever.from_documents(documents(), embeddings, unit="word")
    scores, rows = by_hand(retriever.index, embeddings.embed_query(QUERY), 4)
    found = retriever.invoke(QUERY, explain="eager")
    assert [one.metadata["n"] for one in found] == rows
    assert [one.hit.score for one in found] == pytest.approx(scores, abs=1e-6)  # type: ignore[attr-defined]
    for document in found:
        assert explanation_of(document).surrogate is None
        assert document.hit.gap == pytest.approx(0.0, abs=1e-5)  # type: ignore[attr-defined]
