"""ExplanationLogHandler on real LangGraph graphs and agents: the question and the answer under any key of the state."""

from __future__ import annotations

import asyncio
import operator
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import create_retriever_tool
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_rag_explain import ExplainingRetriever, ExplanationLogHandler
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, create_react_agent, tools_condition
from langgraph.types import Command, interrupt
from pydantic import BaseModel

from integrations.langchain.tests.test_langchain_callback import WORDS, Static, only
from rag_explain.log import ExplanationLog, Record

QUESTION = "why did the dog bark?"


class State(TypedDict, total=False):
    question: str
    context: list[Any]
    generation: str


class PydanticState(BaseModel):
    question: str
    answer: str | None = None


@dataclass
class DataclassState:
    question: str
    answer: str | None = None


class Oddly(TypedDict, total=False):
    topic: str
    draft: str
    text: str
    final: str


@pytest.fixture(scope="module")
def retriever(store: InMemoryVectorStore) -> ExplainingRetriever:
    return ExplainingRetriever(vectorstore=store, k=2)


@pytest.fixture
def handler(log: ExplanationLog) -> ExplanationLogHandler:
    return ExplanationLogHandler(log)


def graph_of(state: Any, *nodes: Any, **options: Any) -> Any:
    """A graph whose nodes run one after the other."""
    graph = StateGraph(state)
    for last, node in zip([START, *(one.__name__ for one in nodes)], nodes, strict=False):
        graph.add_node(node.__name__, node).add_edge(last, node.__name__)
    return graph.compile(**options)


def told(record: Record) -> tuple[str | None, str | None]:
    return record.query, record.answer


# ---------------------------------------------------------------------- states


@pytest.mark.parametrize("state", [PydanticState, DataclassState])
@pytest.mark.parametrize("as_object", [True, False])
def test_states_that_are_objects(retriever, log, handler, state, as_object):
    def respond(given: Any) -> Any:
        retriever.invoke("the cat")
        return state(question=given.question, answer="said")

    given = state(question=QUESTION) if as_object else {"question": QUESTION}
    graph_of(state, respond).invoke(given, {"callbacks": [handler]})
    record = only(log)
    assert told(record) == (QUESTION, "said")
    assert [record.asked(index) for index in range(2)] == ["the cat"] * 2
    assert record.explained == 2


def test_a_state_with_typed_keys_is_the_same_in_every_mode_of_streaming(retriever, log, handler):
    def retrieve(state: State) -> Any:
        return {"context": retriever.invoke(state["question"])}

    def generate(state: State) -> Any:
        return {"generation": f"{len(state['context'])} found"}

    graph, config = graph_of(State, retrieve, generate), {"callbacks": [handler]}
    given = {"question": QUESTION}

    async def asynchronously() -> None:
        await graph.ainvoke(given, config)
        async for _ in graph.astream(given, config, stream_mode="messages"):
            pass

    graph.invoke(given, config)
    for mode in ("values", "updates", "messages", ["values", "updates"]):
        list(graph.stream(given, config, stream_mode=mode))
    graph.batch([given] * 3, config)
    asyncio.run(asynchronously())
    records = list(log.records())
    assert len(records) == 10
    assert {told(record) for record in records} == {(QUESTION, "2 found")}
    assert {record.explained for record in records} == {2}


def odd_graph(retriever: Any) -> Any:
    def respond(state: Oddly) -> Any:
        retriever.invoke("the cat")
        return {"draft": "a long text that is no answer", "text": "neither is this", "final": "said"}

    return graph_of(Oddly, respond)


def test_an_answer_that_cannot_be_told_is_none(retriever, log, handler):
    odd_graph(retriever).invoke({"topic": QUESTION}, {"callbacks": [handler]})
    assert told(only(log)) == ("the cat", None)


@pytest.mark.parametrize(
    ("question", "answer"),
    [("topic", "final"), (lambda state: state["topic"], lambda state: AIMessage(state["final"]))],
)
def test_the_user_says_where_question_and_answer_stand(retriever, log, question, answer):
    handler = ExplanationLogHandler(log, question_key=question, answer_key=answer)
    odd_graph(retriever).invoke({"topic": QUESTION}, {"callbacks": [handler]})
    assert told(only(log)) == (QUESTION, "said")


def test_a_function_of_the_users_that_fails_costs_only_the_text_and_is_said(retriever, log, caplog):
    handler = ExplanationLogHandler(log, answer_key=lambda state: state["nowhere"])
    odd_graph(retriever).invoke({"topic": QUESTION}, {"callbacks": [handler]})
    assert told(only(log)) == ("the cat", None)
    assert "answer_key: nothing can be told from a dict: KeyError" in caplog.text


