"""LangGraph with real checkpoints: what is stored and resumed is what a plain retriever's documents would be."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from copy import copy, deepcopy
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import pytest
from langchain_core.documents import Document
from langchain_core.load import dumps, loads
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.tools import create_retriever_tool
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_rag_explain import ExplainedDocument, ExplainingRetriever, get_explanation
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

QUESTION = "why did the dog look at the moon?"
THREAD: Any = {"configurable": {"thread_id": "1"}}
SERIALIZERS: dict[str, dict[str, Any]] = {
    "default": {"allowed_msgpack_modules": True},
    "strict": {"allowed_msgpack_modules": None},
    "strict or pickle": {"allowed_msgpack_modules": None, "pickle_fallback": True},
}
TEMPLATE = ChatPromptTemplate.from_template("Answer from {documents}\n{question}")


class State(TypedDict, total=False):
    question: str
    documents: list[Document]
    prompt: str


PROMPTS: dict[str, Callable[[State], str]] = {
    "f-string": lambda state: f"{state['documents']}\n{state['question']}",
    "template": lambda state: TEMPLATE.invoke(dict(state)).to_string(),
    "state": str,
    "contents": lambda state: "\n".join(one.page_content for one in state["documents"]),
}


@pytest.fixture(params=["memory", "sqlite"])
def saver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[str], BaseCheckpointSaver[Any]]]:
    """Makes a saver with one of the serializers; a second one reads what the first has written."""
    opened: list[Any] = []

    def make(name: str) -> BaseCheckpointSaver[Any]:
        serde = JsonPlusSerializer(**SERIALIZERS[name])
        if request.param == "memory":
            saver: Any = opened[0] if opened else InMemorySaver(serde=serde)
        else:
            import sqlite3

            connection = sqlite3.connect(tmp_path / "checkpoints.sqlite", check_same_thread=False)
            saver = SqliteSaver(connection, serde=serde)
        opened.append(saver)
        return saver  # type: ignore[no-any-return]

    yield make
    for one in opened:
        if isinstance(one, SqliteSaver):
            one.conn.close()


def graph(retriever: BaseRetriever, saver: BaseCheckpointSaver[Any], prompt: Callable[[State], str]) -> Any:
    """Retrieves, is interrupted, and makes a prompt of what it finds in its state."""
    builder = StateGraph(State)
    builder.add_node("retrieve", lambda state: {"documents": retriever.invoke(state["question"])})
    builder.add_node("generate", lambda state: {"prompt": prompt(state)})
    builder.add_edge(START, "retrieve")
    builder.add_edge("retrieve", "generate")
    builder.add_edge("generate", END)
    return builder.compile(checkpointer=saver, interrupt_before=["generate"])


def resumed(retriever: BaseRetriever, saver: Any, name: str, prompt: str) -> State:
    """The state of a graph that was interrupted and went on from its checkpoint."""
    graph(retriever, saver(name), PROMPTS[prompt]).invoke({"question": QUESTION}, THREAD)
    return graph(retriever, saver(name), PROMPTS[prompt]).invoke(None, THREAD)  # type: ignore[no-any-return]


def stored(saver: Any) -> str:
    """Everything that a saver keeps."""
    if isinstance(saver, SqliteSaver):
        return repr([saver.conn.execute(f"select * from {table}").fetchall() for table in ("checkpoints", "writes")])
    return repr((saver.storage, saver.blobs, saver.writes))


@pytest.fixture
def plain(store: InMemoryVectorStore) -> BaseRetriever:
    return store.as_retriever(search_kwargs={"k": 2})


@pytest.fixture
def made_of_objects(store: InMemoryVectorStore) -> BaseRetriever:
    """A retriever of documents that msgpack cannot hold, so that the serializer falls back to pickle, where it may."""
    held = InMemoryVectorStore(store.embeddings)
    held.add_texts(["the dog looked at the moon", "a cat"], metadatas=[{"at": 1j}, {"at": 2j}], ids=["a", "b"])
    return held.as_retriever()


@pytest.mark.parametrize("mode", ["lazy", "eager", "looked at"])
@pytest.mark.parametrize("name", SERIALIZERS)
def test_a_resumed_state_holds_plain_documents_and_nothing_of_the_explanations(
    plain: BaseRetriever, saver: Callable[[str], Any], name: str, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    wrapped = ExplainingRetriever(retriever=plain, explain="eager" if mode == "eager" else "lazy")
    asked = Looking(retriever=wrapped) if mode == "looked at" else wrapped
    state = resumed(asked, saver, name, "f-string")
    expected = plain.invoke(QUESTION)
    assert state["documents"] == expected
    assert [type(one) for one in state["documents"]] == [Document] * 2
    assert [one.metadata for one in state["documents"]] == [one.metadata for one in expected]
    assert "page_content" in (kept := stored(saver(name)))
    assert "rag_explain" not in kept
    assert "ExplainedDocument" not in kept
    assert "bilrp" not in kept
    assert not [record for record in caplog.records if record.name.startswith("langgraph")]
    assert [get_explanation(one) for one in state["documents"]] == [None, None]


@pytest.mark.parametrize("mode", ["lazy", "eager"])
@pytest.mark.parametrize("name", SERIALIZERS)
def test_what_is_written_is_what_is_written_for_a_plain_document(plain: BaseRetriever, name: str, mode: str) -> None:
    serializer = JsonPlusSerializer(**SERIALIZERS[name])
    documents = ExplainingRetriever(retriever=plain, explain=mode).invoke(QUESTION)
    assert all(isinstance(one, ExplainedDocument) for one in documents)
    assert serializer.dumps_typed(documents) == serializer.dumps_typed(plain.invoke(QUESTION))


@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_a_pickle_in_a_checkpoint_holds_plain_documents(
    made_of_objects: BaseRetriever, saver: Callable[[str], Any], mode: str
) -> None:
    wrapped = ExplainingRetriever(retriever=made_of_objects, explain=mode)
    state = resumed(wrapped, saver, "strict or pickle", "f-string")
    assert "pickle" in (kept := stored(saver("strict or pickle")))
    assert "rag_explain" not in kept
    assert [type(one) for one in state["documents"]] == [Document] * 2
    assert state["documents"] == made_of_objects.invoke(QUESTION)
    with pytest.raises(TypeError, match="not msgpack serializable"):
        JsonPlusSerializer().dumps_typed(wrapped.invoke(QUESTION))


@pytest.mark.parametrize("mode", ["lazy", "eager"])
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("name", SERIALIZERS)
def test_nothing_prints_into_a_prompt_built_from_a_resumed_state(
    plain: BaseRetriever, saver: Callable[[str], Any], name: str, prompt: str, mode: str
) -> None:
    made = resumed(ExplainingRetriever(retriever=plain, explain=mode), saver, name, prompt)["prompt"]
    expected = PROMPTS[prompt]({"question": QUESTION, "documents": plain.invoke(QUESTION)})
    assert QUESTION in made or prompt == "contents"
    assert made == expected


@pytest.mark.parametrize("name", SERIALIZERS)
def test_with_a_metadata_key_a_prompt_grows_by_a_line_and_a_resumed_one_by_plain_data(
    plain: BaseRetriever, saver: Callable[[str], Any], name: str
) -> None:
    wrapped = ExplainingRetriever(retriever=plain, explain="eager", metadata_key="why")
    for prompt in ("f-string", "template", "state"):
        at_once, before = (
            PROMPTS[prompt]({"question": QUESTION, "documents": one.invoke(QUESTION)}) for one in (wrapped, plain)
        )
        assert 0 < len(at_once) - len(before) <= 2 * 120
    state = resumed(wrapped, saver, name, "contents")
    assert state["prompt"] == PROMPTS["contents"]({"documents": plain.invoke(QUESTION)})
    for document, original in zip(state["documents"], wrapped.invoke(QUESTION), strict=True):
        assert type(document) is Document
        assert type(document.metadata["why"]) is dict
        why = get_explanation(document)
        assert why is not None
        np.testing.assert_array_equal(why.matrix, get_explanation(original).matrix)  # type: ignore[union-attr]
        assert '"matrix"' in str(document).replace("'", '"')  # metadata that was read back prints in full


def test_a_process_that_has_only_langchain_resumes_the_state(plain: BaseRetriever, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoints.sqlite")
    with SqliteSaver.from_conn_string(path) as written:
        wrapped = ExplainingRetriever(retriever=plain, explain="eager")
        graph(wrapped, written, str).invoke({"question": QUESTION}, THREAD)
    code = """
