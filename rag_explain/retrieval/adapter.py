"""What every wrapped retriever shares: explain these documents for this query, keep the order, never fail the search.

FAISS, LangChain and LlamaIndex differ only in what a document is and in where an explanation may be kept.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args
from weakref import WeakKeyDictionary, ref

import numpy as np

from rag_explain.errors import InvalidInput, ProcessBound, whole_number
from rag_explain.results.deferred import Deferred, load
from rag_explain.results.explanation import Explanation
from rag_explain.results.hits import Hit, Hits
from rag_explain.results.metric import Metric
from rag_explain.results.notices import MISMATCH, STAND_INS, Notice
from rag_explain.results.precomputed import Precomputed
from rag_explain.results.stages import Stage
from rag_explain.retrieval.engines import TOLERANCE, Engine
from rag_explain.retrieval.sharing import ExplainerSource, explainer_of, has_changed
from rag_explain.retrieval.truth import Scoring, Stored, asked_notices, rounding
from rag_explain.retrieval.usage import Embedder, Usage
from rag_explain.texts.passage import Passage

if TYPE_CHECKING:
    from rag_explain.explainer import Explainer

logger = logging.getLogger("rag_explain.retrieval")

ExplainMode = Literal["lazy", "eager", "off"]


@dataclass(frozen=True, kw_only=True)
class RetrievedDocument:
    """A document as a retriever returned it: the string that was embedded, and the retriever's own score.

    `id` is the caller's own name of the document, under which a store can forget it; None where there is none.
    """

    id: str | None
    text: str | Passage | None
    score: float | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


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
        metric: what the retriever's scores are: a `Metric` or its name.
        surrogate: why the retriever's scores are not this encoder's similarity (reranked, hybrid), when they are not.
        tolerance: how far a score may be from the encoder's similarity before the two are said to differ.
        name: what finds the documents: the first of every hit's stages.
        embedder: the framework's embedding object, which is asked for a query's vector once, when something is looked
            at; None: the one that the explainer is made from, if any.
        engine: gives the engine that was searched, which is asked for the vectors of what is looked at.
    """

    instead = "make the retriever that holds it anew where it is unpickled"

    def __init__(
        self,
        explainer: ExplainerSource | Embedder,
        *,
        explain: ExplainMode = "lazy",
        top: int | None = None,
        time_limit: float | None = None,
        metric: str | Metric = "unknown",
        surrogate: str | None = None,
        tolerance: float = TOLERANCE,
        name: str = "the index",
        embedder: Embedder | None = None,
        engine: Callable[[], Engine | None] = lambda: None,
    ) -> None:
        check_mode(explain, top)
        if time_limit is not None and not time_limit >= 0:
            raise InvalidInput(f"time_limit must be a number of seconds, not {time_limit!r}")
        self.mode, self.top, self.time_limit = explain, top, time_limit
        self.metric, self.surrogate, self.tolerance = Metric.named(metric), surrogate, tolerance
        self.name, self._source, self._engine = name, explainer, engine
        self._embedder = explainer if isinstance(explainer, Embedder) else embedder
        self._made: tuple[object, Future[Explainer]] | None = None
        self._asked: tuple[object, list[Notice]] | None = None
        self._asked_last: object = None  # the explainer and the query that it was asked for
        self._lock, self._asking = threading.Lock(), threading.Lock()
        self._has_warned = False

    def hits(
        self,
        query: str,
        found: Iterable[RetrievedDocument],
        explain: ExplainMode | None = None,
        *,
        top: int | None = None,
        metric: str | Metric | None = None,
        surrogate: str | None = None,
    ) -> Hits:
        """The documents in the order given, each with a handle on its explanation.

        Arguments are those of the class, for this call; a `surrogate` is said beside that of the class.
        """
        mode = self.mode if explain is None else explain
        top = self.top if top is None else top
        check_mode(mode, top)
        reasons = [reason for reason in (self.surrogate, surrogate) if reason]
        scoring = Scoring(self.metric if metric is None else Metric.named(metric), reasons, self.tolerance)
        shared, documents = _Query(self, query, scoring), list(found)
        wanted = 0 if mode == "off" else len(documents) if top is None else top
        handles = [
            shared.deferred(document) if rank < wanted else Deferred.skipped("an explanation was not asked for")
            for rank, document in enumerate(documents)
        ]
        if mode == "eager":
            handles = self._computed(handles)
        return Hits(
            _hit(document, rank, scoring.metric, handle, self.name)
            for rank, (document, handle) in enumerate(zip(documents, handles, strict=True), 1)
        )

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
        """Created on first use. If that failed, the same exception is raised again without retrying.

        One made from a model is created anew when that was changed, and one made from an embedding object also when
        that embeds in another way.
        """
        with self._lock:
            source, usage, key = self._source, None, None
            if isinstance(source, Embedder):
                usage, model = source.usage(), source.model
                if model is None:
                    raise InvalidInput(f"{source.name} holds no SentenceTransformer any more")
                source, key = model, (ref(model), usage)
            if self._made is None or self._made[0] != key or _is_outdated(self._made[1]):
                self._made = key, self._attempt(source, usage)
            return self._made[1].result()

    @staticmethod
    def _attempt(source: ExplainerSource, usage: Usage | None) -> Future[Explainer]:
        made: Future[Explainer] = Future()
        try:
            made.set_result(explainer_of(source, usage))
        except Exception as error:
            made.set_exception(error)
            logger.warning("documents are returned without explanations: %s", error)
        return made

    def precompute(self, texts: Sequence[str | Passage], **options: Any) -> Precomputed:
        """Fill the explainer's store from exactly the strings that were embedded; how many were built, kept, failed."""
        return self.explainer.precompute(texts, **options)

    def _computed(self, handles: list[Deferred[Explanation]]) -> list[Deferred[Explanation]]:
        if self.time_limit is not None:
            try:
                explainer = self.explainer  # made once in its life, and not in the time of the query that came first
            except Exception:  # `explainer` logged it, and each hit gives it as its reason
                logger.debug("no explanation of this query is computed")
            else:
                return _computed_in_time(explainer, handles, self.time_limit)
        load(handles)
        return handles

    def _checked(
        self, explainer: Explainer, query: str, scoring: Scoring, found: Sequence[tuple[RetrievedDocument, Explanation]]
    ) -> list[Explanation]:
        """The explanations, which say so where they are not of what the retriever scored. The log says it once."""
        scoring = replace(scoring, tolerance=max(scoring.tolerance, rounding(explainer)))
        is_scored = any(scoring.metric.similarity(document.score) is not None for document, _ in found)
        asked, checked = self._asked_notices(explainer, query, is_scored=is_scored), []
        stored = self._stored(explainer, [document for document, _ in found])
        for index, (document, explanation) in enumerate(found):
            notices = scoring.notices(explanation, document.score, asked, stored.get(index))
            reasons = [one for one in (*explanation.notices, *notices) if one.code in STAND_INS]
            if reasons and {one.code for one in reasons} == {MISMATCH} and not self._has_warned:
                self._has_warned = True
                logger.warning("document %r: %s; its explanation is of the encoder only", document.id, reasons[0].text)
            checked.append(explanation.with_notices(*notices))
        return checked

    def _asked_notices(self, explainer: Explainer, query: str, *, is_scored: bool) -> list[Notice]:
        """What the framework's embedding object shows: asked for each query that is looked at.

        Where scores tell the same, and the explainer was made to embed as the object does, once is enough. An object
        that is not here may be slow or cost money: once, too.
        """
        embedder, asked_for = self._embedder, (ref(explainer), query)
        if embedder is None:
            return []
        with self._asking:
            if self._asked_last != asked_for:
                usage = embedder.usage()
                is_followed = usage is not None and embedder is self._source
                is_settled = embedder.model is None or (is_followed and is_scored)
                key = ref(explainer), usage, None if is_settled else query
                if self._asked is None or self._asked[0] != key:
                    self._asked = key, asked_notices(explainer, embedder, usage, query, is_followed=is_followed)
                self._asked_last = asked_for
            assert self._asked is not None
            return self._asked[1]

    def _stored(self, explainer: Explainer, found: Sequence[RetrievedDocument]) -> dict[int, Stored]:
        """What the engine keeps for each document, by index, beside what the encoder computes: one call for all."""
        try:
            engine = self._engine()
            ids = [document.id for document in found if document.id is not None]
            kept = {} if engine is None or not ids else engine.vectors(ids)
            known = [(index, one.id, one.text) for index, one in enumerate(found) if one.id in kept]
            if engine is None or not known:
                return {}
            own = explainer.document_vectors([text or "" for _, _, text in known]).astype(np.float64)
            return {
                index: Stored(engine.metric, np.asarray(kept[name or ""], np.float64), vector)
                for (index, name, _), vector in zip(known, own, strict=True)
            }
        except Exception as error:
            logger.debug("the engine's vectors cannot be compared: %s: %s", type(error).__name__, error)
            return {}


