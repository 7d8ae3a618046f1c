"""A callback that logs what a chain answered, from which documents, and why those were found.

    chain.invoke(question, config={"callbacks": [ExplanationLogHandler(log)]})

Every outermost run becomes one record: the question it was given, the documents its retrievers returned, and the final
answer. Runs are told apart by their ids, never by time or thread, so any number of them may be under way at once.
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
from langchain_core.messages import BaseMessage

from langchain_rag_explain.documents import ExplainedDocument, get_explanation
from rag_explain.log import ExplanationLog
from rag_explain.log.runs import NEVER_ENDED, NOT_WRAPPED, OpenRuns, OutermostRun
from rag_explain.results.deferred import Deferred
from rag_explain.results.hits import Hit

_QUESTIONS = ("input", "question", "query", "messages")
_ANSWERS = ("answer", "output", "result", "text", "response", "messages")


@dataclass
class _Retrieval:
    query: str
    outer: UUID | None  # the retriever inside which this one ran
    documents: Sequence[Document] = ()


@dataclass
class _Answer:
    """An outermost run that has not ended yet."""

    inputs: Any
    tags: list[str]
    retrievals: dict[UUID, _Retrieval] = field(default_factory=dict)


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
                retrievals = outermost.state.retrievals
                outer = next((run for run in outermost.around(run_id) if run in retrievals), None)
                retrievals[run_id] = _Retrieval(query, outer)

    def on_retriever_end(
        self, documents: Sequence[Document], *, run_id: UUID, parent_run_id: UUID | None = None, **more: Any
    ) -> None:
        """A retriever has found its documents."""
        with self._runs.outermost(run_id) as outermost:
            if outermost is not None and run_id in outermost.state.retrievals:
                outermost.state.retrievals[run_id].documents = list(documents)
        self._end(run_id, None, {})

    def on_chain_end(self, outputs: Any, *, run_id: UUID, parent_run_id: UUID | None = None, **more: Any) -> None:
        """A chain, or a part of one, has ended; the outermost one makes a record."""
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


def _hits(answer: _Answer) -> list[Hit]:
    """The documents of the outermost retrievers, which the chain saw; explanations may come from inner ones."""
    inner = {
        (document.id, document.page_content): document.hit
        for retrieval in answer.retrievals.values()
        for document in retrieval.documents
        if isinstance(document, ExplainedDocument)
    }
    found = [
        (document, inner.get((document.id, document.page_content)))
        for retrieval in answer.retrievals.values()
        if retrieval.outer is None
        for document in retrieval.documents
    ]
    return [_hit(document, hit, rank) for rank, (document, hit) in enumerate(found, 1)]


def _hit(document: Document, hit: Hit | None, rank: int) -> Hit:
    if isinstance(document, ExplainedDocument):
        return replace(document.hit, rank=rank)
    if hit is not None:
        return replace(hit, rank=rank)
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
