"""log_queries on real query engines: query, sources, reasons and answer end in one record."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.chat_engine import ContextChatEngine
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.llms import CompletionResponse, CustomLLM, LLMMetadata
from llama_index.core.llms.callbacks import llm_completion_callback
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.query_engine import BaseQueryEngine, RetrieverQueryEngine
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.retrievers.rag_explain import ExplainingRetriever, log_queries

from integrations.llama_index.tests.conftest import LocalEmbedding
from rag_explain import Explainer
from rag_explain.errors import InvalidInput
from rag_explain.log import ExplanationLog, Record
from rag_explain.log.verify import verify
from tests.support.models import CORPUS, tiny

WORDS = sorted({word.strip(".,;!?") for text in CORPUS for word in text.split()})


class Echo(CustomLLM):
    """A language model that repeats the question, word by word if asked to."""

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata()

    def _answer(self, prompt: str) -> str:
        return f"Answer to {prompt.rsplit('Query: ')[-1].splitlines()[0]}"

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **options: Any) -> CompletionResponse:
        return CompletionResponse(text=self._answer(prompt))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **options: Any) -> Iterator[CompletionResponse]:
        text = self._answer(prompt)
        for end in range(1, len(text) + 1):
            yield CompletionResponse(text=text[:end], delta=text[end - 1])


class Copying(BaseNodePostprocessor):
    """Hands on plain copies, in another order."""

    def _postprocess_nodes(self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None) -> Any:
        return [NodeWithScore(node=node.node, score=0.1) for node in reversed(nodes)]


class Static(BaseRetriever):
    """A retriever without our wrapper."""

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [NodeWithScore(node=TextNode(text="static", id_="static"), score=0.5)]


@pytest.fixture(scope="module")
def retriever(index: VectorStoreIndex) -> ExplainingRetriever:
    return ExplainingRetriever(index.as_retriever(similarity_top_k=2))


def engine_of(retriever: BaseRetriever, **options: Any) -> BaseQueryEngine:
    return RetrieverQueryEngine.from_args(retriever, llm=Echo(), **options)


def only(log: ExplanationLog) -> Record:
    (record,) = log.records()
    return record


def test_query_sources_reasons_and_answer_end_in_one_record(retriever, log):
    engine = engine_of(retriever)
    with log_queries(log, metadata={"app": "test"}):
        response = engine.query("why did the dog bark?")
    engine.query("not logged any more")
    record = only(log)
    assert (record.query, record.answer) == ("why did the dog bark?", str(response))
    assert [hit.id for hit in record.hits] == [node.node.node_id for node in response.source_nodes]
    assert [hit.rank for hit in record.hits] == [1, 2]
    assert record.hits[0].explanation.query == "why did the dog bark?"
    assert record.hits[0].explanation.score == pytest.approx(response.source_nodes[0].explanation.score, abs=1e-5)
    assert record.metadata == {"app": "test"}


def questions(count: int) -> list[str]:
    generator = random.Random(0)
    return [" ".join([*generator.sample(WORDS, 4), str(number)]) for number in range(count)]


def check_pairing(records: list[Record], asked: list[str], retriever: ExplainingRetriever) -> None:
    by_query = {record.query: record for record in records}
    assert sorted(by_query) == sorted(asked)
    assert len(records) == len(asked)
    for question in asked:
        record = by_query[question]
        assert record.answer == f"Answer to {question}"
        assert [hit.id for hit in record.hits] == [one.node.node_id for one in retriever.retrieve(question)]
        assert all(hit.explanation.query == question for hit in record.hits)
        assert all(hit.explanation.document == hit.text for hit in record.hits)


def test_a_hundred_concurrent_queries_are_paired_correctly(retriever, log):
    engine, asked = engine_of(retriever), questions(100)

    async def ask() -> None:
        await asyncio.gather(*(engine.aquery(question) for question in asked))

    with log_queries(log) as listening:
        asyncio.run(ask())
    check_pairing(list(log.records()), asked, retriever)
    assert len(listening._queries._open) == 0


def test_a_folder_is_no_log(log):
    with pytest.raises(InvalidInput, match=r"log must be an ExplanationLog, not PosixPath: ExplanationLog\(folder\)"):
        log_queries(log.folder.path)


def test_queries_in_threads_are_paired_correctly(retriever, log):
    engine, asked = engine_of(retriever), questions(40)
    with log_queries(log), ThreadPoolExecutor(16) as pool:
        list(pool.map(engine.query, asked))
    check_pairing(list(log.records()), asked, retriever)


def test_a_streamed_answer_is_logged_when_it_was_read(retriever, log):
    engine = engine_of(retriever, streaming=True)
    with log_queries(log):
        response = engine.query("the moon")
        assert not list(log.records())
        assert "".join(response.response_gen) == "Answer to the moon"
        half = engine.query("the sun").response_gen
        next(half)
        half.close()
    whole, part = log.records()
    assert (whole.query, whole.answer, len(whole.hits)) == ("the moon", "Answer to the moon", 2)
    assert (part.query, part.answer) == ("the sun", "A")
    assert part.metadata == {"error": "it was not read to its end"}


def test_an_answer_streamed_to_a_task(retriever, log):
    engine = engine_of(retriever, streaming=True)

    async def read() -> str:
        response = await engine.aquery("the moon")
        return "".join([token async for token in response.async_response_gen()])

    with log_queries(log):
        assert asyncio.run(read()) == "Answer to the moon"
    record = only(log)
    assert (record.query, record.answer, record.explained) == ("the moon", "Answer to the moon", 2)


def test_a_chat(retriever, log):
    memory = ChatMemoryBuffer.from_defaults(token_limit=1000)  # the default one leaves a database open
    chat = ContextChatEngine.from_defaults(retriever, llm=Echo(), memory=memory)
    with log_queries(log):
        reply = chat.chat("the moon")
    record = only(log)
    assert (record.query, record.answer) == ("the moon", str(reply))
    assert record.explained == 2


def chat_of(retriever: BaseRetriever, **options: Any) -> ContextChatEngine:
    memory = ChatMemoryBuffer.from_defaults(token_limit=1000)
    return ContextChatEngine.from_defaults(retriever, memory=memory, **{"llm": Echo(), **options})


def test_streamed_chats_many_at_once(retriever, log):
    async def read(word: str) -> str:
        response = await chat_of(retriever).astream_chat(word)
        return "".join([token async for token in response.async_response_gen()])

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*(read(word) for word in WORDS[10:20]))

    with log_queries(log), ThreadPoolExecutor(4) as pool:
        spoken = pool.map(lambda word: "".join(chat_of(retriever).stream_chat(word).response_gen), WORDS[:10])
        said = dict(zip(WORDS[:10], spoken, strict=True))
        said |= dict(zip(WORDS[10:20], asyncio.run(all_of_them()), strict=True))
        response = chat_of(retriever).stream_chat("never read")
        response.write_response_to_history_thread.join()
    records = {record.query: record for record in log.records()}
    assert records.pop("never read").answer == response.response != ""
    assert {query: record.answer for query, record in records.items()} == {
        query: answer.strip() for query, answer in said.items()
    }
    assert all(record.explained == 2 and not record.metadata for record in records.values())


class Overriding(ContextChatEngine):
    """Calls the engine it is made from, with arguments of its own."""

    def stream_chat(self, *given: Any, **options: Any) -> Any:
        response = super().stream_chat(*given, **options)
        response.write_response_to_history_thread.join(timeout=random.choice([0.0, 5.0]))  # ready before, or not
        return response


def test_a_streamed_chat_inside_another_is_one_record(retriever, log):
    with log_queries(log) as logging:
        for word in WORDS[:20]:
            memory = ChatMemoryBuffer.from_defaults(token_limit=1000)
            "".join(Overriding.from_defaults(retriever, memory=memory, llm=Echo()).stream_chat(word).response_gen)
        assert len(logging._queries._returned) == 0
    assert [record.query for record in log.records()] == WORDS[:20]
    assert all(record.answer and record.explained == 2 and not record.metadata for record in log.records())


def test_a_streamed_chat_that_outlives_the_log_is_kept_without_its_answer(retriever, log):
    go = Event()

    class Waiting(Echo):
        @llm_completion_callback()
        def stream_complete(self, prompt: str, formatted: bool = False, **options: Any) -> Iterator[CompletionResponse]:
            go.wait(10)
            yield CompletionResponse(text="An", delta="An")

    with log_queries(log):
        response = chat_of(retriever, llm=Waiting()).stream_chat("the sun")
    go.set()
    assert "".join(response.response_gen) == "An"
    record = only(log)
    assert (record.query, record.answer) == ("the sun", None)
    assert record.metadata == {"error": "the log was closed before it ended"}


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)  # LlamaIndex's own thread ends in it
def test_a_streamed_chat_that_fails_midway(retriever, log):
    class Failing(Echo):
        @llm_completion_callback()
        def stream_complete(self, prompt: str, formatted: bool = False, **options: Any) -> Iterator[CompletionResponse]:
            yield CompletionResponse(text="An", delta="An")
            raise OSError("the line went dead")

    with log_queries(log), pytest.raises(OSError, match="the line went dead"):
        "".join(chat_of(retriever, llm=Failing()).stream_chat("the sun").response_gen)
    record = only(log)
    assert (record.query, record.answer, record.metadata) == ("the sun", None, {"error": "OSError"})
    assert record.explained == 2


def test_nodes_embedded_with_their_metadata_can_be_verified(tmp_path):
    nodes = [
        TextNode(text=text, id_=f"id-{number}", metadata={"file": f"{number}.md", "author": "anna"})
        for number, text in enumerate(CORPUS)
    ]
    index = VectorStoreIndex(nodes, embed_model=LocalEmbedding(tiny("bert")))
    retriever = ExplainingRetriever(index.as_retriever(similarity_top_k=3))
    with ExplanationLog(tmp_path) as log, log_queries(log):
        engine_of(retriever).query("the moon")
    explainer = Explainer(tiny("bert"))
    verdicts = list(verify(tmp_path, lambda logged: explainer))
    assert [verdict.outcome for verdict in verdicts] == ["holds"] * 3
    (record,) = ExplanationLog(tmp_path).records()
    assert all(hit.around and hit.explanation.outline.unit == "sentence" for hit in record.logged_hits)


def test_a_retriever_on_its_own_is_logged_without_an_answer(retriever, log):
    with log_queries(log):
        retriever.retrieve("the cat")
        asyncio.run(retriever.aretrieve("the dog"))
    assert [(record.query, record.answer) for record in log.records()] == [("the cat", None), ("the dog", None)]
    assert all(record.explained == 2 for record in log.records())


def test_a_query_inside_a_query_is_a_part_of_it(retriever, log):
    inner = engine_of(retriever)

    class Outer(BaseQueryEngine):
        def _query(self, query_bundle: QueryBundle) -> Any:
            response = inner.query(f"{query_bundle.query_str} moon")
            response.response = f"outer: {response.response}"
            return response

        async def _aquery(self, query_bundle: QueryBundle) -> Any:
            raise NotImplementedError

        def _get_prompt_modules(self) -> dict[str, Any]:
            return {}

    with log_queries(log):
        Outer(None).query("the cat?")
    record = only(log)
    assert (record.query, record.answer) == ("the cat?", "outer: Answer to the cat? moon")
    assert record.asked(0) == "the cat? moon"


def test_nodes_that_were_copied_on_their_way_keep_their_reasons(retriever, log):
    with log_queries(log):
        response = engine_of(retriever, node_postprocessors=[Copying()]).query("the cat")
    record = only(log)
    assert [hit.id for hit in record.hits] == [node.node.node_id for node in response.source_nodes]
    assert record.explained == 2


def test_a_retriever_that_is_not_wrapped_is_logged_without_reasons(log):
    with log_queries(log):
        engine_of(Static()).query("the cat")
    (hit,) = only(log).hits
    assert (hit.id, hit.score, hit.status) == ("static", 0.5, "skipped")
    assert "not wrapped" in hit.reason


def test_a_query_that_fails_is_logged_with_what_it_had(retriever, log):
    class Failing(Echo):
        def _answer(self, prompt: str) -> str:
            raise ZeroDivisionError

    engine = RetrieverQueryEngine.from_args(retriever, llm=Failing())
    with log_queries(log), pytest.raises(ZeroDivisionError):
        engine.query("the cat")
    record = only(log)
    assert (record.answer, record.metadata) == (None, {"error": "ZeroDivisionError"})
    assert record.explained == 2


def test_nothing_stays_behind(log):
    dispatcher = get_dispatcher()
    before = (list(dispatcher.event_handlers), list(dispatcher.span_handlers))
    with log_queries(log):
        assert len(dispatcher.span_handlers) == len(before[1]) + 1
    assert (dispatcher.event_handlers, dispatcher.span_handlers) == before


def test_queries_that_never_end_do_not_pile_up(log, monkeypatch):
    monkeypatch.setattr("rag_explain.log.runs.MAX_OPEN", 2)
    listening = log_queries(log)
    listening.close()
    for number in range(3):
        listening._events._queries.begin(f"span {number}", f"question {number}")
    record = only(log)
    assert (record.query, record.metadata) == ("question 0", {"error": "it never ended"})
