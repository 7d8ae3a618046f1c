"""What comes after a search: the hits as rerankers, filters and outer retrievers leave them, with the stage named."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from rag_explain.results.deferred import Deferred
from rag_explain.results.explanation import Explanation
from rag_explain.results.hits import Hit
from rag_explain.results.stages import Kind, Stage

# The name of a stage whose effect can be seen, and whose class cannot.
UNNAMED = "a later stage"
# A document by its keys, and the hit that it carries, if it does.
Carried = tuple[Sequence[Hashable], Hit | None]


def scored(hit: Hit, name: str, score: float | None, handle: Deferred[Explanation] | None = None) -> Hit:
    """The hit with another stage's score. Its rank is still the search's: the order after the stage is not known."""
    stage = Stage(name, "rerank", None, hit.rank, score)
    stage = stage if handle is None else replace(stage, handle=handle)
    return replace(hit, score=score, metric=stage.metric, stages=(*hit.stages, stage))


def after(name: str, hits: Sequence[Hit | None], scores: Sequence[float | None] | None = None) -> list[Hit | None]:
    """Hits in the order in which the stage of this name returned them, with their new ranks and scores.

    Args:
        hits: each as the stages before left it; None for a document that no search is known to have found.
        scores: what the documents carry now; None where the framework's documents carry no score.
    """
    known = [(rank, hit) for rank, hit in enumerate(hits, 1) if hit is not None]
    told = dict(zip(range(1, len(hits) + 1), scores or (), strict=scores is not None))
    is_scored = any(not same_score(told[rank], hit.score) for rank, hit in known if told)
    # What only leaves documents out moves none of the others down, and none past another.
    is_reordered = any(rank > hit.rank for rank, hit in known)
    is_reordered |= any(one.rank >= next_one.rank for (_, one), (_, next_one) in pairwise(known))
    if not is_scored and all(rank == hit.rank for rank, hit in known):
        return list(hits)

    def moved(rank: int, hit: Hit) -> Hit:
        score = told[rank] if told else None if is_reordered else hit.score
        metric = hit.metric if same_score(score, hit.score) and not is_scored else "unknown"
        kind: Kind = "rerank" if is_scored or is_reordered else "filter"
        own = Stage(name, kind, rank, hit.rank, score if is_scored else None)
        return replace(hit, rank=rank, score=score, metric=metric, stages=(*hit.stages, own))

    return [None if hit is None else moved(rank, hit) for rank, hit in enumerate(hits, 1)]


def passed(name: str, hits: Sequence[Hit | None], scores: Sequence[float | None] | None = None) -> list[Hit | None]:
    """As `after`, of a stage that was seen at work: it is named even where it changed nothing."""
    left = after(name, hits, scores)
    return [hit if hit is None else _kept(hit, name) for hit in left] if left == list(hits) else left


def same_score(one: float | None, other: float | None) -> bool:
    """Whether two scores are the same number, or none at all, or both not a number."""
    return one == other or (one is not None and other is not None and math.isnan(one) and math.isnan(other))


class StagedHits:
    """The hits of one answer, each as the last stage that returned it left it.

    A document that carries its hit is known by that. One that does not is known by its keys, the most telling first,
    among what was returned to the same retriever: a retriever that is asked twice finds the same documents again.
    """

    def __init__(self) -> None:
        self._hits: dict[Deferred[Explanation], Hit] = {}  # every copy of a hit shares its explanation
        # By the run of the retriever inside which they were returned; None: outside of all retrievers.
        self._returned: dict[Hashable, dict[Hashable, Hit]] = {None: {}}

    def enter(self, run: Hashable) -> None:
        """A retriever begins to run."""
        self._returned[run] = {}

    def innermost(self, runs: Iterable[Hashable]) -> Hashable:
        """The first of these runs that is a retriever's; None where none is."""
        return next((run for run in runs if run in self._returned), None)

    def find(self, keys: Sequence[Hashable], hit: Hit | None, run: Hashable = None) -> Hit | None:
        """A document's hit as the last stage left it; None where nothing inside this run is known to have found it."""
        return self._returned[run].get(keys[0]) if hit is None else self._hits.get(hit.handle, hit)

    def pass_through(
        self,
        name: str,
        found: Sequence[Carried],
        scores: Sequence[float | None] | None = None,
        *,
        run: Hashable = None,
        outer: Hashable = None,
        is_seen: bool = True,
    ) -> list[Hit | None]:
        """The stage of this name returned these documents, from what was returned inside `run`, into `outer`.

        A stage that was seen at work is named even where it changed nothing.
        """
        given = [self.find(*one, run) for one in found]
        hits = after(name, given, scores)
        if is_seen and hits == given:
            hits = [hit if hit is None or hit.handle not in self._hits else _kept(hit, name) for hit in hits]
        for (keys, _), hit in zip(found, hits, strict=True):
            if hit is not None:
                self._hits[hit.handle] = hit
                self._returned[outer].update(dict.fromkeys(keys, hit))
        return hits


def _kept(hit: Hit, name: str) -> Hit:
    """The hit after a stage that left it as it was; a stage may return its hits more than once."""
    if hit.stages and hit.stages[-1].name == name:
        return hit
    return replace(hit, stages=(*hit.stages, Stage(name, "filter", hit.rank, hit.rank)))
