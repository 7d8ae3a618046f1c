"""ExplainingRetriever around real LangChain retrievers and stores: same documents, same prompts, with reasons."""

from __future__ import annotations

import asyncio
import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from copy import copy as shallow_copy
from copy import deepcopy
from functools import cache, wraps
from typing import Any

import numpy as np
import pytest
import torch
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import FakeListLLM
from langchain_core.load import dumpd, dumps, loads
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import ConfigurableField, RunnableLambda, RunnablePassthrough
from langchain_core.tools import create_retriever_tool
from langchain_core.tracers.context import collect_runs
from langchain_core.tracers.schemas import Run
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langchain_rag_explain import EVENT, ExplainedDocument, ExplainingRetriever, get_explanation
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize

from integrations.langchain.tests.conftest import LocalEmbeddings
from rag_explain import Explainer
from rag_explain.cli.demo import corpus
from rag_explain.encoder.loading import packaged_path
from rag_explain.errors import InvalidInput
from rag_explain.results.explanation import Explanation
from tests.support.models import CORPUS, tiny

QUERY = "why did the dog look at the moon?"
TEXTS = [f"{text} ({number})" for number in range(4) for text in CORPUS]


class RemoteEmbeddings(Embeddings):
    """Some API, whose model is not here."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [self.embed_query(text) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        return np.random.default_rng(len(text)).normal(size=16).tolist()  # type: ignore[no-any-return]


class Static(BaseRetriever):
    """Returns what it was given; no `k`, no scores, no store."""

    documents: list[Document]

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return self.documents


class Recorder(BaseCallbackHandler):
    """Writes down which runs there were, and under which parent."""

    def __init__(self) -> None:
        self.starts: list[tuple[str | None, Any, Any]] = []
        self.metadata: list[dict[str, Any]] = []
        self.events: list[tuple[str, Any]] = []

    def on_retriever_start(self, serialized: Any, query: str, **kwargs: Any) -> None:
        self.starts.append((kwargs.get("name"), kwargs["run_id"], kwargs["parent_run_id"]))
        self.metadata.append(kwargs.get("metadata") or {})

    def on_custom_event(self, name: str, data: Any, **kwargs: Any) -> None:
        self.events.append((name, data))


class Broken(Explainer):
    """An Explainer that fails."""

    def __init__(self) -> None:
        super().__init__(model())

    def explain_many(self, query: str, documents: Any, *, unit: Any = None, ids: Any = None) -> list[Explanation]:
        raise MemoryError("out of memory")


@cache
def model() -> SentenceTransformer:
    return tiny(after=lambda: [Normalize()], dtype=torch.float32)


def store() -> InMemoryVectorStore:
    made = InMemoryVectorStore(LocalEmbeddings(model()))
    made.add_texts(TEXTS, metadatas=[{"n": n} for n in range(len(TEXTS))], ids=[f"id-{n}" for n in range(len(TEXTS))])
    return made


def plain(documents: list[Document]) -> list[tuple[Any, ...]]:
    return [(one.id, one.page_content, one.metadata, str(one), repr(one), dumps(one)) for one in documents]


def test_the_same_documents_for_every_way_to_ask() -> None:
    base = store().as_retriever(search_kwargs={"k": 5})
    wrapped = ExplainingRetriever(retriever=base)
    expected = base.invoke(QUERY)
    assert len(expected) == 5
    for documents in (
        wrapped.invoke(QUERY),
        wrapped.invoke(QUERY, explain="off"),
        wrapped.invoke(QUERY, explain="eager"),
        asyncio.run(wrapped.ainvoke(QUERY)),
        asyncio.run(wrapped.ainvoke(QUERY, explain="eager")),
        wrapped.batch([QUERY, QUERY])[1],
        asyncio.run(wrapped.abatch([QUERY, QUERY]))[1],
        next(iter(wrapped.stream(QUERY))),
    ):
        assert documents == expected
        assert expected == documents
        assert plain(documents) == plain(expected)


def test_explanations_are_lazy_and_right() -> None:
    documents = ExplainingRetriever(retriever=store().as_retriever()).invoke(QUERY)
    assert all(isinstance(one, ExplainedDocument) and one.hit.status == "pending" for one in documents)
    explanation = get_explanation(documents[0])
    assert explanation is not None
    assert explanation is get_explanation(documents[0])
    assert explanation.document == documents[0].page_content
    vectors = model().encode([QUERY, documents[0].page_content])
    assert explanation.score == pytest.approx(float(vectors[0] @ vectors[1]), abs=1e-5)
    assert explanation.gap == pytest.approx(0.0, abs=1e-4)
    assert explanation.surrogate is None


def test_a_vector_store_keeps_its_scores() -> None:
    mine = store()
    wrapped = ExplainingRetriever(vectorstore=mine, k=3)
    expected = mine.similarity_search_with_score(QUERY, k=3)
    for documents in (wrapped.invoke(QUERY), asyncio.run(wrapped.ainvoke(QUERY))):
        assert documents == [document for document, _ in expected]
        for document, (_, score) in zip(documents, expected, strict=True):
            assert isinstance(document, ExplainedDocument)
            assert (document.hit.score, document.hit.metric) == (score, "cosine")
            assert document.explanation is not None
            assert document.hit.gap == pytest.approx(0.0, abs=1e-5)


def test_per_call_and_configurable_modes() -> None:
    wrapped = ExplainingRetriever(vectorstore=store(), k=3)

    def statuses(documents: list[Document]) -> list[str]:
        return [one.hit.status for one in documents]  # type: ignore[attr-defined]

    assert statuses(wrapped.invoke(QUERY, top=1)) == ["pending", "skipped", "skipped"]
    assert statuses(asyncio.run(wrapped.ainvoke(QUERY, explain="eager", top=1))) == ["ready", "skipped", "skipped"]
    assert statuses(wrapped.invoke(QUERY, explain="off")) == ["skipped"] * 3
    assert statuses(wrapped.invoke(QUERY, explain="eager")) == ["ready"] * 3
    switch = wrapped.configurable_fields(explain=ConfigurableField(id="explain"))
    assert statuses(switch.invoke(QUERY)) == ["pending"] * 3
    assert statuses(switch.invoke(QUERY, {"configurable": {"explain": "eager"}})) == ["ready"] * 3
    assert statuses(switch.with_config(configurable={"explain": "off"}).invoke(QUERY)) == ["skipped"] * 3
    with pytest.raises(InvalidInput, match="explain must be 'lazy', 'eager' or 'off', not 'later'"):
        wrapped.invoke(QUERY, explain="later")
    first = ExplainingRetriever(vectorstore=store(), k=3, top=2)
    assert statuses(first.invoke(QUERY)) == ["pending", "pending", "skipped"]


def test_an_unknown_metric_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no metric 'euclid'"):
        ExplainingRetriever(vectorstore=store(), metric="euclid")


def test_the_wrapped_retriever_is_a_child_run_with_our_parameters() -> None:
    for run in (lambda r, c: r.invoke(QUERY, c), lambda r, c: asyncio.run(r.ainvoke(QUERY, c))):
        recorder = Recorder()
        run(ExplainingRetriever(retriever=store().as_retriever()), {"callbacks": [recorder]})
        (outer, inner) = recorder.starts
        assert (outer[0], inner[0]) == ("ExplainingRetriever", "VectorStoreRetriever")
        assert inner[2] == outer[1]
        assert recorder.metadata[0]["ls_retriever_name"] == "rag_explain"
        assert recorder.metadata[0]["ls_vector_store_provider"] == "InMemoryVectorStore"


def test_an_event_carries_the_explanation() -> None:
    wrapped = ExplainingRetriever(vectorstore=store(), k=2)
    for run in (
        lambda mode, c: wrapped.invoke(QUERY, c, explain=mode),
        lambda mode, c: asyncio.run(wrapped.ainvoke(QUERY, c, explain=mode)),
    ):
        recorder = Recorder()
        run("eager", {"callbacks": [recorder]})
        run("lazy", {"callbacks": [recorder]})
        (name, eager), (_, lazy) = recorder.events
        assert name == EVENT == "rag_explain.explanation"
        assert eager["query"] == QUERY
        assert Explanation.from_dict(eager["hits"][0]["explanation"]).query == QUERY
        assert lazy["hits"][0]["explanation"] is None
        json.dumps(eager)

    async def stream() -> list[Any]:
        chain = RunnableLambda(lambda query: query) | wrapped
        return [event async for event in chain.astream_events(QUERY, version="v2")]

    events = asyncio.run(stream())
    assert [event["name"] for event in events if event["event"] == "on_custom_event"] == [EVENT]


def test_a_handler_that_fails_does_not_fail_the_search(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(BaseCallbackHandler):
        raise_error = True

        def on_custom_event(self, name: str, data: Any, **kwargs: Any) -> None:
            raise RuntimeError("no disk")

    documents = ExplainingRetriever(vectorstore=store(), k=2).invoke(QUERY, {"callbacks": [Failing()]})
    assert len(documents) == 2
    assert "event was not sent" in caplog.text


@pytest.mark.parametrize("template", ["{context}", "documents: {raw}"])
def test_prompts_are_byte_identical(template: str) -> None:
    base = store().as_retriever(search_kwargs={"k": 3})
    prompts: list[str] = []

    def record(prompt: Any) -> Any:
        prompts.append(prompt.to_string())
        return prompt

    for retriever in (base, ExplainingRetriever(retriever=base), ExplainingRetriever(retriever=base, explain="eager")):
        chain = (
            {
                "context": retriever | (lambda documents: "\n".join(one.page_content for one in documents)),
                "raw": retriever,
                "question": RunnablePassthrough(),
            }
            | ChatPromptTemplate.from_template(template + "\n{question}")
            | RunnableLambda(record)
            | FakeListLLM(responses=["answer"])
            | StrOutputParser()
        )
        assert chain.invoke(QUERY) == "answer"
    assert len(set(prompts)) == 1
    assert len(prompts) == 3


@pytest.mark.filterwarnings("ignore:The function `loads` is in beta")
def test_in_metadata_it_is_one_short_line_and_survives_json() -> None:
    base = store().as_retriever(search_kwargs={"k": 2})
    (expected, *_) = base.invoke(QUERY)
    wrapped = ExplainingRetriever(retriever=base, explain="eager", metadata_key="explanation")
    (document, *_) = wrapped.invoke(QUERY)
    assert 0 < len(str(document)) - len(str(expected)) <= 120
    original = get_explanation(document)
    for copy in (
        loads(dumps(document), allowed_objects="core"),
        Document(**document.model_dump()),
        Document.model_validate_json(document.model_dump_json()),
    ):
        assert type(copy) is Document
        found = get_explanation(copy)
        assert found is not None
        assert original is not None
        np.testing.assert_array_equal(found.matrix, original.matrix)
    assert "explanation" not in expected.metadata
    assert get_explanation(expected) is None
    assert get_explanation(Document("x", metadata={"explanation": {"format": "rag_explain.explanation"}})) is None


def test_copies_keep_the_explanation() -> None:
    (document, _) = ExplainingRetriever(vectorstore=store(), k=2).invoke(QUERY)
    for copy in (document.model_copy(), document.model_copy(deep=True)):
        assert get_explanation(copy) is get_explanation(document)
    assert dumpd(document)["id"] == ["langchain", "schema", "document", "Document"]


def test_stored_documents_are_never_touched() -> None:
    kept = [Document(text, id=str(n), metadata={"n": n, "deep": {"a": 1}}) for n, text in enumerate(TEXTS[:3])]
    before = [one.model_dump_json() for one in kept]
    wrapped = ExplainingRetriever(
        retriever=Static(documents=kept), explainer=Explainer(model()), explain="eager", metadata_key="explanation"
    )
    documents = wrapped.invoke(QUERY)
    documents[0].metadata["mine"] = True
    assert [one.model_dump_json() for one in kept] == before
    assert all(type(one) is Document for one in kept)


def test_documents_without_ids_and_unusual_texts() -> None:
    kept = [Document(""), Document("the cat " * 6250), Document(TEXTS[0])]
    wrapped = ExplainingRetriever(retriever=Static(documents=kept), explainer=Explainer(model()), explain="eager")
    documents = wrapped.invoke(QUERY)
    assert documents == kept
    assert [(one.id, one.hit.id, one.hit.status) for one in documents] == [  # type: ignore[attr-defined]
        (None, "#1", "ready"),
        (None, "#2", "ready"),
        (None, "#3", "ready"),
    ]
    assert get_explanation(documents[1]).truncated == ("document",)  # type: ignore[union-attr]


@pytest.mark.parametrize("mode", ["lazy", "eager"])
@pytest.mark.parametrize("time_limit", [None, 0.0, 60.0])
def test_a_failing_explainer_never_fails_the_search(mode: str, time_limit: float | None) -> None:
    base = store().as_retriever()
    wrapped = ExplainingRetriever(retriever=base, explainer=Broken(), explain=mode, time_limit=time_limit)
    for documents in (wrapped.invoke(QUERY), asyncio.run(wrapped.ainvoke(QUERY))):
        assert documents == base.invoke(QUERY)
        for document in documents:
            assert get_explanation(document) is None
            assert isinstance(document, ExplainedDocument)
            assert document.hit.status == ("skipped" if time_limit == 0.0 and mode == "eager" else "failed")
            assert document.hit.reason


def test_what_did_not_choose_alone_is_a_surrogate() -> None:
    explainer = Explainer(model())
    remote = InMemoryVectorStore(RemoteEmbeddings())
    remote.add_texts(TEXTS)

    def surrogate(**fields: Any) -> str | None:
        (document, *_) = ExplainingRetriever(explainer=explainer, k=2, **fields).invoke(QUERY)
        explanation = get_explanation(document)
        assert explanation is not None
        return explanation.surrogate

    static = Static(documents=store().similarity_search(QUERY))
    assert surrogate(retriever=store().as_retriever()) is None
    assert "MMR" in (surrogate(retriever=store().as_retriever(search_type="mmr")) or "")
    assert "Static" in (surrogate(retriever=static) or "")
    assert surrogate(retriever=static, surrogate=False) is None
    assert surrogate(retriever=static, surrogate="reranked by hand") == "reranked by hand"
    unasked = Reversed(RemoteEmbeddings())  # not asked for scores, so that nothing tells
    unasked.add_texts(TEXTS)
    assert "RemoteEmbeddings" in (surrogate(retriever=unasked.as_retriever()) or "")
    assert "built with another model" in (surrogate(retriever=remote.as_retriever()) or "")
    assert "built with another model" in (surrogate(vectorstore=remote) or "")


def test_the_encoder_is_named_once_or_asked_for() -> None:
    with pytest.raises(ValueError, match="pass explainer="):
        ExplainingRetriever(retriever=Static(documents=[]))
    with pytest.raises(ValueError, match="a retriever or a vectorstore"):
        ExplainingRetriever(vectorstore=store(), retriever=store().as_retriever())
    with pytest.raises(ValueError, match="a retriever or a vectorstore"):
        ExplainingRetriever()


def test_threads_and_async_calls_agree_with_one_by_one() -> None:
    wrapped = ExplainingRetriever(vectorstore=store(), k=3, explain="eager")
    queries = [f"where is the {word}?" for word in ("cat", "dog", "moon", "bridge")]
    alone = {query: wrapped.invoke(query) for query in queries}
    with ThreadPoolExecutor(32) as pool:
        threaded = list(pool.map(wrapped.invoke, queries * 8))

    async def many() -> list[list[Document]]:
        return await asyncio.gather(*(wrapped.ainvoke(query) for query in queries * 50))

    for results in (threaded, asyncio.run(many())):
        for query, documents in zip(queries * 50, results, strict=False):
            assert documents == alone[query]
            for one, other in zip(documents, alone[query], strict=True):
                np.testing.assert_allclose(get_explanation(one).matrix, get_explanation(other).matrix, atol=1e-6)  # type: ignore[union-attr]


def test_eight_threads_look_at_every_part_of_the_same_documents() -> None:
    retriever = ExplainingRetriever(vectorstore=store(), k=3)
    alone, found = (retriever.invoke(QUERY) for _ in range(2))
    parts = ("highlights", "evidence", "explanation")

    def look(thread: int) -> dict[str, list[Any]]:
        brief = [one.hit.brief() for one in found]  # type: ignore[attr-defined]
        order = parts[thread % 3 :] + parts[: thread % 3]
        return {part: [getattr(one.hit, part) for one in found] for part in order} | {"brief": brief}  # type: ignore[attr-defined]

    with ThreadPoolExecutor(8) as pool:
        seen = list(pool.map(look, range(8)))
    for each in seen:
        assert each["explanation"] == seen[0]["explanation"]  # the same objects: computed once
        for at, one in enumerate(alone):
            hit = one.hit  # type: ignore[attr-defined]
            assert each["evidence"][at] == hit.evidence
            values = [span.value for span in each["highlights"][at]]
            assert values == pytest.approx([span.value for span in hit.highlights], abs=1e-5)
            np.testing.assert_allclose(each["explanation"][at].matrix, hit.explanation.matrix, atol=1e-5)
            assert each["brief"][at].score == pytest.approx(hit.brief().score, abs=1e-5)


def test_a_tool_hands_the_explanation_to_the_program_and_not_to_the_model() -> None:
    base = store().as_retriever(search_kwargs={"k": 2})
    arguments: dict[str, Any] = {"name": "notes", "description": "notes", "response_format": "content_and_artifact"}
    call = {"name": "notes", "args": {"query": QUERY}, "id": "1", "type": "tool_call"}
    expected = create_retriever_tool(base, **arguments).invoke(call)
    message = create_retriever_tool(ExplainingRetriever(retriever=base), **arguments).invoke(call)
    assert message.content == expected.content
    assert [get_explanation(one).query for one in message.artifact] == [QUERY] * 2  # type: ignore[union-attr]


def test_multi_query_finds_duplicates_inside_and_outside() -> None:
    multi_query = pytest.importorskip("langchain_classic.retrievers.multi_query")
    base = store().as_retriever(search_kwargs={"k": 4})

    def build(retriever: BaseRetriever) -> BaseRetriever:
        lines = "where is the moon?\nwhy did the dog bark?\nwho looked at the moon?"
        return multi_query.MultiQueryRetriever.from_llm(  # type: ignore[no-any-return]
            retriever, FakeListLLM(responses=[lines]), PromptTemplate.from_template("{question}")
        )

    expected = build(base).invoke(QUERY)
    assert 4 <= len(expected) < 16  # four queries of four documents each, and some found twice
    outside = ExplainingRetriever(retriever=build(base), explainer=Explainer(model())).invoke(QUERY)
    inside = build(ExplainingRetriever(retriever=base, explain="eager")).invoke(QUERY)
    assert plain(outside) == plain(expected) == plain(inside)
    explanation = get_explanation(outside[0])
    assert explanation is not None
    assert "MultiQueryRetriever" in (explanation.surrogate or "")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("strategy", ["EUCLIDEAN_DISTANCE", "MAX_INNER_PRODUCT"])
def test_the_faiss_store_of_langchain_community(strategy: str) -> None:
    stores = pytest.importorskip("langchain_community.vectorstores")
    made = stores.FAISS.from_texts(TEXTS, LocalEmbeddings(model()), distance_strategy=strategy)
    before = {key: value.model_dump_json() for key, value in made.docstore._dict.items()}
    wrapped = ExplainingRetriever(vectorstore=made, k=4, explain="eager", metadata_key="explanation")
    expected = made.similarity_search_with_score(QUERY, k=4)
    for document, (plain_document, score) in zip(wrapped.invoke(QUERY), expected, strict=True):
        assert isinstance(document, ExplainedDocument)
        assert (document.id, document.hit.score) == (plain_document.id, float(score))
        assert isinstance(document.hit.score, float)
        assert document.hit.gap == pytest.approx(0.0, abs=1e-5)
        assert document.explanation.surrogate is None  # type: ignore[union-attr]
    assert {key: value.model_dump_json() for key, value in made.docstore._dict.items()} == before


def check_factors_are_kept(base: VectorStore, documents: list[Document] | None, count: int) -> None:
    with Explainer(model()) as explainer:
        wrapped = ExplainingRetriever(vectorstore=base, explainer=explainer, k=3, explain="eager")
        assert wrapped.precompute(documents, progress=False).built == count
        paths = [get_explanation(one).provenance["path"] for one in wrapped.invoke(QUERY)]  # type: ignore[union-attr]
        assert paths == ["memory"] * 3


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of langchain-community
def test_factors_are_kept_from_the_faiss_store_of_langchain_community() -> None:
    stores = pytest.importorskip("langchain_community.vectorstores")
    check_factors_are_kept(stores.FAISS.from_texts(TEXTS, LocalEmbeddings(model())), None, len(TEXTS))


def test_factors_are_kept_from_documents_and_from_a_store() -> None:
    documents = store().similarity_search(QUERY, k=3)
    check_factors_are_kept(store(), documents, 3)
    check_factors_are_kept(store(), None, len(TEXTS))
    unlisted = ExplainingRetriever(retriever=Static(documents=documents), explainer=Explainer(model()))
    with pytest.raises(InvalidInput, match="Static has no vector store: pass the documents to precompute"):
        unlisted.precompute()
    with pytest.raises(InvalidInput, match="takes a list of documents"):
        unlisted.precompute(TEXTS)  # type: ignore[arg-type]  # the mistake under test


def test_what_is_refused_is_not_hidden_behind_an_error_of_pydantic() -> None:
    for message, fields in {
        "nothing that embeds was found in Static: pass explainer=": {"retriever": Static(documents=[])},
        "max_calls must be 0 or more texts, not -1": {"vectorstore": store(), "max_calls": -1},
        "max_calls must be a number of texts, or None, not 'x'": {"vectorstore": store(), "max_calls": "x"},
        "takes a retriever or a vectorstore": {},
        "there is no metric 'l2': use one of cosine, ": {"vectorstore": store(), "metric": "l2"},
        "explain must be": {"vectorstore": store(), "explain": "soon"},
        "top must be": {"vectorstore": store(), "top": -1},
    }.items():
        with pytest.raises(InvalidInput) as refused:
            ExplainingRetriever(**fields)
        assert type(refused.value) is InvalidInput
        assert message in str(refused.value)


def test_copies_of_a_retriever_explain_and_a_pickle_is_refused() -> None:
    retriever = ExplainingRetriever(vectorstore=store(), k=2)
    for other in (shallow_copy(retriever), deepcopy(retriever), retriever.model_copy(update={"k": 1})):
        assert get_explanation(other.invoke(QUERY)[0]) is not None
    with pytest.raises(InvalidInput, match="cannot be pickled"):
        pickle.dumps(retriever)


def test_the_model_of_hugging_face_embeddings_is_found(tmp_path: Any) -> None:
    embeddings = pytest.importorskip("langchain_huggingface")
    model().save(str(tmp_path / "model"), create_model_card=False)
    made = InMemoryVectorStore(embeddings.HuggingFaceEmbeddings(model_name=str(tmp_path / "model")))
    made.add_texts(TEXTS)
    (document, *_) = ExplainingRetriever(vectorstore=made).invoke(QUERY)
    explanation = get_explanation(document)
    assert explanation is not None
    assert explanation.surrogate is None


@pytest.mark.slow
def test_on_real_weights_prompts_scores_and_reasons() -> None:
    encoder = SentenceTransformer(str(packaged_path() or "all-MiniLM-L6-v2"))
    made = InMemoryVectorStore(LocalEmbeddings(encoder))
    made.add_documents([Document(one["text"], id=one["id"], metadata={"topic": one["topic"]}) for one in corpus()])
    base = made.as_retriever(search_kwargs={"k": 5})
    question = "How do bees find their way home?"
    prompt = ChatPromptTemplate.from_template("{documents}\n{question}")
    plain_prompt, *others = (
        prompt.invoke({"documents": retriever.invoke(question), "question": question}).to_string()
        for retriever in (base, ExplainingRetriever(retriever=base), ExplainingRetriever(vectorstore=made, k=5))
    )
    assert others == [plain_prompt, plain_prompt]
    documents = ExplainingRetriever(vectorstore=made, k=5, explain="eager", unit="word").invoke(question)
    assert documents[0].id == "bees-navigation"
    for document in documents:
        assert isinstance(document, ExplainedDocument)
        assert document.explanation is not None
        assert document.explanation.surrogate is None
        assert document.explanation.gap == pytest.approx(0.0, abs=1e-5)
        assert document.hit.gap == pytest.approx(0.0, abs=1e-5)
    pair = get_explanation(documents[0]).by_word().top_pairs(1)[0]  # type: ignore[union-attr]
    assert (pair.query.text, pair.document.text) == ("bees", "Honeybees")


class Reversed(InMemoryVectorStore):
    """Searches otherwise than it scores."""

    def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        return super().similarity_search(query, k, **kwargs)[::-1]


def traced(retriever: BaseRetriever) -> list[Run]:
    """The runs of a retriever that wraps, or of a plain one, of one search: what a trace shows."""
    with collect_runs() as runs:
        retriever.invoke(QUERY)
    (run,) = runs.traced_runs
    return run.child_runs or [run]


def test_a_plain_retriever_of_a_known_store_is_asked_once_with_scores() -> None:
    plain = store().as_retriever(
        search_kwargs={"k": 3, "filter": lambda document: "moon" not in document.page_content}, tags=["mine"]
    )
    wrapped = ExplainingRetriever(retriever=plain)
    scores = [score for _, score in plain.vectorstore.similarity_search_with_score(QUERY, **plain.search_kwargs)]
    for found, options in (
        (wrapped.invoke(QUERY), {}),
        (asyncio.run(wrapped.ainvoke(QUERY)), {}),
        (wrapped.invoke(QUERY, k=2), {"k": 2}),
    ):
        assert found == plain.invoke(QUERY, **options)
        assert [document.hit.score for document in found] == scores[: len(found)]
        assert all(abs(document.hit.gap or 0.0) < 2e-3 for document in found)
    (mine,), (theirs,) = traced(wrapped), traced(plain)
    assert (mine.name, mine.tags, mine.outputs) == (theirs.name, theirs.tags, theirs.outputs)
    assert {name: mine.metadata[name] for name in theirs.metadata} == theirs.metadata


def replaced_in_object() -> InMemoryVectorStore:
    made = store()
    search = made.similarity_search
    vars(made)["similarity_search"] = lambda query, **options: search(query, **options)[::-1]
    return made


def test_a_store_that_may_search_otherwise_is_asked_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    derived = Reversed(store().embeddings)
    derived.add_texts(TEXTS)
    for other in (derived, replaced_in_object()):
        found = ExplainingRetriever(retriever=other.as_retriever()).invoke(QUERY)
        assert found == other.as_retriever().invoke(QUERY)
        best_last = [document.page_content for document in store().as_retriever().invoke(QUERY)][::-1]
        assert [document.page_content for document in found] == best_last
        assert [document.hit.score for document in found] == [None] * 4

    seen = []
    search = InMemoryVectorStore.similarity_search

    @wraps(search)
    def watched(self: InMemoryVectorStore, query: str, *args: Any, **options: Any) -> list[Document]:
        seen.append(query)  # as tracing libraries do, which replace the method in its class
        return search(self, query, *args, **options)

    monkeypatch.setattr(InMemoryVectorStore, "similarity_search", watched)
    ExplainingRetriever(retriever=store().as_retriever()).invoke(QUERY)
    assert seen == [QUERY]