def test_what_an_earlier_turn_left_in_the_state_is_no_answer_of_this_one(retriever, log, handler):
    def retrieve(state: State) -> Any:
        return {"context": [one.id for one in retriever.invoke(state["question"])]}

    def route(state: State) -> Any:
        return Command(goto="generate" if "dog" in state["question"] else END)

    def generate(state: State) -> Any:
        return Command(update={"generation": f"on {state['question']}"})

    graph = StateGraph(State).add_node(retrieve).add_node(route, destinations=("generate", END)).add_node(generate)
    compiled = graph.add_edge(START, "retrieve").add_edge("retrieve", "route").compile(checkpointer=InMemorySaver())
    config = {"callbacks": [handler], "configurable": {"thread_id": "one"}}
    compiled.invoke({"question": QUESTION}, config)
    second = compiled.invoke({"question": "the cat"}, config)
    assert second["generation"] == f"on {QUESTION}"
    assert [told(record) for record in log.records()] == [(QUESTION, f"on {QUESTION}"), ("the cat", None)]
    assert {record.metadata["langgraph_thread_id"] for record in log.records()} == {"one"}


def test_a_graph_inside_a_chain_or_a_subgraph_is_a_part_of_it(retriever, log, handler):
    def respond(state: State) -> Any:
        retriever.invoke(state["question"])
        return {"generation": "said"}

    inner = graph_of(State, respond)
    inner_node = StateGraph(State).add_node("inner", inner).add_edge(START, "inner").compile()
    chain = inner | RunnableLambda(lambda state: {"answer": f"{state['generation']} so"})
    inner_node.invoke({"question": QUESTION}, {"callbacks": [handler]})
    chain.invoke({"question": QUESTION}, {"callbacks": [handler]})
    assert [told(record) for record in log.records()] == [(QUESTION, "said"), (QUESTION, "said so")]


def test_parallel_branches_end_in_one_record(retriever, log, handler):
    class Both(TypedDict, total=False):
        query: str
        context: Annotated[list[Any], operator.add]
        response: str

    def one(state: Both) -> Any:
        return {"context": retriever.invoke("the cat")}

    def other(state: Both) -> Any:
        return {"context": Static().invoke("the sun")}

    def generate(state: Both) -> Any:
        return {"response": f"{len(state['context'])} found"}

    graph = StateGraph(Both).add_node(one).add_node(other).add_node(generate)
    graph.add_edge(START, "one").add_edge(START, "other").add_edge(["one", "other"], "generate")
    graph.compile().invoke({"query": QUESTION}, {"callbacks": [handler]})
    record = only(log)
    assert told(record) == (QUESTION, "3 found")
    assert {(hit.id, record.asked(index)) for index, hit in enumerate(record.hits)} == {
        *((found.id, "the cat") for found in retriever.invoke("the cat")),
        ("static", "the sun"),
    }


def test_a_node_that_fails(retriever, log, handler):
    def respond(state: State) -> Any:
        retriever.invoke("the cat")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        graph_of(State, respond).invoke({"question": QUESTION}, {"callbacks": [handler]})
    record = only(log)
    assert told(record) == (QUESTION, None)
    assert record.metadata["error"] == "ZeroDivisionError"


def test_functions_as_graphs(retriever, log, handler):
    @task
    def search(question: str) -> list[str]:
        return [one.id for one in retriever.invoke(question)]

    @entrypoint(checkpointer=InMemorySaver())
    def ask(question: str) -> Any:
        found = search(question).result()
        return entrypoint.final(value={"answer": f"{len(found)} found"}, save="something else")

    ask.invoke(QUESTION, {"callbacks": [handler], "configurable": {"thread_id": "one"}})
    assert told(only(log)) == (QUESTION, "2 found")


# ---------------------------------------------------------------------- interrupts


def interrupted_graph(retriever: Any, **options: Any) -> Any:
    def retrieve(state: State) -> Any:
        return {"context": [one.page_content for one in retriever.invoke(f"{state['question']} moon")]}

    def approve(state: State) -> Any:
        return {"generation": "said"} if options or interrupt("shall I answer?") == "yes" else {"generation": "no"}

    return graph_of(State, retrieve, approve, checkpointer=InMemorySaver(), **options)


