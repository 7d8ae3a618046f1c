"""ExplanationLogHandler on real chains: question, sources, reasons and answer of one run end in one record."""

from __future__ import annotations

import asyncio
import random
from typing import Any
from uuid import uuid4

import pytest
from langchain_core.documents import Document
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from langchain_core.tools import create_retriever_tool
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_rag_explain import ExplainedDocument, ExplainingRetriever, ExplanationLogHandler
from openinference.instrumentation.langchain import LangChainInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import BaseModel

from rag_explain.errors import InvalidInput
from rag_explain.log import ExplanationLog, Record
from rag_explain.log.otel import TraceExport
from tests.support.models import CORPUS

CALL = {"name": "search", "args": {"query": "cats"}, "id": "one"}
WORDS = sorted({word.strip(".,;!?") for text in CORPUS for word in text.split()})


class Echo(BaseChatModel):
    """A language model that repeats the question, after a while."""

    @property
    def _llm_type(self) -> str:
        return "echo"

    def _generate(self, messages: list[Any], *arguments: Any, **options: Any) -> ChatResult:
        question = messages[-1].content.rsplit("Question: ")[-1]
        return ChatResult(generations=[ChatGeneration(message=AIMessage(f"Answer to {question}"))])

    async def _agenerate(self, messages: list[Any], *arguments: Any, **options: Any) -> ChatResult:
        await asyncio.sleep(random.random() * 0.02)
        return self._generate(messages)


class Asked(BaseModel):
    query: str


class Said(BaseModel):
    """A structured output."""

    answer: str
    pages: list[int]


class Static(BaseRetriever):
    """A retriever without our wrapper."""

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return [Document(page_content=f"about {query}", id="static")]


class Around(BaseRetriever):
    """A retriever of another package around ours: it hands out plain copies in another order."""

    inner: BaseRetriever

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        found = self.inner.invoke(query, config={"callbacks": run_manager.get_child()})
        return [Document(page_content=one.page_content, id=one.id, metadata=one.metadata) for one in reversed(found)]


@pytest.fixture(scope="module")
def retriever(store: InMemoryVectorStore) -> ExplainingRetriever:
    return ExplainingRetriever(vectorstore=store, k=2)


def chain_of(retriever: Runnable[Any, Any]) -> Runnable[Any, Any]:
    prompt = ChatPromptTemplate.from_template("{context} Question: {question}")
    return {"context": retriever, "question": RunnablePassthrough()} | prompt | Echo() | StrOutputParser()


def only(log: ExplanationLog) -> Record:
    (record,) = log.records()
    return record


def test_one_callback_ties_question_sources_reasons_and_answer_together(retriever, log):
    handler = ExplanationLogHandler(log, metadata={"app": "test"})
    config = {"callbacks": [handler], "tags": ["prod"]}
    answer = chain_of(retriever).invoke("why did the dog bark?", config)
    record = only(log)
    assert (record.query, record.answer) == ("why did the dog bark?", answer)
    expected = retriever.invoke("why did the dog bark?")
    assert [hit.id for hit in record.hits] == [document.id for document in expected]
    assert [hit.rank for hit in record.hits] == [1, 2]
    assert record.hits[0].explanation.query == "why did the dog bark?"
    assert record.hits[0].explanation.score == pytest.approx(expected[0].explanation.score, abs=1e-5)
    assert record.metadata["app"] == "test"
    assert record.metadata["tags"] == ["prod"]
    assert record.metadata["langchain_run_id"]


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
        assert [hit.id for hit in record.hits] == [one.id for one in retriever.invoke(question)]
        assert all(hit.explanation.query == question for hit in record.hits)
        assert all(hit.explanation.document == hit.text for hit in record.hits)


def test_a_hundred_concurrent_queries_are_paired_correctly(retriever, log):
    chain, handler, asked = chain_of(retriever), ExplanationLogHandler(log), questions(100)

    async def ask() -> None:
        await asyncio.gather(*(chain.ainvoke(question, {"callbacks": [handler]}) for question in asked))

    asyncio.run(ask())
    check_pairing(list(log.records()), asked, retriever)
    assert len(handler._runs) == 0


def test_a_batch_in_threads_is_paired_correctly(retriever, log):
    asked = questions(40)
    chain_of(retriever).batch(asked, {"callbacks": [ExplanationLogHandler(log)], "max_concurrency": 16})
    check_pairing(list(log.records()), asked, retriever)


def test_streams_are_logged_whole(retriever, log):
    chain, config = chain_of(retriever), {"callbacks": [ExplanationLogHandler(log)]}
    answer = "".join(chain.stream("the moon", config))

    async def read() -> str:
        return "".join([piece async for piece in chain.astream("the sun", config)])

    other = asyncio.run(read())
    assert [(record.query, record.answer) for record in log.records()] == [("the moon", answer), ("the sun", other)]


