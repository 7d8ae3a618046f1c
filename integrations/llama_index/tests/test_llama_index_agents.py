"""log_queries on real agents and workflows: the agent's question and answer, and the sources of all its tool calls."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent, ReActAgent
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, LLMMetadata, MessageRole
from llama_index.core.base.response.schema import AsyncStreamingResponse, Response
from llama_index.core.llms import CompletionResponse
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.tools import FunctionTool, QueryEngineTool, RetrieverTool, ToolMetadata
from llama_index.core.workflow import Context, Event, StartEvent, StopEvent, Workflow, step
from llama_index.retrievers.rag_explain import ExplainingRetriever, log_queries

from integrations.llama_index.tests.test_llama_index_log import WORDS, Copying, Static, engine_of, only
from rag_explain.log import ExplanationLog, Record
from tests.support.models import CORPUS

# LlamaIndex looks for the steps of an agent among all attributes of a pydantic model, deprecated ones included.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The `__fields__:pydantic.warnings.PydanticDeprecatedSince20"),
    pytest.mark.filterwarnings("ignore:The `__fields_set__:pydantic.warnings.PydanticDeprecatedSince20"),
    pytest.mark.filterwarnings("ignore:Accessing the 'model_:pydantic.warnings.PydanticDeprecatedSince211"),
    pytest.mark.filterwarnings("ignore:is_running called from within a step:DeprecationWarning"),  # its ReActAgent does
]
QUESTION = "why did the dog bark?"
Call = tuple[str, str]  # a tool, and what it is asked


class Scripted(FunctionCallingLLM):
    """Makes these calls in turn, several at once where they stand in one list, then answers what the user said last."""

    calls: Sequence[Sequence[Call]] = ()

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(is_function_calling_model=True)

    async def achat(self, messages: Sequence[ChatMessage], **options: Any) -> ChatResponse:
        await asyncio.sleep(random.random() * 0.01)
        user = max(index for index, one in enumerate(messages) if one.role is MessageRole.USER)
        done = sum(one.role is MessageRole.ASSISTANT for one in messages[user:])
        said = ChatMessage(role="assistant", content=f"on {messages[user].content}")
        if done < len(self.calls):
            said = ChatMessage(role="assistant", additional_kwargs={"calls": self.calls[done], "turn": done})
        return ChatResponse(message=said)

    async def astream_chat(self, messages: Sequence[ChatMessage], **options: Any) -> Any:
        async def stream() -> AsyncIterator[ChatResponse]:
            yield await self.achat(messages)

        return stream()

    def _prepare_chat_with_tools(
        self, tools: Any, user_msg: Any = None, chat_history: Any = None, **options: Any
    ) -> Any:
        return {"messages": list(chat_history)}

    def get_tool_calls_from_response(self, response: ChatResponse, *arguments: Any, **options: Any) -> Any:
        made = response.message.additional_kwargs
        return [
            ToolSelection(tool_id=f"{made['turn']}-{number}", tool_name=name, tool_kwargs={"input": asked})
            for number, (name, asked) in enumerate(made.get("calls", ()))
        ]

    def chat(self, *arguments: Any, **options: Any) -> Any:
        raise NotImplementedError

    stream_chat = complete = stream_complete = acomplete = astream_complete = chat


class Reasoning(Scripted):
    """The same for an agent that reads what to do in the text."""

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata()

    async def achat(self, messages: Sequence[ChatMessage], **options: Any) -> ChatResponse:
        seen = sum("Observation:" in (one.content or "") for one in messages[1:])
        said = f"Thought: I can answer.\nAnswer: on {QUESTION}"
        if seen < len(self.calls):
            ((name, asked),) = self.calls[seen]
            said = f'Thought: I need a tool.\nAction: {name}\nAction Input: {{"input": "{asked}"}}'
        return ChatResponse(message=ChatMessage(role="assistant", content=said))


class FailingModel(Scripted):
    async def achat(self, messages: Sequence[ChatMessage], **options: Any) -> ChatResponse:
        response = await super().achat(messages)
        if not response.message.additional_kwargs:
            raise ZeroDivisionError
        return response


@pytest.fixture(scope="module")
def retriever(index: VectorStoreIndex) -> ExplainingRetriever:
    return ExplainingRetriever(index.as_retriever(similarity_top_k=2))


def tools_of(retriever: Any, **options: Any) -> list[Any]:
    search = QueryEngineTool(engine_of(retriever, **options), metadata=ToolMetadata(name="search", description="finds"))
    fetch = RetrieverTool(retriever, metadata=ToolMetadata(name="fetch", description="finds"), **options)
    other = RetrieverTool(Static(), metadata=ToolMetadata(name="other", description="finds"))
    return [search, fetch, other]


def agent_of(
    retriever: Any, *calls: Sequence[Call], kind: Any = FunctionAgent, model: Any = Scripted, **more: Any
) -> Any:
    return kind(tools=more.pop("tools", None) or tools_of(retriever), llm=model(calls=calls), **more)


def ask(agent: Any, *arguments: Any, **options: Any) -> Any:
    async def run() -> Any:
        if agent_takes_memory(agent):  # the default one leaves a database open
            options.setdefault("memory", ChatMemoryBuffer.from_defaults(token_limit=10_000))
        return await agent.run(*arguments, **options)

    return asyncio.run(run())


def agent_takes_memory(agent: Any) -> bool:
    return isinstance(agent, FunctionAgent | ReActAgent | AgentWorkflow)


def told(record: Record) -> tuple[str | None, str | None]:
    return record.query, record.answer


def found(record: Record) -> list[tuple[str | None, str]]:
    return [(record.asked(index), hit.id) for index, hit in enumerate(record.logged_hits)]


def fetched(question: str) -> str:
    """What LlamaIndex's RetrieverTool makes of a question."""
    return f"\ninput is {question}\n"


