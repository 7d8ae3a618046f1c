"""What ran inside a retriever while it was asked, and what each part made of a document: its stages.

Frameworks tell of the retrievers inside a retriever while they run, and of what each returned. That is kept here until
the outermost one has answered, and read once: nothing is retrieved again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from rag_explain.results.deferred import Deferred
from rag_explain.results.explanation import Explanation
from rag_explain.results.hits import Hit
from rag_explain.results.stages import Kind, Stage
from rag_explain.retrieval.fusion import totals
from rag_explain.retrieval.stages import same_score

_TOLERANCE = 1e-9
_UNFOLLOWED = "what its legs contribute does not sum to the scores that it gave, or to its order: it is not shown"
_MISSED: Deferred[Explanation] = Deferred.skipped("this search did not find the document")
_UNMEANT = "its score is not the mean of the parts that were found: what each adds is not known"
_UNFOUND = "it is not among what was found inside"


@dataclass(frozen=True)
class Found:
    """A document as one run returned it."""

    keys: Sequence[Hashable]  # what it is known by, the most telling first
    score: float | None
    hit: Hit | None  # what a wrapped retriever put beside it
    item: Any  # the framework's document


@dataclass(eq=False)
class Run:
    """A retriever that was asked, what it was asked, and what it returned."""

    name: str
    owner: Any
    query: str | None
    leg: int | None = None  # which leg of the run around it this is, where the framework says so
    is_wrapped: bool = False  # its documents have hits with their stages beside them
    found: Sequence[Found] | None = None  # None until it has answered
    inner: list[Run] = field(default_factory=list)  # in the order in which they began

    @property
    def answered(self) -> list[Run]:
        """The runs inside it that returned something."""
        return [run for run in self.inner if run.found is not None]

    def followed(self, keys: Sequence[Hashable]) -> Iterator[tuple[Run, int | None]]:
        """Each run, those inside first, with the rank that it gave what is known by one of these keys."""
        for inner in self.answered:
            yield from inner.followed(keys)
        ranks: dict[Hashable, int] = {}
        for rank, one in enumerate(self.found or (), 1):
            for key in one.keys:
                ranks.setdefault(key, rank)
        yield self, next((ranks[key] for key in keys if key in ranks), None)


_overheard: ContextVar[list[Run] | None] = ContextVar("rag_explain_overheard", default=None)


@contextmanager
def overhearing() -> Iterator[list[Run]]:
    """What ran in the searches that are made inside, for who asks about what they did not return: the whole is last."""
    runs: list[Run] = []
    token = _overheard.set(runs)
    try:
        yield runs
    finally:
        _overheard.reset(token)


def overheard(run: Run) -> None:
    """A search was made, in which this ran."""
    runs = _overheard.get()
    if runs is not None:
        runs.append(run)


@dataclass(frozen=True)
class Combination:
    """How a run puts the lists of others together."""

    legs: Sequence[Run]
    kind: Kind = "merge"
    metric: str = "unknown"  # what its scores are
    shares: Sequence[Mapping[Hashable, float]] | None = None  # for each leg: what it adds to the score, by key
    weights: Sequence[float | None] | None = None
    key: Callable[[Found], Hashable] | None = None  # what makes two documents one; None: the first of their keys
    is_by_score: bool = False  # the rank in a leg that counts is that by its score
    note: str | None = None
    tolerance: float = 1e-9  # how far the sum may be from the score: servers tell theirs in single precision


class Trace:
    """The runs inside one search, by the names that the framework gives them."""

    def __init__(self, root: Hashable) -> None:
        self._above: dict[Hashable, Hashable] = {root: None}
        self._runs: dict[Hashable, Run] = {}
        self._inside: dict[Hashable, list[Run]] = {root: []}

    def enter(self, name: Hashable, parent: Hashable, run: Run | None = None) -> bool:
        """Something begins, which is a retriever if a run is given; False where it is not part of this search."""
        if parent not in self._above:
            return False
        self._above[name] = parent
        if run is not None:
            self._runs[name] = run
            self._around(parent).append(run)
        return True

    def leave(self, name: Hashable, found: Callable[[Run], Sequence[Found]]) -> None:
        """A retriever has answered: what it returned is read now, since others may write to it."""
        run = self._runs.get(name)
        if run is not None:
            run.found = found(run)

    def inside(self, name: Hashable) -> list[Run]:
        """The runs directly inside what has this name."""
        self._inside.setdefault(name, [])
        run = self._runs.get(name)
        return [one for one in (self._inside[name] if run is None else run.inner) if one.found is not None]

    def _around(self, name: Hashable) -> list[Run]:
        """The list of runs inside the nearest retriever around this, itself included, or inside the whole."""
        while name not in self._runs and name not in self._inside:
            name = self._above[name]
        return self._runs[name].inner if name in self._runs else self._inside[name]


@dataclass
class Reader:
    """Reads the stages of documents from runs; what a framework's retrievers are, its adapter says."""

    query: str | None
    combination: Callable[[Run], Combination | None]
    metric: Callable[[Run], str] = lambda run: "unknown"
    handle: Callable[[Run, Found], Deferred[Explanation] | None] = lambda run, found: None
    rerank: Callable[[Run, Found], Deferred[Explanation] | None] = lambda run, found: None
    is_part: Callable[[Found, Found], bool] = lambda one, whole: False  # whether one is a part of the other
    _combined: dict[int, Combination | None] = field(default_factory=dict)
    _places: dict[tuple[int, bool], dict[Hashable, tuple[int, Found]]] = field(default_factory=dict)
    _kinds: dict[int, tuple[Kind, bool]] = field(default_factory=dict)

    def stages(self, run: Run, rank: int, found: Found) -> tuple[Stage, ...]:
        """What made of this document what `run` returned at this rank."""
        if run.is_wrapped and found.hit is not None:
            return found.hit.stages
        inner = run.answered
        combination = self._combination(run) if inner else None
        if combination is not None:
            return self._put_together(run, combination, rank, found)
        if not inner:
            return (self._searched(run, rank, found),)
        if len(inner) == 1:
            return self._passed(run, inner[0], rank, found)
        return self._put_together(run, Combination(inner), rank, found)

    def _searched(self, run: Run, rank: int, found: Found) -> Stage:
        stage = Stage(run.name, "search", rank, None, found.score, self.metric(run), query=self._asked(run))
        handle = self.handle(run, found)
        return stage if handle is None else replace(stage, handle=handle)

    def _asked(self, run: Run) -> str | None:
        return None if run.query == self.query else run.query

    def _passed(self, run: Run, inner: Run, rank: int, found: Found) -> tuple[Stage, ...]:
        """One retriever was asked, and what it returned may have been scored, ordered or cut."""
        place = self._place(inner, found.keys)
        if place is None:
            return self._merged(run, inner, rank, found)
        kind, is_scored = self._kind(run, inner)
        handle = self.rerank(run, found)
        stage = Stage(run.name, kind, rank, place[0], found.score if is_scored else None)
        if handle is not None:  # a reranker, even where it happens to keep the order
            stage = replace(stage, kind="rerank", handle=handle)
        return (*self.stages(inner, *place), stage)

    def _merged(self, run: Run, inner: Run, rank: int, found: Found) -> tuple[Stage, ...]:
        """A document that was not found itself: parts of it were, and its score is their mean, or not known."""
        parts = [(number, one) for number, one in enumerate(inner.found or (), 1) if self.is_part(one, found)]
        scores = [one.score or 0.0 for _, one in parts]
        share = 1 / len(parts) if parts else 0.0
        is_mean = found.score is not None and abs(sum(scores) * share - found.score) <= _TOLERANCE
        stages: list[Stage] = []
        for (number, one), score in zip(parts, scores, strict=True):
            branch = self.stages(inner, number, one)
            weight, adds = (share, share * score) if is_mean else (None, None)
            last = replace(branch[-1], document=str(one.keys[-1]), weight=weight, contribution=adds)
            stages += *branch[:-1], last
        note = _UNFOUND if not parts else None if is_mean else _UNMEANT
        asked = None if parts else self._asked(run)
        return (*stages, Stage(run.name, "merge", rank, None, found.score, legs=len(parts), note=note, query=asked))

    def _kind(self, run: Run, inner: Run) -> tuple[Kind, bool]:
        """Whether a run scored or ordered what another returned, of all its documents."""
        if id(run) not in self._kinds:
            places = [(one, self._place(inner, one.keys)) for one in run.found or ()]
            ranks = [place[0] for _, place in places if place is not None]
            pairs = [(one.score, place[1].score) for one, place in places if place is not None]
            is_scored = any(own is not None and not same_score(own, before) for own, before in pairs)
            is_ordered = len(ranks) == len(places) and ranks == sorted(ranks)
            self._kinds[id(run)] = "filter" if is_ordered and not is_scored else "rerank", is_scored
        return self._kinds[id(run)]

    def _put_together(self, run: Run, given: Combination, rank: int, found: Found) -> tuple[Stage, ...]:
        own = found.keys if given.key is None else (given.key(found),)
        stages: list[Stage] = []
        for index, leg in enumerate(given.legs):
            place = self._place(leg, own, given)
            if place is None:
                branch: tuple[Stage, ...] = (Stage(leg.name, "search", None, query=self._asked(leg), handle=_MISSED),)
            else:
                branch = self.stages(leg, *place)
            weight = None if given.weights is None else given.weights[index]
            share = None if given.shares is None else given.shares[index].get(own[0], 0.0)
            stages += *branch[:-1], replace(branch[-1], weight=weight, contribution=share)
        last = Stage(run.name, given.kind, rank, None, found.score, given.metric, legs=len(given.legs), note=given.note)
        return (*stages, last)

    def _combination(self, run: Run) -> Combination | None:
        if id(run) not in self._combined:
            given = self.combination(run)
            self._combined[id(run)] = given if given is None or _is_borne_out(run, given) else _unfollowed(given)
        return self._combined[id(run)]

    def _place(
        self, run: Run, keys: Sequence[Hashable], combination: Combination | None = None
    ) -> tuple[int, Found] | None:
        """Where a run returned a document that is known by one of these keys."""
        given = combination or Combination(())
        index = (id(run), given.is_by_score)
        if index not in self._places:
            self._places[index] = _places(run, given)
        places = self._places[index]
        return next((places[key] for key in keys if key in places), None)


