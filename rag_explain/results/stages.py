"""Stage: what one part of a retrieval made of a document's rank and score."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from rag_explain.results.deferred import Deferred
from rag_explain.results.explanation import Explanation
from rag_explain.results.notices import OTHER_RANKING, Notice
from rag_explain.results.serialization import to_plain

Kind = Literal["search", "rerank", "filter", "fusion", "merge", "mmr", "term"]
_UNEXPLAINED: Deferred[Explanation] = Deferred.skipped("this stage cannot be explained")
_UNSPLIT: Deferred[tuple[Stage, ...]] = Deferred.skipped("this stage is no sum of terms")


@dataclass(frozen=True, slots=True)
class Stage:
    """One part of a retrieval, by the name of its class, and where the document stood after it.

    Stages stand in the order in which they were done. One with `legs` put together so many branches, which stand
    before it: each is a search and what came after that, and its last stage says what the branch contributes.
    """

    name: str
    # "search" found it; "rerank" gave another score or order; "filter" at most left others out; "fusion" scored it by
    # several searches; "merge" put lists together without a score; "mmr" weighed relevance against redundancy, each of
    # which is a "term".
    kind: Kind
    rank: int | None  # None where the part is known, but not the order that it returned; and where it did not find it
    rank_before: int | None = None
    score: float | None = None  # what this part itself gave
    metric: str = "unknown"  # what that score is
    weight: float | None = None  # of a leg, in what puts it together with others
    contribution: float | None = None  # of a leg: what it adds to the score there; the legs' sum to it
    legs: int = 0
    query: str | None = None  # what it was asked, where that is not the query of the hit
    document: str | None = None  # the other document that it is about: what this one is redundant with
    note: str | None = None  # what is not known of it
    is_inside: bool = False  # it ran inside the retriever that was asked, whose own notices speak of it
    handle: Deferred[Explanation] = field(default=_UNEXPLAINED, compare=False, repr=False)
    split: Deferred[tuple[Stage, ...]] = field(default=_UNSPLIT, compare=False, repr=False)

    @property
    def explanation(self) -> Explanation | None:
        """Of what this stage scored, computed on first use; None where that cannot be explained."""
        return self.handle.get()

    @property
    def terms(self) -> tuple[Stage, ...]:
        """Of "mmr": relevance, and redundancy with a document that is named, computed on first use."""
        return self.split.get() or ()

    @property
    def is_missed(self) -> bool:
        """Whether this search did not find the document, which another leg did."""
        return self.kind == "search" and self.rank is None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, without the explanation."""
        return {name: to_plain(getattr(self, name)) for name in NAMES}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Stage:
        """The inverse of `to_dict`; what is not known is passed over."""
        return cls(**{name: data[name] for name in NAMES if name in data})


NAMES = tuple(item.name for item in fields(Stage) if item.name not in ("handle", "split"))
"""The fields of a stage that are plain data, in order."""


def legs_of(stages: Sequence[Stage], index: int) -> list[int]:
    """Where the last stage of each leg stands that the stage at `index` put together."""
    ends: list[int] = []
    first = index
    for _ in range(stages[index].legs):
        if first == 0:  # a part of them was lost
            break
        ends.insert(0, first - 1)
        first = first_of(stages, first - 1)
    return ends


def first_of(stages: Sequence[Stage], index: int) -> int:
    """Where the branch begins that ends at `index`."""
    stage = stages[index]
    ends = legs_of(stages, index)
    if ends:
        return first_of(stages, ends[0])
    return index if stage.kind in ("search", "term") or index == 0 else first_of(stages, index - 1)


def expanded(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """The stages with the terms of each before it, as far as they are computed."""
    found: list[Stage] = []
    for stage in stages:
        terms = stage.split.peek() or ()
        failed = (stage.split.reason or "").removeprefix("InvalidInput: ") if stage.split.status == "failed" else None
        found += (*terms, replace(stage, legs=stage.legs + len(terms), note=stage.note or failed))
    return tuple(found)


def depths(stages: Sequence[Stage]) -> list[int]:
    """How deep inside others each stage stands: the legs of one that puts them together are one deeper than that."""
    found = [0] * len(stages)
    for index in reversed(range(len(stages))):
        ends = legs_of(stages, index)
        for inner in range(first_of(stages, index), index) if ends else ():
            found[inner] += 1
    return found


def fused(stages: Sequence[Stage], index: int) -> float | None:
    """The score of the stage at `index` from what its legs contribute; None where that is not known."""
    shares = [stages[end].contribution for end in legs_of(stages, index)]
    known = [share for share in shares if share is not None]
    return sum(known) if known and len(known) == stages[index].legs else None


def ranking_notices(stages: Iterable[Stage]) -> tuple[Notice, ...]:
    """Names the parts that ranked the document after its search; none where the search did."""
    after = (stage for stage in stages if stage.kind not in ("search", "filter", "term") and not stage.is_inside)
    names = " and then ".join(dict.fromkeys(stage.name for stage in after))
    text = f"the documents were ranked by {names}, not by this encoder's similarity alone"
    return (Notice(OTHER_RANKING, text),) if names else ()
