"""What every wrapped retriever shares: explain these documents for this query, keep the order, never fail the search.

FAISS, LangChain and LlamaIndex differ only in what a document is and in where an explanation may be kept.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from rag_explain.budget import Budget
from rag_explain.errors import InvalidInput, ProcessBound, whole_number
from rag_explain.results.calibration import Calibration
from rag_explain.results.deferred import Deferred, Parts, load
from rag_explain.results.explanation import Explanation
from rag_explain.results.hits import Hit, Hits
from rag_explain.results.metric import Metric
from rag_explain.results.precomputed import Precomputed
from rag_explain.results.stages import Stage
from rag_explain.retrieval.background import Background
from rag_explain.retrieval.black_box import MAX_CALLS, IndexVectors
from rag_explain.retrieval.engines import TOLERANCE, Engine
from rag_explain.retrieval.looks import Looks
from rag_explain.retrieval.mmr import diversified
from rag_explain.retrieval.search import Moments, RetrievedDocument, Search
from rag_explain.retrieval.sharing import ExplainerSource
from rag_explain.retrieval.stages import passed
from rag_explain.retrieval.truth import Checks, Scoring
from rag_explain.retrieval.usage import Embedder
from rag_explain.texts.passage import Passage
from rag_explain.texts.tokens import Unit, known_unit

if TYPE_CHECKING:
    from rag_explain.explainer import Explainer

logger = logging.getLogger("rag_explain.retrieval")

ExplainMode = Literal["lazy", "eager", "off"]
Told = Callable[[int, Deferred[Explanation]], tuple[Stage, ...]]
_NOT_ASKED = "an explanation was not asked for"


class HitExplainer(ProcessBound):
    """Turns what a retriever found into hits with explanations. Safe to use from several threads.

    All explanations of a query that are pending are computed in one batch. One that fails is a warning, and a hit that
    says why it has none.

    Args:
        explainer: an Explainer, or what one is made from: it is then made when the first explanation is needed. From
            an `Embedder` it is made so that it embeds as the framework does.
        explain: "lazy": an explanation is computed when it is first looked at. "eager": all are computed before the
            hits are returned. "off": none.
        top: only the first `top` hits get an explanation; None: all.
        time_limit: seconds that eager explanations of one query may take; what does not fit is skipped and says so.
        unit: what explanations are by: "token", "word" or "sentence". None: by words when they are looked at, by
            sentences where they are eager, which kept factors of a whole corpus can serve.
        metric: what the retriever's scores are: a `Metric` or its name.
        surrogate: why the retriever's scores are not this encoder's similarity (reranked, hybrid), when they are not.
        tolerance: how far a score may be from the encoder's similarity before the two are said to differ.
        name: what finds the documents: the first of every hit's stages.
        embedder: the framework's embedding object, which is asked for a query's vector when that is looked at, if its
            model is here; None: the one that the explainer is made from, if any.
        engine: gives the engine that is searched, which is asked for the vectors of what is looked at.
        max_calls: how many texts are sent at most for one query, however much of it is looked at, where what explains
            only embeds strings; None: as many as it takes. Those by which it is known are among them. A log sends none.

    A retriever whose parts people may exchange gives a `Search` with each call, in place of all of these but the modes
    and the tolerance.
    """

    instead = "make the retriever that holds it anew where it is unpickled"

    def __init__(
        self,
        explainer: ExplainerSource | Embedder | None = None,
        *,
        explain: ExplainMode = "lazy",
        top: int | None = None,
        time_limit: float | None = None,
        unit: Unit | None = None,
        metric: str | Metric = "unknown",
        surrogate: str | None = None,
        tolerance: float = TOLERANCE,
        name: str = "the index",
        embedder: Embedder | None = None,
        engine: Callable[[], Engine | None] = lambda: None,
        max_calls: int | None = MAX_CALLS,
    ) -> None:
        check_mode(explain, top)
        if not (time_limit is None or (isinstance(time_limit, (int, float)) and time_limit >= 0)):
            raise InvalidInput(f"time_limit must be a number of seconds, not {time_limit!r}")
        self.mode, self.top, self.time_limit, self.unit = explain, top, time_limit, unit and known_unit(unit)
        self.tolerance, self.max_calls = tolerance, Budget(max_calls).max_calls
        embedder = explainer if isinstance(explainer, Embedder) else embedder
        fixed = Search(source=explainer, embedder=embedder, metric=Metric.named(metric), surrogate=surrogate, name=name)
        self._fixed, self._engine = fixed, engine
        self._moments, self._checks, self._vectors = Moments(), Checks(), IndexVectors()
        self.background = Background(self)
        if explain != "off":
            self.prepare(fixed)

    def _search(self) -> Search:
        return replace(self._fixed, engine=self._engine())

    def prepare(self, search: Search) -> None:
        """Look at the model for the first time, which takes longer than any other time: not in a search."""
        self._moments.take(search)

    def hits(
        self,
        query: str,
        found: Iterable[RetrievedDocument],
        explain: ExplainMode | None = None,
        *,
        top: int | None = None,
        metric: str | Metric | None = None,
        surrogate: str | None = None,
        query_vector: Any = None,
        search: Search | None = None,
        known: Sequence[Hit | None] = (),
        stages: Told | None = None,
    ) -> Hits:
        """The documents in the order given, each with a handle on its explanation.

        Arguments are those of the class, for this call; a `surrogate` is said beside that of the class. `query_vector`
        is what was searched with, where it is at hand: it is compared with this encoder's own. `known` are the hits of
        wrapped retrievers inside the one that was asked: they are kept, with the stage that came after. `stages` tells
        what the retrievers inside made of a document, by its index and its explanation.
        """
        mode = self.mode if explain is None else explain
        top = self.top if top is None else top
        check_mode(mode, top)
        search, documents = search or self._search(), list(found)
        if unknown := [document for document in documents if not isinstance(document, RetrievedDocument)]:
            raise InvalidInput(f"found must be RetrievedDocuments, not {type(unknown[0]).__name__}")
        reasons = [reason for reason in (search.surrogate, surrogate) if reason]
        scores = search.metric if metric is None else Metric.named(metric)
        scoring = Scoring(scores, reasons, self.tolerance, search.note)
        search = search if query_vector is None else replace(search, query_vector=query_vector)
        wanted = 0 if mode == "off" else len(documents) if top is None else top
        shared = Looks(self, query, scoring, self._moments.take(search), mode == "eager") if wanted else None
        handles: list[Deferred[Explanation]] = [
            shared.deferred(document, "explanation") if shared and rank < wanted else Deferred.skipped(_NOT_ASKED)
            for rank, document in enumerate(documents)
        ]
        inner = [hit if rank < wanted else None for rank, hit in enumerate(known or [None] * len(documents))]
        handles = [handle if hit is None else hit.handle for handle, hit in zip(handles, inner, strict=True)]
        if mode == "eager" and shared is not None:
            handles = self._computed(handles, shared)
        calibration = self.background.of(search, shared.moment if shared else None)
        parts = [
            shared.parts(document) if shared and rank < wanted else None for rank, document in enumerate(documents)
        ]
        made = [
            _hit(document, rank, query, scoring.metric, handle, more, search.name, calibration)
            for rank, (document, handle, more) in enumerate(zip(documents, handles, parts, strict=True), 1)
        ]
        if search.diversity is not None and stages is None and wanted:
            chosen = diversified(search, query, documents, handles)
            stages = lambda index, handle: chosen[index]  # noqa: E731
        return Hits(_staged(search.name, made, inner, None if mode == "off" else stages))

    async def ahits(
        self, query: str, found: Iterable[RetrievedDocument], explain: ExplainMode | None = None, **options: Any
    ) -> Hits:
        """`hits` for a running event loop: what computes, computes in a thread."""
        if self.is_eager(explain):
            return await asyncio.to_thread(self.hits, query, found, explain, **options)
        return self.hits(query, found, explain, **options)

    def is_eager(self, explain: ExplainMode | None) -> bool:
        """Whether a call with this argument computes explanations before it returns."""
        return (self.mode if explain is None else explain) == "eager"

    @property
    def explainer(self) -> Explainer:
        """Created on first use. If that failed, the same exception is raised until the model or its usage changes.

        One made from a model is created anew when that was changed, and one made from an embedding object also when
        that embeds in another way.
        """
        return self._explainer_for(self._search())

    def _explainer_for(self, search: Search) -> Explainer:
        return self._moments.explainer(self._moments.take(search))

    def precompute(self, texts: Sequence[str | Passage], search: Search | None = None, **options: Any) -> Precomputed:
        """Fill the explainer's store from exactly the strings that were embedded; how many were built, kept, failed."""
        return self._explainer_for(search or self._search()).precompute(texts, **options)

    def _computed(self, handles: list[Deferred[Explanation]], shared: Looks) -> list[Deferred[Explanation]]:
        if self.time_limit is not None:
            try:
                # Made once in its life, and not in the time of the query that came first.
                explainer = shared.explainer
            except Exception:  # it is logged, and each hit gives it as its reason
                logger.debug("no explanation of this query is computed")
            else:
                return _computed_in_time(explainer, handles, self.time_limit)
        load(handles)
        return handles