def _places(run: Run, given: Combination) -> dict[Hashable, tuple[int, Found]]:
    places: dict[Hashable, tuple[int, Found]] = {}
    for rank, one in enumerate(ordered(run, given.is_by_score), 1):
        for key in one.keys if given.key is None else (given.key(one),):
            places.setdefault(key, (rank, one))
    return places


def ordered(run: Run, is_by_score: bool) -> list[Found]:
    """What a run returned, in the order in which it counts; equal scores stay as they were."""
    found = list(run.found or ())
    return sorted(found, key=lambda one: one.score or 0.0, reverse=True) if is_by_score else found


def _is_borne_out(run: Run, given: Combination) -> bool:
    """Whether what the legs contribute sums to the scores that a run gave, or where it gave none, to its order."""
    if given.shares is None:
        return True
    known = totals(given.shares)
    keys = [one.keys[0] if given.key is None else given.key(one) for one in run.found or ()]
    if any(key not in known for key in keys):
        return False
    values = [known[key] for key in keys]
    scores = [one.score for one in run.found or ()]
    if any(score is None for score in scores):
        return all(one >= other - given.tolerance for one, other in pairwise(values))
    return all(
        score is not None and abs(value - score) <= given.tolerance * max(1.0, abs(score))
        for value, score in zip(values, scores, strict=True)
    )


def _unfollowed(given: Combination) -> Combination:
    return replace(given, kind="merge", shares=None, note=_UNFOLLOWED)
