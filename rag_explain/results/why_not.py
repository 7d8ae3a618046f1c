"""WhyNot: why a document that was wanted was not returned, or not before another one."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

from rag_explain.results.contrast import Contrast
from rag_explain.results.display import Paged

RungName = Literal[
    "returned",
    "missing",
    "chunks",
    "filter",
    "threshold",
    "approximate",
    "stage",
    "cut",
    "unread",
    "unknown",
    "words",
]


@dataclass(frozen=True, slots=True)
class Rung:
    """One thing that was looked at, and what was seen; where it `explains`, nothing further up can be the reason."""

    name: RungName
    text: str
    explains: bool = False


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Something that was tried out, and that does bring the wanted document up."""

    text: str
    rank: int | None = None  # the wanted document's then, where that is known


@dataclass(frozen=True, eq=False, kw_only=True)
class WhyNot(Paged):
    """A ladder of reasons, climbed until one of them explains it.

    A document that was cut off by its rank has a score that was too low: then the ladder goes on to why it is so low.

    Attributes:
        wanted, got: the ids of the document that was asked for and of the hit that it is contrasted with.
        rungs: what was looked at, in this order.
        rank: where the wanted document stands by exact search, among all that the filter lets through; None where not
            known.
        total: how many documents these are, or how many the index holds; None where it does not tell.
        k: how many were returned.
        contrast: the words that made the difference, where the score decided it.
        suggestions: what was tried out and does change it.
    """

    _title: ClassVar[str] = "Why not that one?"

    query: str
    wanted: str
    got: str | None
    rungs: tuple[Rung, ...]
    rank: int | None = None
    total: int | None = None
    k: int = 0
    contrast: Contrast | None = None
    suggestions: tuple[Suggestion, ...] = ()

    @property
    def reason(self) -> Rung:
        """The first rung that explains it; the last one that was looked at where none does."""
        return next((rung for rung in self.rungs if rung.explains), self.rungs[-1])

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        plain: dict[str, Any] = {name: getattr(self, name) for name in ("query", "wanted", "got", "rank", "total", "k")}
        return {
            "format": "rag_explain.why_not",
            "version": 1,
            **plain,
            "reason": self.reason.name,
            "rungs": [asdict(rung) for rung in self.rungs],
            "suggestions": [asdict(one) for one in self.suggestions],
            "contrast": None if self.contrast is None else self.contrast.to_dict(),
        }

    def __repr__(self) -> str:
        return f"WhyNot({self.wanted!r}, {self.reason.name}: {self.reason.text})"
