"""Which retrievers ran inside a retriever, and what each returned: heard from LangChain's callbacks while it runs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import UUID

from langchain_core.callbacks import (
    AsyncCallbackManager,
    AsyncCallbackManagerForRetrieverRun,
    BaseCallbackHandler,
    CallbackManager,
    CallbackManagerForRetrieverRun,
)
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import VectorStore, VectorStoreRetriever

from langchain_rag_explain.documents import carried, keys, reranked_score
from langchain_rag_explain.nested import store_encoder
from langchain_rag_explain.stores import stage_name
from rag_explain.results.deferred import Deferred
from rag_explain.results.explanation import Explanation
from rag_explain.results.stages import Stage
from rag_explain.retrieval import (
    Combination,
    Found,
    LegBatches,
    Legs,
    Reader,
    Run,
    Search,
    Trace,
    fusion,
    overheard,
    reranker_of,
    scorer_of,
)

_FRAMES = 20  # how far up the stack the retriever is looked for
_LEG = re.compile(r"retriever_(\d+)")  # how LangChain tags the legs of an ensemble
_UNSCORED = "{} returns no scores: what its legs contribute is computed from their ranks"


def running_retriever() -> BaseRetriever | None:
    """The retriever that is being asked: LangChain tells a handler no more than its name."""
    frame = inspect.currentframe()
    for _ in range(_FRAMES):
        if frame is None:
            break
        if isinstance(owner := frame.f_locals.get("self"), BaseRetriever):
            return owner
        frame = frame.f_back
    return None


class Ear(BaseCallbackHandler):
    """Hears what one search is made of; it is a callback of what is inside a retriever, and of nothing else."""

    run_inline = True  # in order, and before another one writes to the documents
    ignore_llm = ignore_chat_model = ignore_custom_event = True

    def __init__(self, root: UUID) -> None:
        self.trace = Trace(root)

    def on_chain_start(
        self, serialized: dict[str, Any], inputs: Any, *, run_id: UUID, parent_run_id: UUID | None = None, **more: Any
    ) -> None:
        """A chain that is a leg counts as one: it may change what a retriever in it returns."""
        leg, query = _leg(more.get("tags")), inputs if isinstance(inputs, str) else None
        name = more.get("name") or "a chain"
        self.trace.enter(run_id, parent_run_id, None if leg is None else Run(name, None, query, leg))

    def on_tool_start(
        self,
        serialized: dict[str, Any],
        input_str: str,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        **more: Any,
    ) -> None:
        """A retriever may run inside it."""
        self.trace.enter(run_id, parent_run_id)

    def on_retriever_start(
        self, serialized: dict[str, Any], query: str, *, run_id: UUID, parent_run_id: UUID | None = None, **more: Any
    ) -> None:
        """A retriever is asked."""
        owner = running_retriever()
        is_wrapped = hasattr(owner, "_delivered")
        asked = getattr(owner, "retriever", None) or getattr(owner, "vectorstore", None) if is_wrapped else owner
        name = more.get("name") or type(owner).__name__
        named = stage_name(asked) if asked is not None and name == type(owner).__name__ else name
        self.trace.enter(run_id, parent_run_id, Run(named, owner, query, _leg(more.get("tags")), is_wrapped))

    def on_retriever_end(self, documents: Sequence[Document], *, run_id: UUID, **more: Any) -> None:
        """A retriever has found its documents."""
        self.trace.leave(run_id, lambda run: [found_of(one, run.owner) for one in documents])

    def on_chain_end(self, outputs: Any, *, run_id: UUID, **more: Any) -> None:
        """A leg that is a chain has ended."""
        if isinstance(outputs, list) and all(isinstance(one, Document | str) for one in outputs):
            self.trace.leave(run_id, lambda run: [found_of(one, None) for one in outputs])


def _leg(tags: Sequence[str] | None) -> int | None:
    found = [match for tag in tags or () if (match := _LEG.fullmatch(tag))]
    return int(found[-1][1]) if found else None


def found_of(document: Document | str, owner: object) -> Found:
    """A document as a run returned it."""
    one = Document(document) if isinstance(document, str) else document
    is_unscored = type(owner) is VectorStoreRetriever or _is_ensemble(owner)
    return Found(keys(one), None if is_unscored else reranked_score(one), carried(one), one)


def ear_among(run_manager: CallbackManagerForRetrieverRun | AsyncCallbackManagerForRetrieverRun) -> Ear | None:
    """What listens already, for a wrapped retriever around this one."""
    return next((one for one in run_manager.inheritable_handlers if isinstance(one, Ear)), None)


def is_heard(run_manager: CallbackManagerForRetrieverRun | AsyncCallbackManagerForRetrieverRun) -> bool:
    """Whether there is a handler but ours."""
    return any(not isinstance(one, Ear) for one in run_manager.handlers)


def listening(
    run_manager: CallbackManagerForRetrieverRun | AsyncCallbackManagerForRetrieverRun,
) -> tuple[CallbackManager | AsyncCallbackManager, Callable[[], list[Run]]]:
    """The callbacks to ask a retriever with, and what tells then what it and those inside it did."""
    child, ear = run_manager.get_child(), ear_among(run_manager)
    if ear is None:
        ear = Ear(run_manager.run_id)
        child.add_handler(ear, inherit=True)
    return child, lambda: ear.trace.inside(run_manager.run_id)


# ---------------------------------------------------------------------- what retrievers are, by their shape


def _is_ensemble(owner: object) -> bool:
    return all(hasattr(owner, name) for name in ("retrievers", "weights", "c", "weighted_reciprocal_rank"))


def combination(run: Run) -> Combination | None:
    """How a retriever of LangChain puts several lists together; None for one that is not known."""
    if not _is_ensemble(run.owner):
        return None
    owner: Any = run.owner
    legs = sorted((one for one in run.answered if one.leg is not None), key=lambda one: one.leg or 0)
    if [one.leg for one in legs] != list(range(1, len(owner.weights) + 1)):
        return None

    def key(found: Found) -> Any:
        return found.item.page_content if owner.id_key is None else found.item.metadata[owner.id_key]

    lists = [
        fusion.Leg([(key(one), None) for one in leg.found or ()], weight)
        for leg, weight in zip(legs, owner.weights, strict=True)
    ]
    shares = fusion.reciprocal_rank(lists, owner.c)
    note = _UNSCORED.format(type(owner).__name__)
    return Combination(legs, "fusion", "rrf", shares, owner.weights, key, note=note)


class Told:
    """What ran inside a wrapped retriever made of each of its documents."""

    def __init__(self) -> None:
        self._legs = Legs()

    def __call__(
        self, runs: Sequence[Run], query: str, documents: Sequence[Document], search: Search
    ) -> Callable[[int, Deferred[Explanation]], tuple[Stage, ...]] | None:
        """Tells the stages of a document by its place and the explanation of its hit; None where nothing was heard."""
        if not runs:
            return None
        run, batches, reader = runs[0], LegBatches(), Reader(query, combination)
        overheard(run)
        found = [found_of(one, run.owner) for one in documents]

        def stages(index: int, handle: Deferred[Explanation]) -> tuple[Stage, ...]:
            own = partial(self._handle, search, query, batches, handle)
            asked = replace(reader, handle=own, rerank=partial(self._rerank, batches))  # hits are read by any thread
            return asked.stages(run, index + 1, found[index])

        return stages

    def _handle(
        self, search: Search, query: str, batches: LegBatches, handle: Deferred[Explanation], run: Run, found: Found
    ) -> Deferred[Explanation] | None:
        """The hit's own explanation, where this search embeds as that does; else one by what scored in it."""
        store = getattr(run.owner, "vectorstore", None)
        embedder = store_encoder(store)[1] if isinstance(store, VectorStore) else None
        is_own = embedder is not None and search.embedder is not None and embedder.holder is search.embedder.holder
        if is_own and run.query == query:
            return handle
        make = scorer_of(run.owner, embedder)
        if make is None or run.query is None:
            return None
        return batches.deferred(id(run), self._legs.of(run.owner, make), run.query, found.item.page_content)

    def _rerank(self, batches: LegBatches, run: Run, found: Found) -> Deferred[Explanation] | None:
        """What explains the score of a reranker, where it is a cross-encoder that is here."""
        compressor = getattr(run.owner, "base_compressor", None)
        make = reranker_of(compressor)
        if make is None or run.query is None:
            return None
        return batches.deferred(id(run), self._legs.of(compressor, make), run.query, found.item.page_content)
