"""A callback that logs what a chain answered, from which documents, and why those were found.

    chain.invoke(question, config={"callbacks": [ExplanationLogHandler(log)]})

Every outermost run becomes one record: the question it was given, the documents its retrievers returned, and the final
answer. Runs are told apart by their ids, never by time or thread, so any number of them may be under way at once.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.messages import BaseMessage
from langchain_core.retrievers import BaseRetriever

from langchain_rag_explain.documents import carried, get_explanation, keys, reranked_score
from langchain_rag_explain.retrievers import ExplainingRetriever
from langchain_rag_explain.stores import stage_name
from rag_explain.log import ExplanationLog
from rag_explain.log.runs import NEVER_ENDED, NOT_WRAPPED, OpenRuns, OutermostRun
from rag_explain.results.deferred import Deferred
from rag_explain.results.explanation import Explanation
from rag_explain.results.hits import Hit
from rag_explain.retrieval import UNNAMED, StagedHits

_FRAMES = 20  # how far up the stack the retriever is looked for
_QUESTIONS = ("input", "question", "query", "messages")
_ANSWERS = ("answer", "output", "result", "text", "response", "messages")


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
        metadata: put into every record, beside LangChain's run id and tags.
    """

    # On the event loop itself, and in order: nothing here takes longer than putting something into a dictionary.
    run_inline = True

    def __init__(self, log: ExplanationLog, *, metadata: Mapping[str, Any] | None = None) -> None:
        self.log = log
        self.metadata = dict(metadata or {})
        self._runs: OpenRuns[UUID, _Answer] = OpenRuns(self._give_up)

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
        self._begin(run_id, parent_run_id, input_str, more)

    def on_retriever_start(
        self, serialized: dict[str, Any], query: str, *, run_id: UUID, parent_run_id: UUID | None = None, **more: Any
    ) -> None:
        """A retriever is asked."""
        self._begin(run_id, parent_run_id, query, more)
        with self._runs.outermost(run_id) as outermost:
            if outermost is not None:
                answer = outermost.state
                outer = next((run for run in outermost.around(run_id) if run in answer.retrievals), None)
                retriever, name = _retriever(), answer.names[run_id]
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
            if outermost is not None and documents:
                outermost.state.step(run_id, documents)
        self._end(run_id, outputs, {})

    def on_tool_end(self, output: Any, *, run_id: UUID, parent_run_id: UUID | None = None, **more: Any) -> None:
        """A tool has ended."""
        self._end(run_id, output, {})

    def on_chain_error(
        self, error: BaseException, *, run_id: UUID, parent_run_id: UUID | None = None, **more: Any
    ) -> None:
        """An answer that failed is logged without one."""
        self._end(run_id, None, {"error": type(error).__name__})

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
            self._runs.open(run_id, _Answer(inputs, list(more.get("tags") or [])))
        with self._runs.outermost(run_id) as outermost:
            if outermost is not None:
                outermost.state.names[run_id] = more.get("name") or UNNAMED

    def _end(self, run_id: UUID, outputs: Any, failure: Mapping[str, Any]) -> None:
        answer = self._runs.close(run_id)
        if answer is not None:
            self._record(run_id, answer, outputs, failure)

    def _give_up(self, run: OutermostRun[UUID, _Answer]) -> None:
        self._record(run.key, run.state, None, {"error": NEVER_ENDED})

    def _record(self, run_id: UUID, answer: _Answer, outputs: Any, failure: Mapping[str, Any]) -> None:
        if not answer.retrievals:
            return
        asked = next(iter(answer.retrievals.values())).query
        metadata = {**self.metadata, "langchain_run_id": str(run_id), **failure}
        if answer.tags:
            metadata["tags"] = answer.tags
        with _traced(run_id):
            self.log.record(
                query=_text(answer.inputs, _QUESTIONS) or asked,
                answer=_text(outputs, _ANSWERS),
                hits=_hits(answer),
                metadata=metadata,
            )


def _retriever() -> BaseRetriever | None:
    """The retriever that is being asked: LangChain tells a handler no more than its name."""
    frame = inspect.currentframe()
    for _ in range(_FRAMES):
        if frame is None:
            break
        if isinstance(owner := frame.f_locals.get("self"), BaseRetriever):
            return owner
        frame = frame.f_back
    return None


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


def _text(value: Any, keys: Sequence[str]) -> str | None:
    """The question or the answer in what a chain takes or gives: a string, a message, or something that holds one."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, BaseMessage):
        return str(value.text)
    if isinstance(value, Mapping):
        return next((found for key in keys if key in value and (found := _text(value[key], keys))), None)
    if isinstance(value, Sequence) and value and isinstance(value[-1], BaseMessage | tuple):
        last = value[-1]
        return _text(last[-1] if isinstance(last, tuple) else last, keys)
    return None


def _documents(outputs: Any) -> Sequence[Document]:
    """The documents that a part of a chain returned, alone or as the one list of them among other values."""
    lists = [outputs] if isinstance(outputs, list) else list(outputs.values()) if isinstance(outputs, Mapping) else []
    found = [one for one in lists if isinstance(one, list) and one and all(isinstance(item, Document) for item in one)]
    return found[0] if len(found) == 1 else ()


def _hits(answer: _Answer) -> list[Hit]:
    """The documents of the outermost retrievers, which the chain saw; explanations may come from inner ones."""
    outermost = (retrieval for retrieval in answer.retrievals.values() if retrieval.outer is None)
    found = (both for retrieval in outermost for both in retrieval.found)
    return [
        _bare(document, rank) if hit is None else replace(hit, rank=rank)
        for rank, (document, hit) in enumerate(found, 1)
    ]


def _bare(document: Document, rank: int) -> Hit:
    """A hit for a document that no wrapped retriever found."""
    explanation = get_explanation(document)  # as plain data in its metadata, after a journey through JSON
    return Hit(
        id=document.id or f"#{rank}",
        text=document.page_content,
        rank=rank,
        score=None,
        metric="unknown",
        metadata=document.metadata,
        handle=Deferred.skipped(NOT_WRAPPED) if explanation is None else Deferred.ready(explanation),
    )
