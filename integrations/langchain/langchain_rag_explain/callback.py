"""A callback that logs what a chain answered, from which documents, and why those were found.

    chain.invoke(question, config={"callbacks": [ExplanationLogHandler(log)]})

Every outermost run becomes one record: the question it was given, the documents its retrievers returned, and the final
answer. Runs are told apart by their ids, never by time or thread, so any number of them may be under way at once.

A LangGraph run that was interrupted is a record without an answer. The run that resumes its thread with the same
handler is another one: it goes on with the question and the documents of the first.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document

from langchain_rag_explain.documents import carried, get_explanation, keys, reranked_score
from langchain_rag_explain.messages import answered, asked
from langchain_rag_explain.retrievers import ExplainingRetriever
from langchain_rag_explain.stores import stage_name
from langchain_rag_explain.trace import running_retriever
from rag_explain.log import ExplanationLog
from rag_explain.log.runs import NEVER_ENDED, NOT_WRAPPED, OpenRuns, OutermostRun, check_log
from rag_explain.log.states import ANSWER_KEYS, QUESTION_KEYS, Key, Lookup, member
from rag_explain.results.deferred import Deferred
from rag_explain.results.explanation import Explanation
from rag_explain.results.hits import Hit
from rag_explain.retrieval import UNNAMED, StagedHits

_MAX_UNANSWERED = 1000  # threads whose last run may be resumed; their documents are held
_WRAPPED = {"Command": "update", "final": "value"}  # what LangGraph's nodes return a part of the state in

_Found = Sequence[tuple[Document, Hit | None]]


@dataclass
class _Retrieval:
    query: str
    name: str
    outer: UUID | None  # the retriever inside which this one ran
    is_stage: bool = True  # and no wrapper, which changes nothing
    found: _Found = ()  # as the last stage left them

    @property
    def handles(self) -> set[Deferred[Explanation]]:
        """Which hits those are."""
        return {hit.handle for _, hit in self.found if hit is not None}


@dataclass
class _Answer:
    """An outermost run that has not ended yet."""

    inputs: Any
    tags: list[str]
    retrievals: dict[UUID, _Retrieval] = field(default_factory=dict)
    names: dict[UUID, str] = field(default_factory=dict)  # of all runs
    staged: StagedHits = field(default_factory=StagedHits)
    thread: str | int | None = None  # LangGraph's
    is_interrupted: bool = False
    earlier: frozenset[UUID] = frozenset()  # the retrievals of the run that this one resumes
    nodes: set[UUID] = field(default_factory=set)  # where this is the run of a graph: those of its nodes
    written: set[str] = field(default_factory=set)  # what the nodes wrote into the state

    def is_own(self, name: str, outputs: Any) -> bool:
        """Whether what the outputs hold under this name is of this run: not handed through, nor an earlier turn's."""
        given, held = member(self.inputs, name), member(outputs, name)
        is_same = given is held or (isinstance(given, str) and given == held)
        return name in self.written if self.nodes else not is_same

    def pass_through(
        self, documents: Sequence[Document], name: str, run: UUID | None, outer: UUID | None, *, is_seen: bool = False
    ) -> _Found:
        """The documents that the stage of this name returned, each with its hit."""
        found = [(keys(document), carried(document)) for document in documents]
        known = [self.staged.find(*one, run) for one in found]
        told = [
            None if hit is None else reranked_score(document, hit)
            for document, hit in zip(documents, known, strict=True)
        ]
        scores = told if any(score is not None for score in told) else None
        hits = self.staged.pass_through(name, found, scores, run=run, outer=outer, is_seen=is_seen)
        return list(zip(documents, hits, strict=True))

    def step(self, run: UUID, documents: Sequence[Document]) -> None:
        """A part of the chain returned documents: a stage, if retrievers of the chain had found them all."""
        hits = [self.staged.find(keys(document), carried(document)) for document in documents]
        handles = {None if hit is None else hit.handle for hit in hits}
        outermost = [one for one in self.retrievals.values() if one.outer is None]
        sources = [one for one in outermost if not handles.isdisjoint(one.handles)]
        if sources and handles.issubset(set().union(*(one.handles for one in sources))):
            found = self.pass_through(documents, self.names.get(run, UNNAMED), None, None)
            for source in sources:  # what a step merges is told once
                source.found = found if source is sources[0] else ()