def expected(retriever: Any, *queries: str) -> list[tuple[str, str]]:
    return [(query, one.node.node_id) for query in queries for one in retriever.retrieve(query)]


# ---------------------------------------------------------------------- agents


@pytest.mark.parametrize(
    ("kind", "model"), [(FunctionAgent, Scripted), (ReActAgent, Reasoning)], ids=["functions", "reasoning"]
)
def test_an_agent_is_one_record_of_its_own_question_and_answer_and_of_all_sources(retriever, log, kind, model):
    calls = [[("search", "the cat")], [("fetch", "the sun")], [("other", "the moon")]]
    with log_queries(log, metadata={"app": "test"}) as logging:
        output = ask(agent_of(retriever, *calls, kind=kind, model=model), user_msg=QUESTION)
        assert len(logging._queries._open) == 0
    record = only(log)
    assert told(record) == (QUESTION, f"on {QUESTION}") == (QUESTION, str(output))
    assert found(record) == [*expected(retriever, "the cat", fetched("the sun")), (fetched("the moon"), "static")]
    assert [hit.rank for hit in record.hits] == [1, 2, 3, 4, 5]
    assert record.explained == 4
    assert [len(hit.stages) for hit in record.hits] == [1, 1, 1, 1, 0]
    assert record.metadata == {"app": "test"}


@pytest.mark.parametrize("name", ["search", "fetch"])
def test_tool_calls_at_once_keep_their_own_sources(index, log, name):
    class Slow(Copying):
        async def _apostprocess_nodes(self, nodes: Any, query_bundle: Any = None) -> Any:
            await asyncio.sleep(random.random() * 0.02)
            return self._postprocess_nodes(nodes)

    retriever = ExplainingRetriever(index.as_retriever(similarity_top_k=len(CORPUS)))  # all find the same nodes
    words = WORDS[:6]
    tools = tools_of(retriever, node_postprocessors=[Slow()])
    made_of = fetched if name == "fetch" else str
    with log_queries(log):
        ask(agent_of(retriever, [(name, word) for word in words], tools=tools), user_msg=QUESTION)
    record = only(log)
    for word in words:
        own = [both for both in found(record) if both[0] == made_of(word)]
        assert own == expected(retriever, made_of(word))[::-1]
    assert len(record.hits) == len(CORPUS) * len(words)
    assert record.explained == len(record.hits)
    for index_, hit in enumerate(record.hits):
        assert hit.explanation.query == record.asked(index_)
        assert [stage.name for stage in hit.stages][-1] == "Slow"