@pytest.mark.parametrize(
    ("options", "resume", "marks"),
    [({}, Command(resume="yes"), [True, False]), ({"interrupt_before": ["approve"]}, None, [False, False])],
)
def test_a_resumed_run_goes_on_with_question_and_sources(retriever, log, handler, options, resume, marks):
    graph = interrupted_graph(retriever, **options)
    config = {"callbacks": [handler], "configurable": {"thread_id": "one"}}
    other = {"callbacks": [handler], "configurable": {"thread_id": "two"}}
    graph.invoke({"question": QUESTION}, config)
    graph.invoke({"question": "the cat?"}, other)
    list(graph.stream(resume, config))
    graph.invoke({"question": "the sun?"}, other)  # asked anew, not resumed
    records = list(log.records())
    assert [told(record) for record in records] == [
        (QUESTION, None),
        ("the cat?", None),
        (QUESTION, "said"),
        ("the sun?", None),
    ]
    assert [record.asked(0) for record in records] == [f"{record.query} moon" for record in records]
    assert [hit.id for hit in records[2].hits] == [hit.id for hit in records[0].hits]
    assert [record.explained for record in records] == [2] * 4
    assert [record.metadata.get("interrupted", False) for record in (records[0], records[2])] == marks


def test_what_a_node_asked_before_it_was_interrupted_is_told_once(retriever, log, handler):
    def one(state: State) -> Any:
        return {"context": [one.id for one in retriever.invoke("the sun")]}

    def other(state: State) -> Any:
        found = retriever.invoke("the cat")
        return {"generation": f"{interrupt('how many?')} of {len(found)}"}

    graph = graph_of(State, one, other, checkpointer=InMemorySaver())
    config = {"callbacks": [handler], "configurable": {"thread_id": "one"}}
    graph.invoke({"question": QUESTION}, config)
    graph.invoke(Command(resume="one"), config)
    first, second = log.records()
    assert (told(first), told(second)) == ((QUESTION, None), (QUESTION, "one of 2"))
    for record in (first, second):
        assert [record.asked(index) for index in range(4)] == ["the sun", "the sun", "the cat", "the cat"]
        assert [hit.rank for hit in record.hits] == [1, 2, 3, 4]


def test_a_run_that_failed_and_is_tried_again_goes_on_with_its_sources(retriever, log, handler):
    failures = [ZeroDivisionError()]

    def retrieve(state: State) -> Any:
        return {"context": [one.id for one in retriever.invoke("the cat")]}

    def generate(state: State) -> Any:
        if failures:
            raise failures.pop()
        return {"generation": "said"}

    graph = graph_of(State, retrieve, generate, checkpointer=InMemorySaver())
    config = {"callbacks": [handler], "configurable": {"thread_id": "one"}}
    with pytest.raises(ZeroDivisionError):
        graph.invoke({"question": QUESTION}, config)
    graph.invoke(None, config)
    assert [told(record) for record in log.records()] == [(QUESTION, None), (QUESTION, "said")]
    assert [record.explained for record in log.records()] == [2, 2]


def test_many_threads_at_once_are_interrupted_and_resumed_each_with_its_own(retriever, log, handler):
    graph = interrupted_graph(retriever)

    async def talk(word: str) -> None:
        config = {"callbacks": [handler], "configurable": {"thread_id": word}}
        await graph.ainvoke({"question": word}, config)
        await graph.ainvoke(Command(resume="yes"), config)

    async def all_of_them() -> None:
        await asyncio.gather(*(talk(word) for word in WORDS[:20]))

    asyncio.run(all_of_them())
    answered = {record.query: record for record in log.records() if record.answer is not None}
    assert sorted(answered) == sorted(WORDS[:20])
    for word, record in answered.items():
        assert record.answer == "said"
        assert record.metadata["langgraph_thread_id"] == word
        assert [record.asked(index) for index in range(2)] == [f"{word} moon"] * 2
        assert [hit.id for hit in record.hits] == [found.id for found in retriever.invoke(f"{word} moon")]
    assert len(handler._runs) == len(handler._unanswered) == 0


def test_a_run_resumed_elsewhere_finds_its_question_in_the_state(retriever, log):
    def approve(state: State) -> Any:
        interrupt("shall I search?")
        return {"generation": f"{len(retriever.invoke('the cat'))} found"}

    graph, config = graph_of(State, approve, checkpointer=InMemorySaver()), {"configurable": {"thread_id": "one"}}
    graph.invoke({"question": QUESTION}, config)
    graph.invoke(Command(resume="yes"), {**config, "callbacks": [ExplanationLogHandler(log)]})
    assert told(only(log)) == (QUESTION, "2 found")