class ExplanationLogHandler(BaseCallbackHandler):
    """Logs answer, sources and explanations of every chain it is a callback of.

    Args:
        log: where records go.
        metadata: put into every record, beside LangChain's run id and tags, and LangGraph's thread id.
        question_key: the key of the inputs (or graph state) under which the question stands, or a function that takes
            them and returns it. Otherwise it is what stands under `question`, `query` or `input`, or the last human
            message under `messages`; and what the first retriever was asked, where there is none of them.
        answer_key: the same for the answer in the outputs. Otherwise it is what stands under `answer`, `output`,
            `result`, `generation` or `response`, or an AI message that is the last of `messages`; and None, where there
            is none of them.
    """

    # On the event loop itself, and in order: nothing here takes longer than putting something into a dictionary.
    run_inline = True

    def __init__(
        self,
        log: ExplanationLog,
        *,
        metadata: Mapping[str, Any] | None = None,
        question_key: Key | None = None,
        answer_key: Key | None = None,
    ) -> None:
        check_log(log)
        self.log = log
        self.metadata = dict(metadata or {})
        self._question = Lookup("question_key", question_key, QUESTION_KEYS, asked)
        self._answer = Lookup("answer_key", answer_key, ANSWER_KEYS, answered)
        self._runs: OpenRuns[UUID, _Answer] = OpenRuns(self._give_up)
        # By thread: the last run, which has ended without an answer and may be resumed.
        self._unanswered: OpenRuns[str | int, _Answer] = OpenRuns(lambda run: None, limit=_MAX_UNANSWERED)

    # ------------------------------------------------------------------ LangChain calls these

    def on_chain_start(
        self, serialized: dict[str, Any], inputs: Any, *, run_id: UUID, parent_run_id: UUID | None = None, **more: Any
    ) -> None:
        """A chain, or a part of one, begins."""
        self._begin(run_id, parent_run_id, inputs, more)

    def on_tool_start(
        self,
        serialized: dict[str, Any],
        input_str: str,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        **more: Any,
    ) -> None:
        """A tool begins; a retriever may run inside it."""
        self._begin(run_id, parent_run_id, more.get("inputs") or input_str, more)

    def on_retriever_start(
        self, serialized: dict[str, Any], query: str, *, run_id: UUID, parent_run_id: UUID | None = None, **more: Any
    ) -> None:
        """A retriever is asked."""
        self._begin(run_id, parent_run_id, query, more)
        with self._runs.outermost(run_id) as outermost:
            if outermost is not None:
                answer = outermost.state
                outer = next((run for run in outermost.around(run_id) if run in answer.retrievals), None)
                retriever, name = running_retriever(), answer.names[run_id]
                if type(retriever).__name__ == name:  # it was given no name of its own
                    name = stage_name(retriever)
                is_stage = not isinstance(retriever, ExplainingRetriever)
                answer.retrievals[run_id] = _Retrieval(query, name, outer, is_stage)
                answer.staged.enter(run_id)

    def on_retriever_end(
        self, documents: Sequence[Document], *, run_id: UUID, parent_run_id: UUID | None = None, **more: Any
    ) -> None:
        """A retriever has found its documents."""
        with self._runs.outermost(run_id) as outermost:
            if outermost is not None and run_id in outermost.state.retrievals:
                one = outermost.state.retrievals[run_id]
                state = outermost.state
                one.found = state.pass_through(documents, one.name, run_id, one.outer, is_seen=one.is_stage)
        self._end(run_id, None, {})

    def on_chain_end(self, outputs: Any, *, run_id: UUID, parent_run_id: UUID | None = None, **more: Any) -> None:
        """A chain, or a part of one, has ended; the outermost one makes a record."""
        documents = _documents(outputs)
        with self._runs.outermost(run_id) as outermost:
            if outermost is not None:
                answer = outermost.state
                if documents:
                    answer.step(run_id, documents)
                if run_id in answer.nodes:
                    answer.written |= _written(outputs)
        self._end(run_id, outputs, {}, more.get("inputs"))

    def on_tool_end(self, output: Any, *, run_id: UUID, parent_run_id: UUID | None = None, **more: Any) -> None:
        """A tool has ended."""
        self._end(run_id, output, {})

    def on_chain_error(
        self, error: BaseException, *, run_id: UUID, parent_run_id: UUID | None = None, **more: Any
    ) -> None:
        """An answer that failed is logged without one."""
        if type(error).__name__ == "GraphInterrupt":  # of a node: its graph will end as if nothing had happened
            with self._runs.outermost(run_id) as outermost:
                if outermost is not None and run_id in outermost.state.nodes:
                    outermost.state.is_interrupted = True
        self._end(run_id, None, {"error": type(error).__name__}, more.get("inputs"))

    def on_tool_error(
        self, error: BaseException, *, run_id: UUID, parent_run_id: UUID | None = None, **more: Any
    ) -> None:
        """The same for a tool."""
        self._end(run_id, None, {"error": type(error).__name__})

    def on_retriever_error(
        self, error: BaseException, *, run_id: UUID, parent_run_id: UUID | None = None, **more: Any
    ) -> None:
        """The same for a retriever."""
        self._end(run_id, None, {"error": type(error).__name__})

    # ------------------------------------------------------------------ runs

    def _begin(self, run_id: UUID, parent: UUID | None, inputs: Any, more: Mapping[str, Any]) -> None:
        # A parent that is not known: the callback was put on a part of the chain, which is then outermost.
        if not self._runs.join(run_id, parent):
            self._runs.open(run_id, self._opened(inputs, more))
        with self._runs.outermost(run_id) as outermost:
            if outermost is not None:
                outermost.state.names[run_id] = name = more.get("name") or UNNAMED
                is_node = (more.get("metadata") or {}).get("langgraph_node") == name
                if is_node and parent == outermost.key:
                    outermost.state.nodes.add(run_id)

    def _opened(self, inputs: Any, more: Mapping[str, Any]) -> _Answer:
        thread = (more.get("metadata") or {}).get("thread_id")
        tags = list(more.get("tags") or [])
        thread = thread if isinstance(thread, str | int) else None
        unanswered = None if thread is None else self._unanswered.close(thread)
        if unanswered is None or not _resumes(inputs):
            return _Answer(inputs, tags, thread=thread)
        return replace(unanswered, tags=tags, is_interrupted=False, earlier=frozenset(unanswered.retrievals))

    def _end(self, run_id: UUID, outputs: Any, failure: Mapping[str, Any], inputs: Any = None) -> None:
        answer = self._runs.close(run_id)
        if answer is not None:
            if inputs is not None:  # of a stream: they were not known when it began
                answer.inputs = inputs
            self._record(run_id, answer, outputs, failure)

    def _give_up(self, run: OutermostRun[UUID, _Answer]) -> None:
        self._record(run.key, run.state, None, {"error": NEVER_ENDED})

    def _record(self, run_id: UUID, answer: _Answer, outputs: Any, failure: Mapping[str, Any]) -> None:
        if not answer.retrievals and not answer.is_interrupted:
            return
        # A graph that goes on from a checkpoint is given no question: it stands in the state.
        is_resumed = bool(answer.nodes) and _resumes(answer.inputs) and isinstance(outputs, Mapping)
        known = outputs if is_resumed else answer.inputs
        text = None
        if not answer.is_interrupted:
            text = self._answer.find(outputs, lambda name: answer.is_own(name, outputs))
        if text is None and answer.thread is not None:
            self._unanswered.open(answer.thread, answer)
        if not answer.retrievals:
            return
        with _traced(run_id):
            self.log.record(
                query=self._question.find(known) or next(iter(answer.retrievals.values())).query,
                answer=text,
                hits=_hits(answer),
                metadata=self._metadata(run_id, answer, failure),
            )

    def _metadata(self, run_id: UUID, answer: _Answer, failure: Mapping[str, Any]) -> dict[str, Any]:
        known = {
            "tags": answer.tags,
            "langgraph_thread_id": answer.thread,
            "interrupted": answer.is_interrupted,
        }
        own = {name: value for name, value in known.items() if value}
        return {**self.metadata, "langchain_run_id": str(run_id), **failure, **own}