def test_many_agents_at_once_and_events_that_are_streamed(retriever, log):
    async def run(word: str) -> None:
        agent = agent_of(retriever, [("search", f"{word} moon")], [("fetch", f"{word} sun")])
        handler = agent.run(word, memory=ChatMemoryBuffer.from_defaults(token_limit=10_000))
        async for _ in handler.stream_events():
            pass
        await handler

    async def all_of_them() -> None:
        await asyncio.gather(*(run(word) for word in WORDS[:20]))

    with log_queries(log):
        asyncio.run(all_of_them())
    records = {record.query: record for record in log.records()}
    assert sorted(records) == sorted(WORDS[:20])
    for word, record in records.items():
        assert record.answer == f"on {word}"
        assert found(record) == expected(retriever, f"{word} moon", fetched(f"{word} sun"))


# The memory of an agent is not carried over from turn to turn: a context is copied as JSON.
@pytest.mark.filterwarnings("ignore:Skipping serialization of known unserializable key")
def test_every_turn_of_a_conversation_is_a_record_of_its_own(retriever, log):
    agent = agent_of(retriever, [("search", "the cat")])

    async def talk() -> None:
        context = Context(agent)
        memory = ChatMemoryBuffer.from_defaults(token_limit=10_000)
        for turn in (QUESTION, ChatMessage(role="user", content="and the cat?")):
            await agent.run(user_msg=turn, ctx=context, memory=memory)

    with log_queries(log):
        asyncio.run(talk())
    assert [told(record) for record in log.records()] == [
        (QUESTION, f"on {QUESTION}"),
        ("and the cat?", "on and the cat?"),
    ]
    assert [found(record) for record in log.records()] == [expected(retriever, "the cat")] * 2


def test_the_question_may_be_the_last_one_of_a_history(retriever, log):
    history = [("user", "before"), ("assistant", "said"), ("user", QUESTION)]
    with log_queries(log):
        ask(
            agent_of(retriever, [("fetch", "the cat")]),
            chat_history=[ChatMessage(role=role, content=content) for role, content in history],
        )
    assert told(only(log)) == (QUESTION, f"on {QUESTION}")


def test_agents_that_hand_over_are_one_record(retriever, log):
    class Handing(Scripted):
        def get_tool_calls_from_response(self, response: ChatResponse, *arguments: Any, **options: Any) -> Any:
            if response.message.additional_kwargs.get("turn") != 1:
                return super().get_tool_calls_from_response(response)
            return [
                ToolSelection(tool_id="h", tool_name="handoff", tool_kwargs={"to_agent": "two", "reason": "why not"})
            ]

    calls = [[("search", "the cat")], [("handoff", "two")], [("fetch", "the sun")]]
    agents = [
        FunctionAgent(name=name, description=name, tools=tools_of(retriever), llm=Handing(calls=calls))
        for name in ("one", "two")
    ]
    with log_queries(log):
        ask(AgentWorkflow(agents=agents, root_agent="one"), user_msg=QUESTION)
    record = only(log)
    assert told(record) == (QUESTION, f"on {QUESTION}")
    assert found(record) == expected(retriever, "the cat", fetched("the sun"))


def test_a_tool_that_returns_its_answer_directly(retriever, log):
    tools = tools_of(retriever)
    tools[0].metadata.return_direct = True
    with log_queries(log):
        ask(agent_of(retriever, [("search", "the cat")], tools=tools), user_msg=QUESTION)
    assert told(only(log)) == (QUESTION, "Answer to the cat")


