"""What every wrapped retriever shares: explain these documents for this query, keep the order, never fail the search.

FAISS, LangChain and LlamaIndex differ only in what a document is and in where an explanation may be kept.
"""

from __future__ import annotations

import asyncio
import logging
import operator
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, get_args
from weakref import WeakKeyDictionary

from rag_explain.errors import InvalidInput
from rag_explain.results.deferred import Deferred, load
from rag_explain.results.explanation import Explanation
from rag_explain.results.hits import Hit, Hits
from rag_explain.results.metric import Metric
from rag_explain.results.notices import MISMATCH, STAND_INS
from rag_explain.retrieval.sharing import ExplainerSource, explainer_of
from rag_explain.retrieval.truth import TOLERANCE, Scoring
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


class HitExplainer:
    """Turns what a retriever found into hits with explanations. Safe to use from several threads.

    All explanations of a query that are pending are computed in one batch. One that fails is a warning, and a hit that
    says why it has none.

    Args:
        explainer: an Explainer, or what one is made from: it is then made when the first explanation is needed.
        explain: "lazy": an explanation is computed when it is first looked at. "eager": all are computed before the
            hits are returned. "off": none.
        top: only the first `top` hits get an explanation; None: all.
        time_limit: seconds that eager explanations of one query may take; what does not fit is skipped and says so.
        metric: what the retriever's scores are: a `Metric` or its name.
        surrogate: why the retriever's scores are not this encoder's similarity (reranked, hybrid), when they are not.
        tolerance: how far a score may be from the encoder's similarity before the two are said to differ.
    """

    def __init__(
        self,
        explainer: ExplainerSource,
        *,
        explain: ExplainMode = "lazy",
        top: int | None = None,
        time_limit: float | None = None,
        metric: str | Metric = "unknown",
        surrogate: str | None = None,
        tolerance: float = TOLERANCE,
    ) -> None:
        check_mode(explain, top)
        if time_limit is not None and not time_limit >= 0:
            raise InvalidInput(f"time_limit must be a number of seconds, not {time_limit!r}")
        self.mode, self.top, self.time_limit = explain, top, time_limit
        self.metric, self.surrogate, self.tolerance = _metric(metric), surrogate, tolerance
        self._source = explainer
        self._made: Future[Explainer] = Future()
        self._lock = threading.Lock()
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
        scoring = Scoring(self.metric if metric is None else _metric(metric), reasons, self.tolerance)
        shared, documents = _Query(self, query, scoring), list(found)
        wanted = 0 if mode == "off" else len(documents) if top is None else top
        handles = [
            shared.deferred(document) if rank < wanted else Deferred.skipped("an explanation was not asked for")
            for rank, document in enumerate(documents)
        ]
        if mode == "eager":
            handles = self._computed(handles)
        return Hits(
            _hit(document, rank, scoring.metric, handle)
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
        """Created on first use. If that failed, the same exception is raised again without retrying."""
        with self._lock:
            if not self._made.done():
                try:
                    self._made.set_result(explainer_of(self._source))
                except Exception as error:
                    self._made.set_exception(error)
                    logger.warning("documents are returned without explanations: %s", error)
            return self._made.result()

    def precompute(self, texts: Sequence[str | Passage], **options: Any) -> int:
        """Fill the explainer's store from exactly the strings that were embedded; how many were built."""
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

    def _checked(self, scoring: Scoring, document: RetrievedDocument, explanation: Explanation) -> Explanation:
        """The explanation, which says so where it is not of what the retriever scored. The log says it once."""
        notices = scoring.notices(explanation, document.score)
        reasons = [notice.code for notice in (*explanation.notices, *notices) if notice.code in STAND_INS]
        if reasons == [MISMATCH] and not self._has_warned:
            self._has_warned = True
            logger.warning("document %r: %s; its explanation is of the encoder only", document.id, notices[-1].text)
        return explanation.with_notices(*notices)


class _Query:
    """What all hits of one query share: each is explained when it is looked at, or all that are pending in one batch.

    Every `Deferred` that it makes has this one object as its `together`.
    """

    def __init__(self, owner: HitExplainer, text: str, scoring: Scoring) -> None:
        self._owner, self._text, self._scoring = owner, text, scoring
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
        self._owner.explainer  # noqa: B018  # one that cannot be made is logged once, not for each document
        try:
            return self._explained([document])[0]
        except Exception as error:
            logger.warning("document %r could not be explained: %s: %s", document.id, type(error).__name__, error)
            raise

    def _explained(self, documents: Sequence[RetrievedDocument]) -> list[Explanation]:
        texts = [document.text for document in documents if document.text is not None]
        ids = [document.id for document in documents]
        explanations = self._owner.explainer.explain_many(self._text, texts, ids=ids)
        return [self._owner._checked(self._scoring, *both) for both in zip(documents, explanations, strict=True)]


def _computed_in_time(
    explainer: Explainer, handles: Sequence[Deferred[Explanation]], seconds: float
) -> list[Deferred[Explanation]]:
    """One by one, so that what fits is ready; what does not is skipped, and stays so when its computation ends."""
    deadline = time.monotonic() + seconds

    def compute(handle: Deferred[Explanation]) -> None:
        if time.monotonic() < deadline:
            handle.get()

    for job in [explainer.in_background(compute, handle) for handle in handles if handle.status == "pending"]:
        try:
            job.result(timeout=max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            job.cancel()
        except CancelledError:
            logger.debug("the explainer was closed during a search")
    late = f"it did not fit into the time limit of {seconds:g} s per query"
    return [Deferred.skipped(late) if handle.status == "pending" else handle for handle in handles]


def _hit(document: RetrievedDocument, rank: int, metric: Metric, handle: Deferred[Explanation]) -> Hit:
    text = document.text
    return Hit(
        id=f"#{rank}" if document.id is None else document.id,
        text=text.text if isinstance(text, Passage) else text,
        rank=rank,
        score=document.score,
        metric=metric.name,
        metadata=document.metadata,
        handle=handle,
        around=text.around if isinstance(text, Passage) else ("", ""),
    )


def _metric(metric: str | Metric) -> Metric:
    return metric if isinstance(metric, Metric) else Metric.named(metric)


def check_mode(explain: object, top: object = None) -> None:
    """Refuse what is not a way to explain, and a `top` that is not a number of hits."""
    if explain not in get_args(ExplainMode):
        raise InvalidInput(f"explain must be 'lazy', 'eager' or 'off', not {explain!r}")
    if top is not None and whole_number(top, "top") < 0:
        raise InvalidInput(f"top must be a number of hits, not {top!r}")


def whole_number(value: object, name: str) -> int:
    """The value as an int, of numpy's kinds too; anything but a whole number is refused."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise InvalidInput(f"{name} must be a whole number, not {value!r}")
    return operator.index(value)