def _traced(run_id: UUID) -> AbstractContextManager[Any]:
    """Below the run's own span, where OpenInference traces LangChain: it keeps its spans out of the current context.

    Nothing is imported: where that tracing is on, its modules are loaded.
    """
    openinference = sys.modules.get("openinference.instrumentation.langchain")
    if openinference is None or not openinference.LangChainInstrumentor().is_instrumented_by_opentelemetry:
        return nullcontext()
    span = openinference.LangChainInstrumentor().get_span(run_id)
    current: AbstractContextManager[Any] = sys.modules["opentelemetry.trace"].use_span(span)
    return nullcontext() if span is None else current


def _resumes(inputs: Any) -> bool:
    """Whether a graph was told to go on from its checkpoint."""
    return inputs is None or type(inputs).__name__ == "Command"


def _written(output: Any) -> set[str]:
    """The keys of a graph's state that a node wrote: by a mapping, a state object, a Command, or several of them."""
    if isinstance(output, Mapping):
        return set(output)
    if type(output).__name__ in _WRAPPED:
        return _written(getattr(output, _WRAPPED[type(output).__name__]))
    if isinstance(output, list | tuple):
        is_pair = isinstance(output, tuple) and len(output) == 2 and isinstance(output[0], str)
        return {output[0]} if is_pair else set().union(*map(_written, output))
    return {name for name, value in getattr(output, "__dict__", {}).items() if value is not None}