def _computed_in_time(
    explainer: Explainer, handles: Sequence[Deferred[Explanation]], seconds: float
) -> list[Deferred[Explanation]]:
    """One by one, so that what fits is ready; what does not is skipped, and stays so when its computation ends."""
    deadline = time.monotonic() + seconds

    def compute(handle: Deferred[Explanation]) -> None:
        if time.monotonic() < deadline:
            handle.get()

    for job in [explainer.in_background(compute, handle) for handle in handles if handle.status == "pending"]:
        with suppress(TimeoutError, CancelledError):  # it is late, or the explainer was closed
            job.result(timeout=max(0.0, deadline - time.monotonic()))
        job.cancel()
    late = f"it did not fit into the time limit of {seconds:g} s per query"
    return [Deferred.skipped(late) if handle.status == "pending" else handle for handle in handles]


def _hit(
    document: RetrievedDocument,
    rank: int,
    query: str,
    metric: Metric,
    handle: Deferred[Explanation],
    parts: Parts | None,
    name: str,
    calibration: Calibration | None,
) -> Hit:
    chunk, text = document.chunk, document.text
    return Hit(
        id=f"#{rank}" if document.id is None else document.id,
        text=document.whole if chunk or text is None else text.text if isinstance(text, Passage) else text,
        rank=rank,
        score=document.score,
        metric=metric.name,
        stages=(Stage(name, "search", rank, None, document.score, metric.name, handle=handle),),
        metadata=document.metadata,
        handle=handle,
        parts=parts,
        query=query or None,
        around=text.around if isinstance(text, Passage) else ("", ""),
        chunk=chunk,
        calibration=calibration,
    )


