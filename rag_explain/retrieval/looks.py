"""What all hits of one query share: how the search was made, and one batch for each part that is looked at."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

from rag_explain.budget import Budget, at_most
from rag_explain.errors import BudgetSpent, EmbedderStopped, InvalidInput
from rag_explain.results.deferred import Deferred, Parts
from rag_explain.results.explanation import Explanation
from rag_explain.results.notices import CHUNK, Notice
from rag_explain.retrieval.black_box import IndexVectors, told, unlogged
from rag_explain.retrieval.hit_questions import asked_of, what_ifs
from rag_explain.retrieval.search import Moment, Moments, RetrievedDocument
from rag_explain.retrieval.truth import Checks, Scoring
from rag_explain.texts.passage import Passage
from rag_explain.texts.tokens import Unit

if TYPE_CHECKING:
    from rag_explain.explainer import Explainer

logger = logging.getLogger("rag_explain.retrieval")

_APART = (
    "the document was found by a text that was embedded for it and does not stand in it, such as a summary: "
    "what is explained is that text"
)


class Owner(Protocol):
    """What searches: `HitExplainer`."""

    max_calls: int | None
    unit: Unit | None
    _moments: Moments
    _checks: Checks
    _vectors: IndexVectors


class Looks:
    """What all hits of one query share: how the search was made, and one batch for each part that is looked at."""

    def __init__(self, owner: Owner, text: str, scoring: Scoring, moment: Moment, is_eager: bool) -> None:
        self.owner, self.text, self.scoring, self.moment = owner, text, scoring, moment
        self.is_eager, self.reserved, self.budget = is_eager, unlogged(moment), Budget(owner.max_calls)
        self._explainer: Explainer | None = None
        self._batches: dict[str, _Batch] = {}
        self._itself = Deferred(self._explained_itself)

    def deferred(self, document: RetrievedDocument, name: str) -> Deferred[Any]:
        """A part of a hit, by its name in `_COMPUTED`, to be computed with those of the other hits."""
        if name == "itself":
            return self._itself
        return self._batches.setdefault(name, self._batches.get(name) or _Batch(self, name)).deferred(document)

    def parts(self, document: RetrievedDocument) -> Parts:
        """What else can be had of a hit, on demand."""
        return Parts(partial(self.deferred, document), partial(asked_of, self, document))

    @property
    def explainer(self) -> Explainer:
        """Read anew for each query: the model as it is now, used as it was in the search."""
        with at_most(self.budget):
            self._explainer = self._explainer or self.owner._moments.explainer(self.moment)
        return self._explainer

    def _explained_itself(self) -> Explanation:
        """The query explained as a document, which tells how much each of its words weighs."""
        method = self.explainer.method
        if not method.linear or method.edits:  # to leave parts out of the query costs more than it tells
            raise InvalidInput(f"{method.name} does not tell how much a word of a query weighs")
        return self.explainer.explain(self.text, self.text, unit="word")

    @property
    def unit(self) -> Unit | None:
        """A look asks for words, but where each is paid for. What runs on every answer asks for sentences, which are
        kept for a corpus."""
        by_default: Unit = "sentence" if self.is_eager else "word"
        return self.owner.unit or (None if self.explainer.method.edits else by_default)

    def give_vectors(self, documents: Sequence[RetrievedDocument]) -> None:
        """What the index keeps need not be paid for."""
        self.owner._vectors.give(self.explainer, self.moment.search.engine, documents)

    def checked(self, found: Sequence[tuple[RetrievedDocument, Any]]) -> list[Any]:
        """The values, which say how they were made, and where they are not of what the retriever scored."""
        checked = self.owner._checks.checked(self.explainer, self.moment, self.text, self.scoring, found)
        notices = told(self.moment, self.budget)
        return [value.with_notices(*notices) for value in checked]


class _Batch:
    """One part of all hits of a query: computed when it is looked at, or all that are pending in one batch.

    Every `Deferred` that it makes has this one object as its `together`.
    """

    def __init__(self, query: Looks, name: str) -> None:
        self._query, self._name = query, name
        self._lock = threading.Lock()
        self._stopped: tuple[set[int], Exception] = set(), Exception()  # what cannot be asked need not be asked again
        # Weak, because every key refers to this object: hits that are dropped free their texts at once.
        self._documents: WeakKeyDictionary[Deferred[Any], RetrievedDocument] = WeakKeyDictionary()

    def deferred(self, document: RetrievedDocument) -> Deferred[Any]:
        if document.text is None:
            unknown = "the chunk by which the document was found is not known"
            return Deferred.skipped("the document has no text" if document.whole is None else unknown)
        deferred = Deferred(partial(self._compute, document), together=self, reserved=self._query.reserved)
        self._documents[deferred] = document
        return deferred

    def __call__(self, deferred: Sequence[Deferred[Any]]) -> None:
        """Fill all that are pending. If one spoils the batch they stay so, and `load` computes them one by one."""
        with self._lock:  # a second thread finds them filled
            pending = [one for one in deferred if one.status == "pending"]
            documents = [self._documents[one] for one in pending]
            try:
                values = self._computed(documents) if pending else []
            except Exception as error:
                if isinstance(error, EmbedderStopped) and not isinstance(error, BudgetSpent):
                    self._stopped = set(map(id, documents)), error
                logger.debug("a batch is explained one by one: %s: %s", type(error).__name__, error)
                return
            for one, value in zip(pending, values, strict=True):
                one.fill(value)

    def _compute(self, document: RetrievedDocument) -> Any:
        _ = self._query.explainer  # one that cannot be made is logged once, not for each document
        try:
            if id(document) in self._stopped[0]:
                raise self._stopped[1]
            return self._computed([document])[0]
        except Exception as error:
            logger.warning("document %r could not be explained: %s: %s", document.id, type(error).__name__, error)
            raise

    def _computed(self, documents: Sequence[RetrievedDocument]) -> list[Any]:
        texts = [document.text for document in documents if document.text is not None]
        with at_most(self._query.budget):
            if self._name not in ("evidence", "what_if"):  # which no embedding of a whole text tells
                self._query.give_vectors(documents)
            values = _COMPUTED[self._name](self._query, texts, [document.id for document in documents])
            if self._name == "what_if":  # it was computed again, and is shown beside what is checked
                return values
            if self._name != "evidence":  # where to look: it says nothing of a score
                values = self._query.checked(list(zip(documents, values, strict=True)))
        return [_shown(value, document) for value, document in zip(values, documents, strict=True)]


def _explanations(query: Looks, texts: Sequence[str | Passage], ids: Sequence[str | None]) -> list[Any]:
    return list(query.explainer.explain_many(query.text, texts, unit=query.unit, ids=ids))


def _sentences(query: Looks, texts: Sequence[str | Passage], ids: Sequence[str | None]) -> list[Any]:
    return list(query.explainer.explain_many(query.text, texts, unit="sentence", ids=ids))


def _highlights(query: Looks, texts: Sequence[str | Passage], ids: Sequence[str | None]) -> list[Any]:
    return list(query.explainer.highlight_many(query.text, texts, ids=ids))


def _evidence(query: Looks, texts: Sequence[str | Passage], ids: Sequence[str | None]) -> list[Any]:
    return list(query.explainer.evidence_many(query.text, texts))


_COMPUTED = {
    "explanation": _explanations,
    "sentences": _sentences,
    "highlights": _highlights,
    "evidence": _evidence,
    "what_if": what_ifs,
}


def _shown(value: Any, document: RetrievedDocument) -> Any:
    """What was computed of a chunk, in the document that it is of: the one that was returned."""
    if document.whole is None:
        return value
    if document.chunk is None:
        return value.with_notices(Notice(CHUNK, _APART))
    start, end = document.chunk
    found = f"the document was found by its characters {start:,} to {end:,}: what is explained is this chunk alone"
    return value.with_notices(Notice(CHUNK, found, "note")).within(document.whole, start)