def test_a_run_that_was_interrupted_before_it_asked_anything_keeps_its_question(retriever, log, handler):
    @entrypoint(checkpointer=InMemorySaver())
    def ask(question: str) -> str:
        return f"{len(retriever.invoke(interrupt('what shall I search?')))} found"

    config = {"callbacks": [handler], "configurable": {"thread_id": "one"}}
    ask.invoke(QUESTION, config)
    assert not list(log.records())
    ask.invoke(Command(resume="the cat"), config)
    record = only(log)
    assert told(record) == (QUESTION, "2 found")
    assert record.asked(0) == "the cat"


# ---------------------------------------------------------------------- messages


class Scripted(BaseChatModel):
    """Calls these tools in turn, then answers; a turn begins with what the human says last."""

    calls: list[dict[str, Any]]

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **options: Any) -> Any:
        return self

    def _generate(self, messages: list[BaseMessage], *arguments: Any, **options: Any) -> ChatResult:
        human = max(index for index, one in enumerate(messages) if isinstance(one, HumanMessage))
        done = sum(isinstance(one, ToolMessage) for one in messages[human:])
        said = AIMessage([{"type": "text", "text": f"on {messages[human].text}"}])
        if done < len(self.calls):
            said = AIMessage("let me look", tool_calls=[{**self.calls[done], "id": f"call {done}"}])
        return ChatResult(generations=[ChatGeneration(message=said)])


def agent_of(retriever: Any, *queries: str, **options: Any) -> Any:
    """What an agent is in LangGraph: a model and its tools in turn."""
    tools = [create_retriever_tool(retriever, "search", "finds")]
    model = Scripted(calls=[{"name": "search", "args": {"query": query}} for query in queries])

    def agent(state: MessagesState) -> Any:
        return {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState).add_node(agent).add_node("tools", ToolNode(tools)).add_edge("tools", "agent")
    return graph.add_edge(START, "agent").add_conditional_edges("agent", tools_condition).compile(**options)


def test_an_agent_that_asks_its_tool_twice(retriever, log, handler):
    agent = agent_of(retriever, "the cat", "the sun")
    agent.invoke({"messages": [{"role": "user", "content": QUESTION}]}, {"callbacks": [handler]})
    record = only(log)
    assert told(record) == (QUESTION, f"on {QUESTION}")
    assert [record.asked(index) for index in range(4)] == ["the cat", "the cat", "the sun", "the sun"]
    assert [hit.rank for hit in record.hits] == [1, 2, 3, 4]
    assert record.explained == 4


# It has moved to the package `langchain`, which this distribution does not need.
@pytest.mark.filterwarnings("ignore:create_react_agent has been moved")
def test_the_agent_that_comes_with_langgraph(retriever, log, handler):
    tools = [create_retriever_tool(retriever, "search", "finds")]
    model = Scripted(calls=[{"name": "search", "args": {"query": "the cat"}}])
    agent = create_react_agent(model, tools)

    async def ask() -> None:
        given = {"messages": [HumanMessage(QUESTION)]}
        async for _ in agent.astream(given, {"callbacks": [handler]}, stream_mode="messages"):
            pass

    asyncio.run(ask())
    record = only(log)
    assert told(record) == (QUESTION, f"on {QUESTION}")
    assert record.asked(1) == "the cat"


def test_every_turn_of_a_conversation_is_a_record_of_its_own(retriever, log, handler):
    agent = agent_of(retriever, "the cat", checkpointer=InMemorySaver())
    config = {"callbacks": [handler], "configurable": {"thread_id": "one"}}
    for turn in (QUESTION, "and the cat?"):
        agent.invoke({"messages": [("user", turn)]}, config)
    assert [told(record) for record in log.records()] == [
        (QUESTION, f"on {QUESTION}"),
        ("and the cat?", "on and the cat?"),
    ]
    assert [len(record.hits) for record in log.records()] == [2, 2]


def test_an_agent_that_calls_no_tool_is_none_of_our_business(retriever, log, handler):
    agent_of(retriever).invoke({"messages": [("user", QUESTION)]}, {"callbacks": [handler]})
    assert not list(log.records())


def test_what_a_model_says_before_it_calls_a_tool_is_no_answer(retriever, log, handler):
    agent = agent_of(retriever, "the cat", "the sun", checkpointer=InMemorySaver(), interrupt_before=["tools"])
    config = {"callbacks": [handler], "configurable": {"thread_id": "one"}}
    agent.invoke({"messages": [("user", QUESTION)]}, config)
    agent.invoke(None, config)
    assert told(only(log)) == (QUESTION, None)
    agent.invoke(None, config)
    *_, record = log.records()
    assert told(record) == (QUESTION, f"on {QUESTION}")
    assert [record.asked(index) for index in range(4)] == ["the cat", "the cat", "the sun", "the sun"]
