"""Stage: what one part of a retrieval made of a document's rank and score."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from rag_explain.results.notices import OTHER_RANKING, Notice

Kind = Literal["search", "rerank", "filter"]


@dataclass(frozen=True, slots=True)
class Stage:
    """One part of a retrieval, by the name of its class, and where the document stood after it."""

    name: str
    kind: Kind  # "search" found it; "rerank" gave another score or order; "filter" at most left others out
    rank: int | None  # None where the part is known, but not the order that it returned
    rank_before: int | None = None
    score: float | None = None  # what this part itself gave
    metric: str = "unknown"  # what that score is


def ranking_notices(stages: Iterable[Stage]) -> tuple[Notice, ...]:
    """Names the parts that ranked the document after its search; none where the search did."""
    names = " and then ".join(dict.fromkeys(stage.name for stage in stages if stage.kind == "rerank"))
    text = f"the documents were ranked by {names}, not by this encoder's similarity alone"
    return (Notice(OTHER_RANKING, text),) if names else ()