def test_a_retriever_inside_a_plain_function(retriever, log):
    def fetch(input: str) -> str:
        """It runs in a thread."""
        return str(len(retriever.retrieve(input)))

    tools = [FunctionTool.from_defaults(fetch)]
    with log_queries(log):
        ask(agent_of(retriever, [("fetch", "the cat")], tools=tools), user_msg=QUESTION)
    record = only(log)
    assert told(record) == (QUESTION, f"on {QUESTION}")
    assert found(record) == expected(retriever, "the cat")


def test_an_agent_that_calls_no_tool_is_none_of_our_business(retriever, log):
    with log_queries(log) as logging:
        ask(agent_of(retriever), user_msg=QUESTION)
        assert len(logging._queries._open) == 0
    assert not list(log.records())


def test_a_tool_that_fails_leaves_the_agent_its_answer(retriever, log):
    class Broken(Static):
        def _retrieve(self, query_bundle: Any) -> Any:
            raise OSError

    with log_queries(log):
        ask(agent_of(Broken(), [("search", "the cat"), ("other", "the sun")]), user_msg=QUESTION)
    record = only(log)
    assert told(record) == (QUESTION, f"on {QUESTION}")
    assert found(record) == [(fetched("the sun"), "static")]


def test_an_agent_that_fails_is_logged_with_what_it_had(retriever, log):
    with log_queries(log), pytest.raises(Exception) as failure:
        ask(agent_of(retriever, [("search", "the cat")], model=FailingModel), user_msg=QUESTION)
    record = only(log)
    assert told(record) == (QUESTION, None)
    assert record.metadata == {"error": type(failure.value).__name__}
    assert found(record) == expected(retriever, "the cat")


# ---------------------------------------------------------------------- workflows of one's own


class Found(Event):
    nodes: list[Any]


class Answered(StopEvent):
    """A stop event with a field of its own."""

    answer: str


class Flow(Workflow):
    """Retrieves, drops one node, and returns what it is told to."""

    def __init__(self, retriever: Any, result: Callable[[Any], Any], **options: Any) -> None:
        super().__init__(**options)
        self._retriever, self._result = retriever, result

    @step
    async def retrieve(self, event: StartEvent) -> Found:
        return Found(nodes=await self._retriever.aretrieve("the cat"))

    @step
    async def answer(self, event: Found) -> StopEvent:
        result = self._result(Copying().postprocess_nodes(event.nodes[:1]))
        if asyncio.iscoroutine(result):
            result = await result
        return result if isinstance(result, StopEvent) else StopEvent(result=result)


@pytest.mark.parametrize(
    ("given", "result", "texts"),
    [
        ({"query": QUESTION}, "said", (QUESTION, "said")),
        ({"question": QUESTION, "query": "rewritten"}, {"answer": "said", "draft": "a long text"}, (QUESTION, "said")),
        ({"messages": [ChatMessage(role="user", content=QUESTION)]}, Answered(answer="said"), (QUESTION, "said")),
        (
            {"user_msg": QUESTION},
            ChatResponse(message=ChatMessage(role="assistant", content="said")),
            (QUESTION, "said"),
        ),
        ({"input": QUESTION}, CompletionResponse(text="said"), (QUESTION, "said")),
        ({"query": QUESTION}, Response(response="said"), (QUESTION, "said")),
        ({"query": QUESTION}, Response(response=None), (QUESTION, None)),
        ({"topic": QUESTION}, {"draft": "a long text"}, ("the cat", None)),
        ({"topic": QUESTION}, 42, ("the cat", None)),
        ({"topic": QUESTION}, None, ("the cat", None)),
    ],
)
def test_question_and_answer_of_a_workflow_come_in_many_shapes(retriever, log, given, result, texts):
    with log_queries(log):
        ask(Flow(retriever, lambda nodes: result), **given)
    record = only(log)
    assert told(record) == texts
    assert found(record) == expected(retriever, "the cat")[:1]
    assert record.explained == 1
    assert [stage.name for stage in record.hits[0].stages][1:] == ["Copying"]
    assert not record.metadata