def test_the_question_of_a_stream_is_the_chains_and_not_the_retrievers(retriever, log):
    chain = RunnableLambda(lambda text: f"{text} moon") | chain_of(retriever)
    config = {"callbacks": [ExplanationLogHandler(log)]}
    list(chain.stream("the cat?", config))
    failing = chain | RunnableLambda(lambda answer: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(failing.stream("the sun?", config))
    assert [(record.query, record.asked(0)) for record in log.records()] == [
        ("the cat?", "the cat? moon"),
        ("the sun?", "the sun? moon"),
    ]


def test_a_document_without_an_explanation_says_what_it_was_found_by(log):
    chain = RunnableLambda(lambda text: f"{text} moon") | Static()
    chain.invoke("the cat?", {"callbacks": [ExplanationLogHandler(log)]})
    record = only(log)
    assert (record.query, record.asked(0), record.hits[0].query) == ("the cat?", "the cat? moon", "the cat? moon")


def test_a_folder_is_no_log():
    with pytest.raises(InvalidInput, match=r"log must be an ExplanationLog, not str: ExplanationLog\(folder\) opens"):
        ExplanationLogHandler("rag-log")


def test_a_key_that_is_none_is_refused(log):
    with pytest.raises(InvalidInput, match="answer_key must be the name of a key or a function of the state, not int"):
        ExplanationLogHandler(log, answer_key=7)


def test_a_question_that_the_chain_rewrote_is_kept_beside_the_hit(retriever, log):
    chain = RunnableLambda(lambda given: given["question"]) | RunnableLambda(lambda text: f"{text} moon") | retriever
    outer = {"answer": chain | (lambda found: f"{len(found)} found"), "question": lambda given: given["question"]}
    whole = RunnablePassthrough() | outer
    whole.invoke({"question": "the cat?"}, {"callbacks": [ExplanationLogHandler(log)]})
    record = only(log)
    assert (record.query, record.answer) == ("the cat?", "2 found")
    assert record.asked(0) == "the cat? moon"


@pytest.mark.parametrize(
    ("given", "gives", "expected"),
    [
        ("plain", "text", ("plain", "text")),
        ({"input": "asked"}, {"answer": "said", "context": []}, ("asked", "said")),
        ({"query": "asked"}, {"result": "said"}, ("asked", "said")),
        (
            {"messages": [HumanMessage("asked")]},
            {"messages": [HumanMessage("asked"), AIMessage("said")]},
            ("asked", "said"),
        ),
        ({"messages": [("human", "asked")]}, AIMessage([{"type": "text", "text": "said"}]), ("asked", "said")),
        ({"topic": 7}, 42, ("the cat", None)),
        (
            {"messages": [HumanMessage("asked"), AIMessage("before"), SystemMessage("be kind")]},
            {"messages": [HumanMessage("asked"), AIMessage("said", tool_calls=[CALL])]},
            ("asked", None),
        ),
        ({"messages": [{"role": "user", "content": "asked"}]}, [("ai", "said")], ("asked", "said")),
        ({"question": "asked", "input": "later"}, {"output": AIMessage("said"), "documents": []}, ("asked", "said")),
        (Asked(query="asked"), Said(answer="said", pages=[7]), ("asked", "said")),
        ({"query": Asked(query="asked")}, {"parsed": Said(answer="said", pages=[])}, ("asked", None)),
        ("asked", ("said", [Document(page_content="a page")]), ("asked", "said")),
        ("asked", ("said", "or said"), ("asked", None)),
        ("asked", ["said", "or said"], ("asked", None)),
        ("asked", {"text": "a page", "summary": "of it"}, ("asked", None)),
        ({"question": "asked", "answer": "of a pupil"}, {"answer": "of a pupil", "grade": 3}, ("asked", None)),
        (
            {"question": "asked", "answer": "of a pupil"},
            {"answer": "of a pupil", "response": "well done"},
            ("asked", "well done"),
        ),
        ("asked", AIMessage("", tool_calls=[CALL]), ("asked", None)),
        ("asked", [HumanMessage("asked")], ("asked", None)),
        ("asked", None, ("asked", None)),
        (None, "said", ("the cat", "said")),
    ],
)
def test_questions_and_answers_come_in_many_shapes(retriever, log, given, gives, expected):
    def answer(inputs: Any, config: Any) -> Any:
        retriever.invoke("the cat", config)
        return gives

    RunnableLambda(answer).invoke(given, {"callbacks": [ExplanationLogHandler(log)]})
    record = only(log)
    assert (record.query, record.answer) == expected


def test_a_retriever_on_its_own_is_logged_without_an_answer(retriever, log):
    retriever.invoke("the cat", config={"callbacks": [ExplanationLogHandler(log)]})
    record = only(log)
    assert (record.query, record.answer) == ("the cat", None)
    assert record.explained == 2


def test_a_tool_of_an_agent(retriever, log):
    tool = create_retriever_tool(retriever, "search", "finds")
    agent = RunnableLambda(lambda question, config: f"Answer: {len(tool.invoke(question, config))}")
    agent.invoke("the cat", {"callbacks": [ExplanationLogHandler(log)]})
    record = only(log)
    assert record.answer.startswith("Answer: ")
    assert record.explained == 2


def test_a_tool_on_its_own(retriever, log):
    tool = create_retriever_tool(retriever, "search", "finds", response_format="content_and_artifact")
    content = tool.invoke({"query": "the cat"}, {"callbacks": [ExplanationLogHandler(log)]})
    record = only(log)
    assert (record.query, record.answer, record.explained) == ("the cat", content, 2)


def test_explanations_are_found_inside_other_retrievers(retriever, log):
    Around(inner=retriever).invoke("the cat", config={"callbacks": [ExplanationLogHandler(log)]})
    record = only(log)
    expected = [document.id for document in reversed(retriever.invoke("the cat"))]
    assert [hit.id for hit in record.hits] == expected
    assert [hit.rank for hit in record.hits] == [1, 2]
    assert record.explained == 2


def test_a_retriever_that_is_not_wrapped_is_logged_without_reasons(log):
    Static().invoke("the cat", config={"callbacks": [ExplanationLogHandler(log)]})
    (hit,) = only(log).hits
    assert (hit.id, hit.status) == ("static", "skipped")
    assert "not wrapped" in hit.reason


def test_explanations_in_metadata_survive_a_journey_through_json(retriever, log):
    eager = type(retriever)(**{**dict(retriever), "explain": "eager", "metadata_key": "why"})
    documents = [Document.model_validate_json(found.model_dump_json()) for found in eager.invoke("the cat")]
    assert not any(isinstance(document, ExplainedDocument) for document in documents)

    class Cached(BaseRetriever):
        def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
            return documents

    Cached().invoke("the cat", config={"callbacks": [ExplanationLogHandler(log)]})
    assert only(log).explained == 2


def test_chains_that_fail_are_logged_with_what_they_had(retriever, log):
    chain = retriever | RunnableLambda(lambda documents: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        chain.invoke("the cat", {"callbacks": [ExplanationLogHandler(log)]})
    record = only(log)
    assert record.answer is None
    assert record.metadata["error"] == "ZeroDivisionError"
    assert len(record.hits) == 2


def test_a_chain_without_a_retriever_is_none_of_our_business(log):
    RunnableLambda(lambda text: text).invoke("hello", {"callbacks": [ExplanationLogHandler(log)]})
    assert not list(log.records())


def test_a_callback_on_a_part_of_the_chain(retriever, log):
    part = chain_of(retriever).with_config(callbacks=[ExplanationLogHandler(log)])
    (RunnableLambda(lambda text: f"{text}!") | part).invoke("the cat")
    record = only(log)
    assert (record.query, record.answer) == ("the cat!", "Answer to the cat!")


def test_runs_that_never_end_do_not_pile_up(log, monkeypatch):
    monkeypatch.setattr("rag_explain.log.runs.MAX_OPEN", 2)
    handler = ExplanationLogHandler(log)
    for number in range(3):
        root = uuid4()
        handler.on_chain_start({}, f"question {number}", run_id=root)
        handler.on_retriever_start({}, f"question {number}", run_id=uuid4(), parent_run_id=root)
    record = only(log)
    assert record.query == "question 0"
    assert record.metadata["error"] == "it never ended"
    assert len(handler._runs) == 4


def test_beside_openinference_the_explanation_is_below_the_chains_own_span(retriever, tmp_path):
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    instrumentor = LangChainInstrumentor()
    instrumentor.instrument(tracer_provider=provider)
    try:
        with ExplanationLog(tmp_path, export=TraceExport(provider)) as log:
            chain_of(retriever).invoke("the cat", {"callbacks": [ExplanationLogHandler(log)]})
            log.flush()
    finally:
        instrumentor.uninstrument()
    finished = {span.name: span for span in spans.get_finished_spans()}
    ours, chain, theirs = (
        finished[name] for name in ("rag_explain.explanation", "RunnableSequence", "ExplainingRetriever")
    )
    assert ours.parent.span_id == chain.context.span_id
    assert ours.context.trace_id == theirs.context.trace_id
    for number in range(2):
        key = f"retrieval.documents.{number}.document.content"
        assert ours.attributes[key] == theirs.attributes[key]
    assert not [key for key in theirs.attributes if key.startswith("rag_explain.")]
    provider.shutdown()