def _staged(name: str, made: Sequence[Hit], inner: Sequence[Hit | None], stages: Told | None) -> list[Hit]:
    """The hits, those of wrapped retrievers inside kept, with what the stages made of them."""
    scores = [hit.score for hit in made]
    left = passed(name, inner, scores if any(score is not None for score in scores) else None)
    kept = [own if hit is None else replace(hit, handle=own.handle) for own, hit in zip(made, left, strict=True)]
    return kept if stages is None else [_told(hit, index, inner[index], stages) for index, hit in enumerate(kept)]


def _told(hit: Hit, index: int, inner: Hit | None, stages: Told) -> Hit:
    """The hit with what the retrievers inside made of it, read when it is looked at; as it is, where that fails."""

    def read() -> tuple[Stage, ...]:
        try:
            told = stages(index, hit.handle)
        except Exception as error:  # no look at a hit fails because its search could not be followed
            logger.warning("what each stage made of a document is not known: %s: %s", type(error).__name__, error)
            return hit.stages
        return told if inner is not None else tuple(replace(stage, is_inside=True) for stage in told)

    return replace(hit, stages=read)


def check_mode(explain: object, top: object = None) -> None:
    """Refuse what is not a way to explain, and a `top` that is not a number of hits."""
    if explain not in get_args(ExplainMode):
        raise InvalidInput(f"explain must be 'lazy', 'eager' or 'off', not {explain!r}")
    if top is not None and whole_number(top, "top") < 0:
        raise InvalidInput(f"top must be a number of hits, not {top!r}")