def _is_outdated(made: Future[Explainer]) -> bool:
    return made.exception() is None and has_changed(made.result())


class _Query:
    """What all hits of one query share: each is explained when it is looked at, or all that are pending in one batch.

    Every `Deferred` that it makes has this one object as its `together`.
    """

    def __init__(self, owner: HitExplainer, text: str, scoring: Scoring) -> None:
        self._owner, self._text, self._scoring = owner, text, scoring
        self._explainer: Explainer | None = None
        self._lock = threading.Lock()
        # Weak, because every key refers to this object: hits that are dropped free their texts at once.
        self._documents: WeakKeyDictionary[Deferred[Explanation], RetrievedDocument] = WeakKeyDictionary()

    def deferred(self, document: RetrievedDocument) -> Deferred[Explanation]:
        if document.text is None:
            return Deferred.skipped("the document has no text")
        deferred = Deferred(partial(self._explain, document), together=self)
        self._documents[deferred] = document
        return deferred

    def __call__(self, deferred: Sequence[Deferred[Explanation]]) -> None:
        """Fill all that are pending. If one spoils the batch they stay so, and `load` computes them one by one."""
        with self._lock:  # a second thread finds them filled
            pending = [one for one in deferred if one.status == "pending"]
            try:
                explanations = self._explained([self._documents[one] for one in pending]) if pending else []
            except Exception as error:
                logger.debug("a batch is explained one by one: %s: %s", type(error).__name__, error)
                return
            for one, explanation in zip(pending, explanations, strict=True):
                one.fill(explanation)

    def _explain(self, document: RetrievedDocument) -> Explanation:
        # One that cannot be made is logged once, not for each document.
        self._explainer = self._explainer or self._owner.explainer
        try:
            return self._explained([document])[0]
        except Exception as error:
            logger.warning("document %r could not be explained: %s: %s", document.id, type(error).__name__, error)
            raise

    def _explained(self, documents: Sequence[RetrievedDocument]) -> list[Explanation]:
        texts = [document.text for document in documents if document.text is not None]
        ids = [document.id for document in documents]
        explainer = self._explainer = self._explainer or self._owner.explainer  # read anew for each query
        explanations = explainer.explain_many(self._text, texts, ids=ids)
        found = list(zip(documents, explanations, strict=True))
        return self._owner._checked(explainer, self._text, self._scoring, found)


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


def _hit(document: RetrievedDocument, rank: int, metric: Metric, handle: Deferred[Explanation], name: str) -> Hit:
    text = document.text
    return Hit(
        id=f"#{rank}" if document.id is None else document.id,
        text=text.text if isinstance(text, Passage) else text,
        rank=rank,
        score=document.score,
        metric=metric.name,
        stages=(Stage(name, "search", rank, None, document.score, metric.name),),
        metadata=document.metadata,
        handle=handle,
        around=text.around if isinstance(text, Passage) else ("", ""),
    )


def check_mode(explain: object, top: object = None) -> None:
    """Refuse what is not a way to explain, and a `top` that is not a number of hits."""
    if explain not in get_args(ExplainMode):
        raise InvalidInput(f"explain must be 'lazy', 'eager' or 'off', not {explain!r}")
    if top is not None and whole_number(top, "top") < 0:
        raise InvalidInput(f"top must be a number of hits, not {top!r}")
