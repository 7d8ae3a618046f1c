"""What every wrapped retriever shares: explain these texts for this query, keep the order, never fail the search.

FAISS, LangChain and LlamaIndex differ in what a document is and in where an explanation may be kept. What happens in
between lives here, once: an explanation is lazy (it costs nothing until somebody looks), eager, or not asked for; a
failure is a warning and a hit that says why it has no explanation; eager work stops at a time budget; a score that is
not this encoder's is noticed and said.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias
from weakref import WeakKeyDictionary

from rag_explain.errors import InvalidInput
from rag_explain.results.deferred import Deferred
from rag_explain.results.explanation import Explanation
from rag_explain.results.hits import Hit, Hits
from rag_explain.results.metric import Metric
from rag_explain.results.notices import MISMATCH, OTHER_RANKING, OTHER_SCORE, Notice
from rag_explain.texts.passage import Passage

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from rag_explain.explainer import Explainer

logger = logging.getLogger(__name__)

Explain: TypeAlias = bool | int | Literal["lazy", "eager"]
ExplainerSource: TypeAlias = "Explainer | SentenceTransformer | str | Path | Callable[[], Explainer]"

# An index keeps float32, sometimes float16 vectors; another model, or another text, is off by far more.
TOLERANCE = 0.02
# Beyond the budget a computation that has begun cannot be stopped: it may occupy this many threads and no more.
_WORKERS = 2
_HOLDERS = ("_client", "client", "_model", "model", "_embed_model", "embedding_function", "embeddings", "embed_model")


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

    Args:
        explainer: an Explainer, or what one is made from: it is then made when the first explanation is needed.
        explain: True or "lazy": each explanation is computed when it is first looked at. "eager": all are computed
            before the hits are returned. An int: lazy, for the first n hits only. False: none.
        budget: seconds that eager explanations of one query may take; what does not fit is skipped and says so.
        metric: what the retriever's scores are, see `Hit.metric`.
        surrogate: why the retriever's scores are not this encoder's similarity (reranked, hybrid), when they are not.
        tolerance: how far a score may be from the encoder's similarity before the two are said to differ.
    """

    def __init__(
        self,
        explainer: ExplainerSource,
        *,
        explain: Explain = "lazy",
        budget: float | None = None,
        metric: str = "unknown",
        surrogate: str | None = None,
        tolerance: float = TOLERANCE,
    ) -> None:
        check_explain(explain)
        if budget is not None and not budget >= 0:
            raise InvalidInput(f"budget must be a number of seconds, not {budget!r}")
        self.mode = explain
        self.budget = budget
        self.metric = metric
        self.surrogate = surrogate
        self.tolerance = tolerance
        self._source = explainer
        self._made: Explainer | None = None
        self._refused: Exception | None = None
        self._lock = threading.Lock()
        self._said_mismatch = False

    # ------------------------------------------------------------------ hits

    def hits(
        self,
        query: str,
        found: Iterable[RetrievedDocument],
        explain: Explain | None = None,
        *,
        metric: str | None = None,
        surrogate: str | None = None,
    ) -> Hits:
        """The documents in the order given, each with a handle on its explanation."""
        found = list(found)
        mode = self.mode if explain is None else explain
        wanted = wanted_hits(mode, len(found))
        metric = metric or self.metric
        work = _Work(query, metric, surrogate or self.surrogate)
        handles = [
            self._handle(work, document)
            if rank < wanted
            else Deferred(None, status="skipped", reason="an explanation was not asked for")
            for rank, document in enumerate(found)
        ]
        if self.is_eager(explain):
            handles = self._compute(work, found, handles)
        return Hits(
            Hit(
                id=f"#{rank}" if document.id is None else document.id,
                text=document.text.text if isinstance(document.text, Passage) else document.text,
                rank=rank,
                score=document.score,
                metric=metric,
                metadata=document.metadata,
                handle=handle,
                around=document.text.around if isinstance(document.text, Passage) else ("", ""),
            )
            for rank, (document, handle) in enumerate(zip(found, handles, strict=True), 1)
        )

    async def ahits(
        self, query: str, found: Iterable[RetrievedDocument], explain: Explain | None = None, **options: Any
    ) -> Hits:
        """`hits` for a running event loop: what computes, computes in a thread."""
        if self.is_eager(explain):
            return await asyncio.to_thread(self.hits, query, found, explain, **options)
        return self.hits(query, found, explain, **options)

    def is_eager(self, explain: Explain | None) -> bool:
        """Whether a call with this argument computes explanations before it returns."""
        return (self.mode if explain is None else explain) == "eager"

    @property
    def explainer(self) -> Explainer:
        """The Explainer, made now if nobody needed it before. What refused once is refused again, at no cost."""
        with self._lock:
            if self._refused is not None:
                raise self._refused
            if self._made is None:
                try:
                    self._made = _make(self._source)
                except Exception as error:
                    self._refused = error
                    logger.warning("documents are returned without explanations: %s", error)
                    raise
            return self._made

    def precompute(self, texts: Sequence[str | Passage], **options: Any) -> int:
        """Fill the explainer's store from exactly the strings that were embedded; how many were built."""
        return self.explainer.precompute(texts, **options)

    # ------------------------------------------------------------------ one explanation

    def _handle(self, work: _Work, document: RetrievedDocument) -> Deferred[Explanation]:
        text = document.text
        if text is None:
            return Deferred(None, status="skipped", reason="the document has no text")
        return Deferred(lambda: self._explain(work, document, text))

    def _explain(self, work: _Work, document: RetrievedDocument, text: str | Passage) -> Explanation:
        explainer = self.explainer
        try:
            (explanation,) = explainer.explain_many(work.query, [text], ids=[document.id])
            return self._marked(work, document, explanation)
        except Exception as error:
            logger.warning("document %r could not be explained: %s: %s", document.id, type(error).__name__, error)
            raise

    def _marked(self, work: _Work, document: RetrievedDocument, explanation: Explanation) -> Explanation:
        """Say so where what is explained is not what the retriever scored."""
        if work.surrogate:
            explanation = explanation.with_notices(Notice(OTHER_RANKING, work.surrogate))
        metric = Metric.find(work.metric)
        claimed = None if metric is None else metric.similarity(document.score)
        is_other = any(notice.code == OTHER_SCORE for notice in explanation.notices)  # there is nothing to compare
        if is_other or work.surrogate or claimed is None or abs(claimed - explanation.score) <= self.tolerance:
            return explanation
        reason = (
            f"the index's score implies a similarity of {claimed:.4f}, but this encoder computes "
            f"{explanation.score:.4f}: the index was probably built with another model, another prompt, or rescaled "
            "vectors"
        )
        if not self._said_mismatch:
            self._said_mismatch = True
            logger.warning("document %r: %s; its explanation is of the encoder only", document.id, reason)
        return explanation.with_notices(Notice(MISMATCH, reason))

    # ------------------------------------------------------------------ all explanations, now

    def _compute(
        self, work: _Work, found: Sequence[RetrievedDocument], handles: list[Deferred[Explanation]]
    ) -> list[Deferred[Explanation]]:
        pending = [rank for rank, handle in enumerate(handles) if handle.status == "pending"]
        if self.budget is not None:
            return self._compute_in_time(handles, pending, self.budget)
        texts = [text for rank in pending if (text := found[rank].text) is not None]
        try:
            explanations = self.explainer.explain_many(work.query, texts, ids=[found[rank].id for rank in pending])
            for rank, explanation in zip(pending, explanations, strict=True):
                handles[rank] = Deferred.ready(self._marked(work, found[rank], explanation))
        except Exception:  # one document spoiled the batch: each of the others still gets its own chance
            for handle in handles:
                handle.get()
        return handles

    def _compute_in_time(
        self, handles: list[Deferred[Explanation]], pending: Sequence[int], budget: float
    ) -> list[Deferred[Explanation]]:
        try:
            pool = _pool(self.explainer)  # made once in its life, and not on the budget of the query that came first
        except Exception:  # said by `explainer`; each hit says it too
            for handle in handles:
                handle.get()
            return handles
        deadline = time.monotonic() + budget
        jobs: list[Future[None]] = [pool.submit(_unless_late, handles[rank], deadline) for rank in pending]
        for rank, job in zip(pending, jobs, strict=True):
            try:
                job.result(timeout=max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                job.cancel()
            if handles[rank].status == "pending":
                handles[rank] = Deferred(
                    None, status="skipped", reason=f"it did not fit into the time budget of {budget:g} s per query"
                )
        return handles


@dataclass(frozen=True)
class _Work:
    """What all hits of one query have in common."""

    query: str
    metric: str
    surrogate: str | None


def _unless_late(handle: Deferred[Explanation], deadline: float) -> None:
    if time.monotonic() < deadline:
        handle.get()


def check_explain(explain: object) -> None:
    """Refuse what is not a way to explain."""
    if not (isinstance(explain, bool) or explain in ("lazy", "eager") or (isinstance(explain, int) and explain >= 0)):
        raise InvalidInput(f"explain must be True, False, 'lazy', 'eager' or a number of hits, not {explain!r}")


def wanted_hits(explain: Explain, found: int) -> int:
    """How many of the hits, from the first, are to have an explanation."""
    check_explain(explain)
    if explain is True or isinstance(explain, str):
        return found
    return min(found, int(explain))


def surrogate_reason(declared: str | bool | None, found_out: str | None) -> str | None:
    """What the user declared, a reason or False for the encoder's own scores, goes before what was found out."""
    if isinstance(declared, str):
        return declared
    return None if declared is False else found_out


def find_model(holder: object) -> SentenceTransformer | None:
    """The SentenceTransformer inside a framework's embedding object or vector store, so that nobody names it twice.

    The classes that hold one (HuggingFaceEmbeddings, HuggingFaceEmbedding and what derives from them) keep it in one
    of a few attributes; the class of what is found decides, not the name of the holder.
    """
    module = sys.modules.get("sentence_transformers")
    if module is None:  # nobody can hold what was never loaded
        return None
    return _find_model(holder, module.SentenceTransformer, depth=3)


def _find_model(holder: object, kind: type[SentenceTransformer], depth: int) -> SentenceTransformer | None:
    if isinstance(holder, kind):
        return holder
    if holder is None or depth == 0 or isinstance(holder, (str, int, float, bytes)):
        return None
    for name in _HOLDERS:
        found = _find_model(getattr(holder, name, None), kind, depth - 1)
        if found is not None:
            return found
    return None


# Wrappers around one model share its Explainer, and what runs on one Explainer shares its threads.
_explainers: WeakKeyDictionary[object, Explainer] = WeakKeyDictionary()
_pools: WeakKeyDictionary[Explainer, ThreadPoolExecutor] = WeakKeyDictionary()
_sharing = threading.Lock()


def _pool(explainer: Explainer) -> ThreadPoolExecutor:
    with _sharing:
        if explainer not in _pools:
            _pools[explainer] = ThreadPoolExecutor(_WORKERS, "rag_explain")
        return _pools[explainer]


def _make(source: ExplainerSource) -> Explainer:
    from rag_explain.explainer import Explainer

    if isinstance(source, Explainer):
        return source
    if isinstance(source, (str, Path)):
        return Explainer(source)
    if find_model(source) is source:
        with _sharing:
            if source not in _explainers:
                _explainers[source] = Explainer(source)
            return _explainers[source]
    if callable(source):
        return source()
    raise InvalidInput(f"explainer must be an Explainer or a model to make one from, not {type(source).__name__}")