@pytest.mark.parametrize(
    ("question", "answer"), [("topic", "final"), (lambda event: event.topic, lambda result: result["final"])]
)
def test_the_user_says_where_question_and_answer_stand(retriever, log, question, answer):
    with log_queries(log, question_key=question, answer_key=answer):
        ask(Flow(retriever, lambda nodes: {"final": "said", "answer": "a draft"}), topic=QUESTION, query="rewritten")
    assert told(only(log)) == (QUESTION, "said")


def test_the_nodes_of_a_response_are_its_sources(index, log):
    retriever = ExplainingRetriever(index.as_retriever(similarity_top_k=4))
    with log_queries(log):
        response = ask(Flow(retriever, lambda nodes: Response("said", source_nodes=nodes)), query=QUESTION)
    record = only(log)
    assert told(record) == (QUESTION, "said")
    assert [hit.id for hit in record.hits] == [node.node.node_id for node in response.source_nodes]


def test_an_answer_that_a_workflow_streams_is_logged_when_it_was_read(retriever, log):
    async def words() -> AsyncIterator[str]:
        for word in ("said", " so"):
            yield word

    async def read() -> str:
        flow = Flow(retriever, lambda nodes: AsyncStreamingResponse(response_gen=words(), source_nodes=nodes))
        response = await flow.run(query=QUESTION)
        assert not list(log.records())
        return "".join([word async for word in response.async_response_gen()])

    with log_queries(log):
        assert asyncio.run(read()) == "said so"
    record = only(log)
    assert told(record) == (QUESTION, "said so")
    assert found(record) == expected(retriever, "the cat")[:1]


def test_a_workflow_inside_another_is_a_part_of_it(retriever, log):
    async def inner(nodes: Any) -> str:
        return f"{await Flow(retriever, lambda nodes: 'inner').run(query='inner')} and outer"

    with log_queries(log):
        ask(Flow(retriever, inner), query=QUESTION)
    record = only(log)
    assert told(record) == (QUESTION, "inner and outer")
    assert [query for query, _ in found(record)] == ["the cat", "the cat"]


class Waiting(Flow):
    @step
    async def answer(self, event: Found) -> StopEvent:
        await asyncio.sleep(30)
        return StopEvent(result="too late")


@pytest.mark.parametrize(
    ("stop", "error"),
    [
        (lambda handler: handler.cancel_run(), "it was cancelled"),
        (lambda handler: handler.cancel(), "CancelledError"),
        (None, "WorkflowTimeoutError"),
    ],
    ids=["run", "task", "timeout"],
)
def test_a_workflow_that_is_stopped_is_logged_with_what_it_had(retriever, log, stop, error):
    async def run() -> None:
        handler = Waiting(retriever, str, timeout=None if stop else 1.0).run(query=QUESTION)
        async for event in handler.stream_events(expose_internal=True):
            if isinstance(event, Event) and "Found" in repr(event) and stop:
                stopped = stop(handler)
                if asyncio.iscoroutine(stopped):
                    await stopped
                break
        await handler

    with log_queries(log) as logging:
        with pytest.raises((Exception, asyncio.CancelledError)):
            asyncio.run(run())
        assert len(logging._queries._open) == 0
    record = only(log)
    assert told(record) == (QUESTION, None)
    assert record.metadata == {"error": error}
    assert found(record) == expected(retriever, "the cat")


def test_workflows_that_ask_nothing_leave_no_record_and_their_functions_alone(log: ExplanationLog, caplog):
    class Idle(Workflow):
        @step
        async def only(self, event: StartEvent) -> StopEvent:
            return StopEvent(result="said")

    with log_queries(log, answer_key=lambda result: result.nowhere) as logging:
        assert ask(Idle(), query=QUESTION) == "said"
        assert len(logging._queries._open) == 0
    assert not list(log.records())
    assert not caplog.text