import sys
from langgraph.checkpoint.sqlite import SqliteSaver
with SqliteSaver.from_conn_string(sys.argv[1]) as saver:
    state = saver.get_tuple({"configurable": {"thread_id": "1"}}).checkpoint["channel_values"]
print(*(type(one).__module__ + "." + type(one).__name__ for one in state["documents"]))
print(*(name for name in sys.modules if "rag_explain" in name))
"""
    strict = {**os.environ, "LANGGRAPH_STRICT_MSGPACK": "true"}
    done = subprocess.run([sys.executable, "-c", code, path], env=strict, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["langchain_core.documents.base.Document"] * 2
    assert done.stderr == ""


@pytest.mark.parametrize("name", SERIALIZERS)
def test_the_artifact_of_an_agents_tool_resumes_like_that_of_a_plain_retriever(
    plain: BaseRetriever, saver: Callable[[str], Any], name: str
) -> None:
    call = AIMessage("", tool_calls=[{"name": "notes", "args": {"query": QUESTION}, "id": "1", "type": "tool_call"}])

    def answered(retriever: BaseRetriever, saver: Any) -> tuple[ToolMessage, ToolMessage]:
        """The tool's message as the first run has it, and as the graph finds it when it goes on."""
        seen: list[ToolMessage] = []
        tool = create_retriever_tool(retriever, "notes", "notes", response_format="content_and_artifact")
        builder = StateGraph(MessagesState)
        builder.add_node("tools", ToolNode([tool]))
        builder.add_node("model", lambda state: seen.append(state["messages"][-1]) or {"messages": []})
        builder.add_edge(START, "tools")
        builder.add_edge("tools", "model")
        made = builder.compile(checkpointer=saver, interrupt_before=["model"])
        first = made.invoke({"messages": [call]}, THREAD)["messages"][-1]
        made.invoke(None, THREAD)
        return first, seen[0]

    expected, resumed = answered(plain, InMemorySaver())
    first, again = answered(ExplainingRetriever(retriever=plain, explain="eager"), saver(name))
    assert first.content == again.content == expected.content
    assert [get_explanation(one).query for one in first.artifact] == [QUESTION] * 2  # type: ignore[union-attr]
    assert again.artifact == resumed.artifact  # LangGraph makes dictionaries of what is in a message's artifact
    assert [Document(**one) for one in again.artifact] == expected.artifact
    assert "rag_explain" not in stored(saver(name))


