"""Logs what a query engine, an agent or a workflow answered, from which nodes, and why those were found.

    with log_queries(log):
        engine.query("how do bees find home?")

Works through LlamaIndex's instrumentation: nothing about the engine changes. Every outermost query, chat or lone
retrieval becomes one record, and so does every run of an agent or workflow in which something was asked. They are told
apart by their spans, so any number of them may be under way at once, in threads and in tasks. A query engine's streamed
answer is logged when its reader stops reading, and not if it is never read; a chat engine's when LlamaIndex has written
it into the chat's memory.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple

from llama_index.core import instrumentation
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.chat_engine.types import BaseChatEngine, StreamingAgentChatResponse
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.query import QueryEndEvent, QueryStartEvent
from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent, RetrievalStartEvent
from llama_index.core.instrumentation.span import BaseSpan
from llama_index.core.instrumentation.span_handlers import BaseSpanHandler
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.core.tools import BaseTool
from llama_index.core.workflow import StopEvent, Workflow
from llama_index.retrievers.rag_explain.base import ExplainingRetriever
from llama_index.retrievers.rag_explain.messages import answered, asked
from llama_index.retrievers.rag_explain.postprocessor import ExplanationPostprocessor
from llama_index.retrievers.rag_explain.runs import Answer

from rag_explain.log import ExplanationLog
from rag_explain.log.runs import NEVER_ENDED, OpenRuns, check_log
from rag_explain.log.states import ANSWER_KEYS, QUESTION_KEYS, Key, Lookup, member


class log_queries:  # noqa: N801  # read as a verb: `with log_queries(log):`
    """Log every query from now on, until `close` or the end of a `with` block.

    Args:
        log: where records go.
        metadata: put into every record.
        question_key: the field of a workflow's start event in which the question stands, or a function that takes the
            event and returns it. Otherwise it is an agent's user message, or what stands in `question`, `query`,
            `input`, `messages` or `user_msg`; and what was asked first in the workflow, where there is none of them.
        answer_key: the same for the answer in a workflow's result. Otherwise it is a result that is a text, a message
            or a response, or what stands in its `answer`, `output`, `result`, `generation`, `response` or `messages`;
            and None, where there is none of them.
        dispatcher: LlamaIndex's root dispatcher, unless another one is given.
    """

    def __init__(
        self,
        log: ExplanationLog,
        *,
        metadata: Mapping[str, Any] | None = None,
        question_key: Key | None = None,
        answer_key: Key | None = None,
        dispatcher: Any = None,
    ) -> None:
        check_log(log)
        question = Lookup("question_key", question_key, (*QUESTION_KEYS, "user_msg"), asked)
        answer = Lookup("answer_key", answer_key, ANSWER_KEYS, answered)
        self._queries = queries = _Queries(log, dict(metadata or {}), question, answer)
        root = instrumentation.get_dispatcher  # type: ignore[attr-defined]  # documented, re-exported
        self._dispatcher = dispatcher or root()
        self._events = _Events(queries)
        self._spans = _Spans(queries)
        self._dispatcher.add_span_handler(self._spans)
        self._dispatcher.add_event_handler(self._events)

    def close(self) -> None:
        """Log no more queries. Those under way are not logged, but streamed chats are, as far as they have come."""
        events, spans = self._dispatcher.event_handlers, self._dispatcher.span_handlers
        events[:] = [handler for handler in events if handler is not self._events]
        spans[:] = [handler for handler in spans if handler is not self._spans]
        self._queries.close()

    def __enter__(self) -> log_queries:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Chat(NamedTuple):
    """A streamed chat that has returned and whose answer is being written."""

    response: StreamingAgentChatResponse
    answer: Answer


class _Queries:
    """Makes a record of every outermost query when it ends."""

    def __init__(self, log: ExplanationLog, metadata: dict[str, Any], question: Lookup, answer: Lookup) -> None:
        self.log = log
        self.metadata = metadata
        self._question = question
        self._answer = answer
        self._open: OpenRuns[str, Answer] = OpenRuns(
            lambda run: self._record(run.state, None, (), NEVER_ENDED)  # a workflow that was abandoned
        )
        self._returned: OpenRuns[int, _Chat] = OpenRuns(  # by the response's id
            lambda run: self._record(run.state.answer, None, run.state.response.source_nodes, NEVER_ENDED)
        )

    def enter(self, span: str, parent: str | None, *, is_apart: bool) -> None:
        """A span inside a query belongs to it; others are of no interest. What one that is apart finds stays in it."""
        self._open.join(span, parent)
        with self._open.outermost(span) as outermost:
            if outermost is not None and is_apart:
                outermost.state.staged.enter(span)

    def begin(self, span: str, query: str) -> None:
        """A query, chat or retrieval starts; inside another one it is a part of that."""
        self.run(span, None)
        with self._open.outermost(span) as outermost:
            if outermost is not None:
                outermost.state.ask(span, query, outermost.around(span))

    def run(self, span: str, start: Any) -> None:
        """A workflow starts; inside another run it is a part of that."""
        self._open.open(span, Answer(span, start))

    def retrieved(self, span: str, nodes: Sequence[NodeWithScore]) -> None:
        """What a retriever inside a query found. The outermost one speaks last, and what it says counts."""
        with self._open.outermost(span) as outermost:
            if outermost is not None:
                known = outermost.state.asked
                for one in (known[run] for run in (span, *outermost.around(span)) if run in known):
                    one.nodes = nodes

    def returned(self, span: str, stage: str | None, nodes: Sequence[NodeWithScore]) -> None:
        """What a retriever or postprocessor inside the query made of its nodes; the next one may set their scores."""
        with self._open.outermost(span) as outermost:
            if outermost is not None:
                answer = outermost.state
                outer = answer.staged.innermost(outermost.around(span))
                run = answer.staged.innermost((span, outer))
                hits = answer.hits(nodes, stage, run, outer)
                if span in answer.asked:
                    answer.asked[span].nodes, answer.asked[span].hits = nodes, hits
                elif answer.asked.keys().isdisjoint(outermost.around(span)):
                    answer.step(nodes, hits)

    def end(self, span: str, text: str | None, nodes: Sequence[NodeWithScore], error: str | None = None) -> None:
        """The outermost query is over: one record."""
        answer = self._close(span, nodes)
        if answer is not None:
            self._record(answer, text, nodes, error)

    def end_run(self, span: str, result: Any) -> None:
        """A workflow is over: one record, if anything was asked in it."""
        if isinstance(result, StreamingResponse | AsyncStreamingResponse):
            self.stream(span, result)
        elif isinstance(result, StreamingAgentChatResponse):
            self.chat(span, result)
        elif (answer := self._open.close(span)) is not None and answer.asked:
            nodes = member(result, "source_nodes")
            self._record(answer, self._answer.find(result), nodes if _are_nodes(nodes) else ())

    def _close(self, span: str, nodes: Sequence[NodeWithScore]) -> Answer | None:
        """The outermost query that is over; None where it is a part of one, which keeps what it answered from."""
        answer = self._open.close(span)
        if answer is None:
            with self._open.outermost(span) as outermost:
                if outermost is not None:
                    outermost.state.answered(span, nodes)
        return answer

    def stream(self, span: str, response: StreamingResponse | AsyncStreamingResponse) -> None:
        """The outermost query is over, but its answer is still to be read: listen while it is."""
        answer = self._close(span, response.source_nodes)
        if answer is None or not answer.asked:
            return

        def finish(text: str, error: str | None) -> None:
            self._record(answer, text, response.source_nodes, error)

        if isinstance(response, StreamingResponse):
            response.response_gen = _overhear(response.response_gen, finish)
        else:
            response.response_gen = _overhear_async(response.response_gen, finish)

    def chat(self, span: str, response: StreamingAgentChatResponse) -> None:
        """A streamed chat has returned; a thread or task of LlamaIndex writes its answer, and may be ready before."""
        answer = self._close(span, response.source_nodes)
        if answer is None:  # an engine inside another one: the outer one will return it too
            return
        self._returned.open(id(response), _Chat(response, answer))
        writers = ("write_response_to_history_thread", "awrite_response_to_history_task")  # not in every version
        is_written = any(getattr(response, name, None) is not None for name in writers)
        # Both are set before the writer's span ends: where they are not, its end is still to come and finds the chat.
        if not is_written or response.is_done or response.exception is not None:
            self.written(response, None if response.exception is None else type(response.exception).__name__)

    def written(self, response: StreamingAgentChatResponse, error: str | None = None) -> None:
        """The answer of a streamed chat is complete, or it failed. Only the first call makes a record."""
        returned = self._returned.close(id(response))
        if returned is not None:
            # Not str(response): that takes the words away from the reader of the stream.
            self._record(returned.answer, response.response or None, response.source_nodes, error)

    def close(self) -> None:
        """Streamed chats that have returned are logged, without the answers that are still to come."""
        for chat in self._returned.close_all():
            self._record(chat.answer, None, chat.response.source_nodes, "the log was closed before it ended")

    def _record(
        self, answer: Answer, text: str | None, nodes: Sequence[NodeWithScore], error: str | None = None
    ) -> None:
        if not answer.asked:  # a workflow that has nothing to do with retrieval
            return
        question = None if answer.span in answer.asked else self._question.find(answer.start)
        self.log.record(
            query=question or next(iter(answer.asked.values())).query,
            answer=text,
            hits=answer.sources(nodes),
            metadata=self.metadata if error is None else {**self.metadata, "error": error},
        )


def _overhear(
    tokens: Generator[str, None, None], finish: Callable[[str, str | None], None]
) -> Generator[str, None, None]:
    with _listening(finish) as heard:
        for token in tokens:
            heard.append(token)
            yield token


async def _overhear_async(
    tokens: AsyncGenerator[str, None], finish: Callable[[str, str | None], None]
) -> AsyncGenerator[str, None]:
    with _listening(finish) as heard:
        async for token in tokens:
            heard.append(token)
            yield token


@contextmanager
def _listening(finish: Callable[[str, str | None], None]) -> Iterator[list[str]]:
    """Collects an answer; `finish` gets it, and why it is not whole, however the reading of it ends."""
    heard: list[str] = []
    error: str | None = "it was not read to its end"
    try:
        yield heard
        error = None
    except Exception as failure:
        error = type(failure).__name__
        raise
    finally:
        finish("".join(heard), error)


class _Events(BaseEventHandler):
    _queries: _Queries = PrivateAttr()

    def __init__(self, queries: _Queries) -> None:
        super().__init__()
        self._queries = queries

    @classmethod
    def class_name(cls) -> str:
        return "RagExplainLogEvents"

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        span = event.span_id or ""
        if isinstance(event, QueryStartEvent):
            self._queries.begin(span, _string(event.query))
        elif isinstance(event, RetrievalStartEvent):
            self._queries.begin(span, _string(event.str_or_query_bundle))
        elif isinstance(event, RetrievalEndEvent):
            self._queries.retrieved(span, event.nodes)
        elif isinstance(event, QueryEndEvent):
            response = event.response
            if isinstance(response, StreamingResponse | AsyncStreamingResponse):
                self._queries.stream(span, response)
            else:
                self._queries.end(span, answered(response), response.source_nodes)
        elif event.class_name() == "SpanCancelledEvent":  # of a workflow, whose span ends as if nothing had happened
            self._queries.end(span, None, (), "it was cancelled")


class _Spans(BaseSpanHandler[BaseSpan]):
    _queries: _Queries = PrivateAttr()

    def __init__(self, queries: _Queries) -> None:
        super().__init__(open_spans={}, completed_spans=[], dropped_spans=[], current_span_ids={})
        self._queries = queries

    @classmethod
    def class_name(cls) -> str:
        return "RagExplainLogSpans"

    def new_span(
        self,
        id_: str,
        bound_args: inspect.BoundArguments,
        instance: Any = None,
        parent_span_id: str | None = None,
        tags: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._queries.enter(id_, parent_span_id, is_apart=isinstance(instance, BaseRetriever | BaseTool))
        if _is_chat(id_, instance):
            given = bound_args.kwargs.get("message", bound_args.args[0] if bound_args.args else "")
            self._queries.begin(id_, str(given))
        elif _is_run(id_, instance):
            self._queries.run(id_, bound_args.arguments.get("start_event") or bound_args.kwargs)

    def prepare_to_exit_span(
        self,
        id_: str,
        bound_args: inspect.BoundArguments,
        instance: Any = None,
        result: Any = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(instance, BaseRetriever | BaseNodePostprocessor) and _are_nodes(result):
            is_ours = isinstance(instance, ExplainingRetriever | ExplanationPostprocessor)  # which change nothing
            self._queries.returned(id_, None if is_ours else type(instance).__name__, result)
        if isinstance(instance, StreamingAgentChatResponse):
            self._queries.written(instance)
        elif _is_run(id_, instance):  # as the caller gets it
            self._queries.end_run(id_, result.result if type(result) is StopEvent else result)
        elif isinstance(result, StreamingAgentChatResponse):
            self._queries.chat(id_, result)
        elif _is_chat(id_, instance):
            self._queries.end(id_, str(result), result.source_nodes)
        else:
            self._queries.end(id_, None, ())  # a retriever on its own: a query's record was made at its end event

    def prepare_to_drop_span(
        self,
        id_: str,
        bound_args: inspect.BoundArguments,
        instance: Any = None,
        err: BaseException | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(instance, StreamingAgentChatResponse):
            self._queries.written(instance, type(err).__name__)
        else:
            self._queries.end(id_, None, (), error=type(err).__name__)


def _is_chat(span: str, instance: Any) -> bool:
    return isinstance(instance, BaseChatEngine) and _method(span) in ("chat", "achat", "stream_chat", "astream_chat")


def _is_run(span: str, instance: Any) -> bool:
    return isinstance(instance, Workflow) and _method(span) == "run"


def _method(span: str) -> str:
    return span.partition("-")[0].rpartition(".")[-1]


def _string(query: str | QueryBundle) -> str:
    return query if isinstance(query, str) else query.query_str


def _are_nodes(result: Any) -> bool:
    return isinstance(result, list) and all(isinstance(one, NodeWithScore) for one in result)
