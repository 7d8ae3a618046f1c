"""Logs what a query engine answered, from which nodes, and why those were found.

    with log_queries(log):
        engine.query("how do bees find home?")

Works through LlamaIndex's instrumentation: nothing about the engine changes. Every outermost query, chat or lone
retrieval becomes one record. They are told apart by their spans, so any number of them may be under way at once, in
threads and in tasks. A query engine's streamed answer is logged when its reader stops reading, and not if it is never
read; a chat engine's when LlamaIndex has written it into the chat's memory.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Callable, Generator, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle
from llama_index.retrievers.rag_explain.base import ExplainingRetriever
from llama_index.retrievers.rag_explain.nodes import carried, last_stage, score_of
from llama_index.retrievers.rag_explain.postprocessor import ExplanationPostprocessor

from rag_explain.log import ExplanationLog
from rag_explain.log.runs import NEVER_ENDED, NOT_WRAPPED, OpenRuns
from rag_explain.results.deferred import Deferred
from rag_explain.results.hits import Hit
from rag_explain.retrieval import StagedHits


class log_queries:  # noqa: N801  # read as a verb: `with log_queries(log):`
    """Log every query from now on, until `close` or the end of a `with` block.

    Args:
        log: where records go.
        metadata: put into every record.
        dispatcher: LlamaIndex's root dispatcher, unless another one is given.
    """

    def __init__(
        self, log: ExplanationLog, *, metadata: Mapping[str, Any] | None = None, dispatcher: Any = None
    ) -> None:
        self._queries = queries = _Queries(log, dict(metadata or {}))
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


@dataclass
class _Answer:
    """An outermost query that has not ended yet."""

    query: str
    nodes: Sequence[NodeWithScore] = ()
    staged: StagedHits = field(default_factory=StagedHits)

    def hits(
        self, nodes: Sequence[NodeWithScore], stage: str | None = None, run: Hashable = None, outer: Hashable = None
    ) -> list[Hit | None]:
        """The hits of nodes that the stage of this name returned; None: one that is named as well as can be."""
        found = [((node.node.node_id,), carried(node)) for node in nodes]
        name = stage or last_stage(nodes, [self.staged.find(*one, run) for one in found])
        scores, is_seen = [score_of(node) for node in nodes], stage is not None
        return self.staged.pass_through(name, found, scores, run=run, outer=outer, is_seen=is_seen)


class _Chat(NamedTuple):
    """A streamed chat that has returned and whose answer is being written."""

    response: StreamingAgentChatResponse
    answer: _Answer


class _Queries:
    """Makes a record of every outermost query when it ends."""

    def __init__(self, log: ExplanationLog, metadata: dict[str, Any]) -> None:
        self.log = log
        self.metadata = metadata
        self._open: OpenRuns[str, _Answer] = OpenRuns(
            lambda run: self._record(run.state, None, (), NEVER_ENDED)  # a workflow that was abandoned
        )
        self._returned: OpenRuns[int, _Chat] = OpenRuns(  # by the response's id
            lambda run: self._record(run.state.answer, None, run.state.response.source_nodes, NEVER_ENDED)
        )

    def enter(self, span: str, parent: str | None, *, is_retriever: bool) -> None:
        """A span inside a query belongs to it; others are of no interest."""
        self._open.join(span, parent)
        with self._open.outermost(span) as outermost:
            if outermost is not None and is_retriever:
                outermost.state.staged.enter(span)

    def begin(self, span: str, query: str) -> None:
        """A query, chat or retrieval starts; inside another one it is a part of that."""
        self._open.open(span, _Answer(query))

    def retrieved(self, span: str, nodes: Sequence[NodeWithScore]) -> None:
        """What a retriever inside the query found. The outermost one speaks last, and what it says counts."""
        with self._open.outermost(span) as outermost:
            if outermost is not None:
                outermost.state.nodes = nodes

    def returned(self, span: str, stage: str | None, nodes: Sequence[NodeWithScore]) -> None:
        """What a retriever or postprocessor inside the query made of its nodes; the next one may set their scores."""
        with self._open.outermost(span) as outermost:
            if outermost is not None:
                outer = outermost.state.staged.innermost(outermost.around(span))
                run = outermost.state.staged.innermost((span, outer))
                outermost.state.hits(nodes, stage, run, outer)

    def end(self, span: str, text: str | None, nodes: Sequence[NodeWithScore], error: str | None = None) -> None:
        """The outermost query is over: one record."""
        answer = self._open.close(span)
        if answer is not None:
            self._record(answer, text, nodes, error)

    def stream(self, span: str, response: StreamingResponse | AsyncStreamingResponse) -> None:
        """The outermost query is over, but its answer is still to be read: listen while it is."""
        answer = self._open.close(span)
        if answer is None:
            return

        def finish(text: str, error: str | None) -> None:
            self._record(answer, text, response.source_nodes, error)

        if isinstance(response, StreamingResponse):
            response.response_gen = _overhear(response.response_gen, finish)
        else:
            response.response_gen = _overhear_async(response.response_gen, finish)

    def chat(self, span: str, response: StreamingAgentChatResponse) -> None:
        """A streamed chat has returned; a thread or task of LlamaIndex writes its answer, and may be ready before."""
        answer = self._open.close(span)
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

    def _record(self, answer: _Answer, text: str | None, nodes: Sequence[NodeWithScore], error: str | None) -> None:
        sources = nodes or answer.nodes
        hits = zip(sources, answer.hits(sources), strict=True)
        self.log.record(
            query=answer.query,
            answer=text,
            hits=[hit or _bare(node, rank) for rank, (node, hit) in enumerate(hits, 1)],
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
                self._queries.end(span, str(response), response.source_nodes)


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
        self._queries.enter(id_, parent_span_id, is_retriever=isinstance(instance, BaseRetriever))
        if _is_chat(id_, instance):
            given = bound_args.kwargs.get("message", bound_args.args[0] if bound_args.args else "")
            self._queries.begin(id_, str(given))

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
    method = span.partition("-")[0].rpartition(".")[-1]
    return isinstance(instance, BaseChatEngine) and method in ("chat", "achat", "stream_chat", "astream_chat")


def _string(query: str | QueryBundle) -> str:
    return query if isinstance(query, str) else query.query_str


def _are_nodes(result: Any) -> bool:
    return isinstance(result, list) and all(isinstance(one, NodeWithScore) for one in result)


def _bare(node: NodeWithScore, rank: int) -> Hit:
    """A hit for a node that no wrapped retriever found."""
    content = node.node.get_content(metadata_mode=MetadataMode.NONE)
    return Hit(
        id=node.node.node_id,
        text=content if isinstance(content, str) else None,
        rank=rank,
        score=score_of(node),
        metric="unknown",
        metadata=node.node.metadata,
        handle=Deferred.skipped(NOT_WRAPPED),
    )