def test_copies_keep_what_stands_beside_and_what_is_stored_is_the_plain_document(plain: BaseRetriever) -> None:
    document, expected = (
        one.invoke(QUESTION)[0] for one in (ExplainingRetriever(retriever=plain, explain="eager"), plain)
    )
    why = get_explanation(document)
    assert why is not None
    for kept in (copy(document), deepcopy(document), document.model_copy(), document.model_copy(update={"id": "b"})):
        assert get_explanation(kept) is why
    with pytest.warns(DeprecationWarning, match="`copy` method is deprecated"):
        old = document.copy()
    for again in (
        old,
        *(pickle.loads(pickle.dumps(document, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)),
        Document(**document.model_dump()),
        Document.model_validate(document.model_dump()),
        Document.model_validate_json(document.model_dump_json()),
        document.__class__(**document.model_dump()),
    ):
        assert type(again) is Document
        assert again == expected
        assert get_explanation(again) is None
    assert dumps(document) == dumps(expected)
    assert b"rag_explain" not in pickle.dumps([document, old])


@pytest.mark.filterwarnings("ignore:The function `loads` is in beta")
def test_a_document_says_of_itself_only_what_is_true(plain: BaseRetriever) -> None:
    document = ExplainingRetriever(retriever=plain).invoke(QUESTION)[0]
    made_anew = ExplainedDocument.model_validate(document.model_dump())
    for alone in (made_anew, copy(made_anew), ExplainedDocument("the moon")):
        assert not hasattr(alone, "hit")
        assert get_explanation(alone) is None
        for name in ("hit", "explanation"):
            with pytest.raises(AttributeError, match="no explanation stands beside this document: it was made"):
                getattr(alone, name)
        with pytest.raises(AttributeError, match="no attribute 'hits'"):
            _ = alone.hits
    assert not hasattr(loads(dumps(document), allowed_objects="core"), "hit")


def test_documents_cross_processes_as_plain_documents(plain: BaseRetriever) -> None:
    documents = ExplainingRetriever(retriever=plain, explain="eager").invoke(QUESTION)
    why = get_explanation(documents[0])
    assert why is not None
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        assert pool.submit(_kinds, documents).result() == ["Document"] * 2
        assert pool.submit(_echo, documents).result() == plain.invoke(QUESTION)
        assert pool.submit(_echo, why).result().to_dict() == why.to_dict()  # an explanation travels by itself


def _kinds(documents: Sequence[Document]) -> list[str]:
    return [type(one).__name__ for one in documents]


def _echo(value: Any) -> Any:
    return value


def test_the_events_of_a_graph_are_json_of_plain_documents(plain: BaseRetriever) -> None:
    async def ends(retriever: BaseRetriever) -> list[str]:
        made = graph(retriever, InMemorySaver(), str)
        events = made.astream_events({"question": QUESTION}, THREAD, version="v2")
        return [dumps(one["data"]) async for one in events if one["event"].endswith("_end")]

    expected, found = (asyncio.run(ends(one)) for one in (plain, ExplainingRetriever(retriever=plain, explain="eager")))
    inner = found.pop(0)  # the retriever inside
    assert json.loads(inner) == json.loads(expected[0])
    assert found == expected


class Looking(BaseRetriever):
    """Looks at the explanations before it returns the documents."""

    retriever: BaseRetriever

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        documents = self.retriever.invoke(query)
        assert all(get_explanation(one) for one in documents)
        return documents