def _documents(outputs: Any) -> Sequence[Document]:
    """The documents that a part of a chain returned, alone or as the one list of them among other values."""
    lists = [outputs] if isinstance(outputs, list) else list(outputs.values()) if isinstance(outputs, Mapping) else []
    found = [one for one in lists if isinstance(one, list) and one and all(isinstance(item, Document) for item in one)]
    return found[0] if len(found) == 1 else ()


def _hits(answer: _Answer) -> list[Hit]:
    """The documents of the outermost retrievers, which the chain saw; explanations may come from inner ones."""
    outermost = {run: retrieval for run, retrieval in answer.retrievals.items() if retrieval.outer is None}
    # A node that was interrupted runs anew from its beginning, and asks the same again.
    again = {(one.query, one.name) for run, one in outermost.items() if run not in answer.earlier}
    told = (one for run, one in outermost.items() if run not in answer.earlier or (one.query, one.name) not in again)
    found = ((retrieval.query, both) for retrieval in told for both in retrieval.found)
    return [
        _bare(document, rank, query) if hit is None else replace(hit, rank=rank)
        for rank, (query, (document, hit)) in enumerate(found, 1)
    ]


def _bare(document: Document, rank: int, query: str) -> Hit:
    """A hit for a document that no wrapped retriever found."""
    explanation = get_explanation(document)  # as plain data in its metadata, after a journey through JSON
    return Hit(
        id=document.id or f"#{rank}",
        text=document.page_content,
        rank=rank,
        score=None,
        metric="unknown",
        metadata=document.metadata,
        query=query,
        handle=Deferred.skipped(NOT_WRAPPED) if explanation is None else Deferred.ready(explanation),
    )
