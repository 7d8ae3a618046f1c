"""Which retrievers ran inside a retriever, and what each returned: heard from LlamaIndex's spans while it runs."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any

from llama_index.core import instrumentation
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.indices.vector_store.retrievers import VectorIndexRetriever
from llama_index.core.instrumentation.span import BaseSpan, active_span_id
from llama_index.core.instrumentation.span_handlers import BaseSpanHandler
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.retrievers.fusion_retriever import FUSION_MODES
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.core.vector_stores.types import VectorStoreQueryMode
from llama_index.retrievers.rag_explain._internals import fused_retrievers, fusion_weights, query_mode
from llama_index.retrievers.rag_explain.nested import retriever_encoder
from llama_index.retrievers.rag_explain.nodes import carried, embedded, score_of
from llama_index.retrievers.rag_explain.stores import engine_of_retriever, other_search, score_metric

from rag_explain.results.deferred import Deferred
from rag_explain.results.explanation import Explanation
from rag_explain.results.metric import UNKNOWN
from rag_explain.results.stages import Stage
from rag_explain.retrieval import (
    Combination,
    Engine,
    Found,
    LegBatches,
    Legs,
    Reader,
    Run,
    Search,
    Trace,
    fusion,
    ordered,
    overheard,
    scorer_of,
)

_METHODS = ("retrieve", "aretrieve")
_RULES = {
    FUSION_MODES.RECIPROCAL_RANK: "rrf",
    FUSION_MODES.RELATIVE_SCORE: "relative score",
    FUSION_MODES.DIST_BASED_SCORE: "distribution-based score",
    FUSION_MODES.SIMPLE: "highest score",
}
_FIRST_RANK = 0  # LlamaIndex counts ranks from zero in its reciprocal rank fusion

_trace: ContextVar[Trace | None] = ContextVar("trace", default=None)
_lock = threading.Lock()
_listeners = 0


class _Ear(BaseSpanHandler[BaseSpan]):
    """Tells the trace of the search in whose context a span runs; it is there while any search is listened to."""

    def __init__(self) -> None:
        super().__init__(open_spans={}, completed_spans=[], dropped_spans=[], current_span_ids={})

    @classmethod
    def class_name(cls) -> str:
        return "RagExplainStages"

    def span_enter(
        self,
        id_: str,
        bound_args: inspect.BoundArguments,
        instance: Any = None,
        parent_id: str | None = None,
        tags: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        trace = _trace.get()
        if trace is not None:
            trace.enter(id_, parent_id, _run(id_, bound_args, instance))

    def span_exit(
        self, id_: str, bound_args: inspect.BoundArguments, instance: Any = None, result: Any = None, **kwargs: Any
    ) -> None:
        trace = _trace.get()
        if trace is not None and isinstance(result, list):
            trace.leave(id_, lambda run: [found_of(node) for node in result])

    def span_drop(self, *arguments: Any, **kwargs: Any) -> None:
        """A run that failed returned nothing."""

    def new_span(self, *arguments: Any, **kwargs: Any) -> None:
        """No span is kept."""

    def prepare_to_exit_span(self, *arguments: Any, **kwargs: Any) -> None:
        """No span is kept."""

    def prepare_to_drop_span(self, *arguments: Any, **kwargs: Any) -> None:
        """No span is kept."""


_ear = _Ear()


def _run(span: str, bound_args: inspect.BoundArguments, instance: Any) -> Run | None:
    """The retriever that begins to run, if this span is of one."""
    method = span.partition("-")[0].rpartition(".")[-1]
    if not isinstance(instance, BaseRetriever) or method not in _METHODS:
        return None
    asked = next(iter(bound_args.arguments.values()), None)
    query = asked.query_str if isinstance(asked, QueryBundle) else asked if isinstance(asked, str) else None
    wrapped = getattr(instance, "base", None) if hasattr(instance, "with_explain") else None
    return Run(type(wrapped or instance).__name__, instance, query, is_wrapped=wrapped is not None)


def found_of(node: NodeWithScore) -> Found:
    """A node as a run returned it: fusion overwrites its score later."""
    return Found((node.node.hash, node.node.node_id), score_of(node), carried(node), node)


def _is_part(one: Found, whole: Found) -> bool:
    """Whether a node is a chunk of another one."""
    parent = one.item.node.parent_node
    return parent is not None and parent.node_id == whole.item.node.node_id


@contextmanager
def listening(base: BaseRetriever) -> Iterator[list[Run]]:
    """Hears what runs inside; what `base` itself did is the first of the list once it has answered."""
    runs: list[Run] = []
    span = active_span_id.get()
    if span is None or type(base) is VectorIndexRetriever:  # there is nothing inside
        yield runs
        return
    outer = _trace.get()
    trace = outer or Trace(span)
    token = _trace.set(trace)
    _listen(1)
    try:
        yield runs
        runs += trace.inside(span)
    finally:
        _listen(-1)
        _trace.reset(token)


def _listen(change: int) -> None:
    """The list of handlers is replaced, and not written to: another thread may be reading it."""
    global _listeners
    with _lock:
        was, _listeners = _listeners, _listeners + change
        if bool(was) == bool(_listeners):
            return
        root = instrumentation.get_dispatcher()  # type: ignore[attr-defined]  # documented, re-exported
        others = [handler for handler in root.span_handlers if handler is not _ear]
        root.span_handlers = [*others, _ear] if _listeners else others


def combination(run: Run) -> Combination | None:
    """How a retriever of LlamaIndex puts several lists together; None for one that is not known."""
    if isinstance(run.owner, QueryFusionRetriever):
        return _fusion(run)
    return None


def _fusion(run: Run) -> Combination | None:
    """Its legs are its retrievers for each query; two queries of the same words are one."""
    owner, runs = run.owner, run.answered
    retrievers = fused_retrievers(owner)
    owners = [retrievers[number % len(retrievers)] for number in range(len(runs))]
    if not runs or len(runs) % len(retrievers) or any(a is not b.owner for a, b in zip(owners, runs, strict=True)):
        return None
    by_query = {(one.query, number % len(retrievers)): one for number, one in enumerate(runs)}
    legs = list(by_query.values())
    weights = [fusion_weights(owner)[number] for _, number in by_query]
    is_by_score = owner.mode == FUSION_MODES.RECIPROCAL_RANK
    lists = [
        fusion.Leg([(one.keys[0], one.score) for one in ordered(leg, is_by_score)], weight)
        for leg, weight in zip(legs, weights, strict=True)
    ]
    is_weighted = owner.mode in (FUSION_MODES.RELATIVE_SCORE, FUSION_MODES.DIST_BASED_SCORE)
    return Combination(
        legs,
        "fusion",
        _RULES.get(owner.mode, "unknown"),
        _shares(owner, lists),
        [weight / owner.num_queries for weight in weights] if is_weighted else None,
        is_by_score=is_by_score,
    )


def _shares(owner: QueryFusionRetriever, legs: Sequence[fusion.Leg]) -> fusion.Shares | None:
    if owner.mode == FUSION_MODES.RECIPROCAL_RANK:
        return fusion.reciprocal_rank([fusion.Leg(leg.found) for leg in legs], first=_FIRST_RANK)
    if owner.mode == FUSION_MODES.RELATIVE_SCORE:
        return fusion.relative(legs, owner.num_queries)
    if owner.mode == FUSION_MODES.DIST_BASED_SCORE:
        return fusion.distribution(legs, owner.num_queries)
    return fusion.highest(legs) if owner.mode == FUSION_MODES.SIMPLE else None


class Told:
    """What ran inside a wrapped retriever made of each of its nodes."""

    def __init__(self, legs: Legs) -> None:
        self._legs = legs
        self._engines: dict[int, tuple[BaseRetriever, Engine | None]] = {}

    def __call__(
        self, runs: Sequence[Run], query: str, nodes: Sequence[NodeWithScore], search: Search
    ) -> Callable[[int, Deferred[Explanation]], tuple[Stage, ...]] | None:
        """Tells the stages of a node by its place and the explanation of its hit; None where nothing was heard."""
        if not runs:
            return None
        batches, found = LegBatches(), [found_of(node) for node in nodes]
        run = runs[0]
        overheard(run)

        def stages(index: int, handle: Deferred[Explanation]) -> tuple[Stage, ...]:
            own = replace(reader, handle=partial(self._handle, search, query, batches, handle))
            return own.stages(run, index + 1, found[index])  # hits are read by any thread

        reader = Reader(query, combination, self._metric, is_part=_is_part)
        return stages

    def _metric(self, run: Run) -> str:
        """What the scores of a search are."""
        owner = run.owner
        if hasattr(owner, "bm25"):
            return "bm25"
        if type(owner) is not VectorIndexRetriever or query_mode(owner) != VectorStoreQueryMode.DEFAULT:
            return UNKNOWN.name
        if other_search(owner) is not None:
            return UNKNOWN.name
        kept = self._engines.get(id(owner))
        engine = engine_of_retriever(owner, None if kept is None else kept[1])
        self._engines[id(owner)] = owner, engine
        return score_metric(engine).name

    def _handle(
        self,
        search: Search,
        query: str,
        batches: LegBatches,
        handle: Deferred[Explanation],
        run: Run,
        found: Found,
    ) -> Deferred[Explanation] | None:
        """The hit's own explanation, where this search embeds as that does; else one by what scored in it."""
        _, embedder = retriever_encoder(run.owner)
        is_own = embedder is not None and search.embedder is not None and embedder.holder is search.embedder.holder
        if is_own and run.query == query:
            return handle
        make = scorer_of(run.owner, embedder)
        if make is None or run.query is None:
            return None
        return batches.deferred(id(run), self._legs.of(run.owner, make), run.query, embedded(found.item.node))
