"""The explanations of legs and rerankers: each by what scored there, when it is looked at."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rag_explain.errors import ProcessBound
from rag_explain.results.deferred import Deferred
from rag_explain.results.explanation import Explanation
from rag_explain.results.notices import UNCHECKED, Notice
from rag_explain.retrieval.holders import inside
from rag_explain.retrieval.sharing import explainer_of
from rag_explain.retrieval.usage import Embedder, has_model
from rag_explain.texts.passage import Passage

if TYPE_CHECKING:
    from rag_explain.explainer import Explainer

_LATER = Notice(
    UNCHECKED,
    "this stage is explained by its scorer as it is now: that it scored so in the search was not compared",
    "note",
)
Make = Callable[[], "Explainer"]


class Legs(ProcessBound):
    """Explains what each part inside one retriever scored; an Explainer of a part is made when it is first needed."""

    instead = "make the retriever that holds it anew where it is unpickled"

    def __init__(self) -> None:
        self._made: dict[int, tuple[object, Explainer]] = {}
        self._lock = threading.Lock()

    def of(self, owner: object, make: Make) -> Make:
        """The Explainer of a part, made once; `owner` is held, so that its place in memory names no other."""

        def made() -> Explainer:
            with self._lock:
                if id(owner) not in self._made:
                    self._made[id(owner)] = owner, make()
                return self._made[id(owner)][1]

        return made


def scorer_of(owner: object, embedder: Embedder | None) -> Make | None:
    """What makes the Explainer of a search inside a retriever; None where nothing is known that explains its scores."""
    from rag_explain.scorers.holders import is_held

    if is_held(owner):
        return partial(_explainer, owner)
    if embedder is not None and has_model(embedder):
        model, usage = embedder.seen()
        return None if model is None else partial(explainer_of, model, usage)
    return None


def reranker_of(owner: object) -> Make | None:
    """What makes the Explainer of a reranker: that of the only cross-encoder in it; None where there is none."""
    module = sys.modules.get("sentence_transformers")
    if module is None:  # a model cannot be held before its library is loaded
        return None
    found = inside(owner, lambda one: isinstance(one, module.CrossEncoder), (type(owner),))
    return partial(explainer_of, found[0]) if len(found) == 1 else None


def reranked(owner: object, query: str | None, text: str | Passage | None) -> Deferred[Explanation] | None:
    """The explanation of one score that a reranker gave, outside of all searches; None where it cannot be explained."""
    make = reranker_of(owner)
    return None if make is None or query is None else LegBatches().deferred(id(owner), make, query, text)


def _explainer(source: Any) -> Explainer:
    from rag_explain.explainer import Explainer

    return Explainer(source)


class LegBatches:
    """The explanations of all legs of one search: those of one leg and one query are computed in one batch."""

    def __init__(self) -> None:
        self._batches: dict[Hashable, _Batch] = {}

    def deferred(
        self, name: Hashable, make: Make, query: str, text: str | Passage | None
    ) -> Deferred[Explanation] | None:
        """What explains this text for this query; `name` is the leg's."""
        if text is None:
            return None
        return self._batches.setdefault((name, query), _Batch(make, query)).deferred(text)


class _Batch:
    """Every `Deferred` that it makes has this one object as its `together`."""

    def __init__(self, make: Make, query: str) -> None:
        self._make, self._query = make, query
        self._texts: dict[int, str | Passage] = {}
        self._lock = threading.Lock()

    def deferred(self, text: str | Passage) -> Deferred[Explanation]:
        made: Deferred[Explanation] = Deferred(partial(self._one, text), together=self)
        self._texts[id(made)] = text
        return made

    def __call__(self, deferred: Sequence[Deferred[Any]]) -> None:
        """Fill all that are pending; one that spoils the batch leaves them so, to be computed one by one."""
        with self._lock:
            pending = [one for one in deferred if one.status == "pending"]
            try:
                values = self._computed([self._texts[id(one)] for one in pending]) if pending else []
            except Exception:  # each says why not
                return
            for one, value in zip(pending, values, strict=True):
                one.fill(value)

    def _one(self, text: str | Passage) -> Explanation:
        return self._computed([text])[0]

    def _computed(self, texts: Sequence[str | Passage]) -> list[Explanation]:
        return [one.with_notices(_LATER) for one in self._make().explain_many(self._query, texts, unit="word")]
