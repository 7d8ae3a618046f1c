"""Contrast: why this document and not that one, word by word."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from rag_explain.errors import InvalidInput
from rag_explain.results.display import Paged
from rag_explain.results.explanation import Explanation
from rag_explain.results.stages import Stage, expanded

NO_WORD = "no word"


@dataclass(frozen=True, slots=True)
class Difference:
    """What a word of the query, or a pair of words, carries for either document, in score units.

    `document` is None where all words of a document are meant.
    """

    query: str
    document: str | None
    wanted: float
    got: float

    @property
    def value(self) -> float:
        """got - wanted: above zero it speaks for the document that was got."""
        return self.got - self.wanted

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "value": self.value}


@dataclass(frozen=True, slots=True)
class StageDifference:
    """What one stage made of either document; None where it is not among the stages of one."""

    name: str
    wanted: Stage | None
    got: Stage | None

    @property
    def contrast(self) -> Contrast | None:
        """Word by word what made this stage prefer one, computed on first use; None where it cannot be explained."""
        if self.wanted is None or self.got is None:
            return None
        wanted, got = self.wanted.explanation, self.got.explanation
        return None if wanted is None or got is None else Contrast(wanted, got)

    def to_dict(self) -> dict[str, Any]:
        sides = {"wanted": self.wanted, "got": self.got}
        return {"name": self.name} | {side: stage and stage.to_dict() for side, stage in sides.items()}


def stage_differences(wanted: Sequence[Stage], got: Sequence[Stage]) -> tuple[StageDifference, ...]:
    """The stages of two hits of one search, side by side in the order of `got`."""
    sides = [_numbered(stages) for stages in (wanted, got)]
    places = dict.fromkeys((*sides[1], *sides[0]))
    return tuple(StageDifference(place[0], sides[0].get(place), sides[1].get(place)) for place in places)


def _numbered(stages: Sequence[Stage]) -> dict[tuple[str, str | None, int], Stage]:
    """Each stage by its name, what it was asked, and which of that name it is."""
    found: dict[tuple[str, str | None, int], Stage] = {}
    counts: Counter[tuple[str, str | None]] = Counter()
    for stage in expanded(stages):
        counts[stage.name, stage.query] += 1
        found[stage.name, stage.query, counts[stage.name, stage.query]] = stage
    return found


@dataclass(frozen=True, eq=False)
class Contrast(Paged):
    """Two documents for one query: the one that was wanted and the one that was got.

    The differences of all pairs of words and `unattributed` sum to `difference`, as far as the method is additive.
    """

    _title: ClassVar[str] = "Why not that one?"

    wanted: Explanation
    got: Explanation
    stages: tuple[StageDifference, ...] = ()  # of two hits: what each stage of their search made of either

    def __post_init__(self) -> None:
        if self.wanted.query != self.got.query:
            raise InvalidInput("a contrast needs two explanations of the same query")
        for side in ("wanted", "got"):
            object.__setattr__(self, side, getattr(self, side).by_word())

    @property
    def query(self) -> str | None:
        """The query that both documents were explained for."""
        return self.got.query

    @property
    def difference(self) -> float:
        """got.score - wanted.score"""
        return self.got.score - self.wanted.score

    @property
    def unattributed(self) -> float:
        """The part of the difference that no pair of words carries."""
        return self.got.unattributed - self.wanted.unattributed

    def query_words(self) -> list[Difference]:
        """What each word of the query carries for either document, the largest difference first, and what none does.

        That is the last of them: for an additive method they sum to the difference of the scores.
        """
        carried = [one.query_saliency() for one in (self.wanted, self.got)]
        words = zip(self.got.query_tokens, *(values.tolist() for values in carried), strict=True)
        found = _largest_first(Difference(token.label, None, wanted, got) for token, wanted, got in words)
        if not self.got.additive:
            return found
        wanted, got = (one.score - float(v.sum()) for one, v in zip((self.wanted, self.got), carried, strict=True))
        return [*found, Difference(NO_WORD, None, wanted, got)]

    def pairs(self, k: int | None = None) -> list[Difference]:
        """The pairs of words that made the difference, the largest first; a word of both documents is one pair."""
        cells: dict[tuple[int, str], list[float]] = {}
        for side, explanation in enumerate((self.wanted, self.got)):
            words = [token.label.casefold() for token in explanation.document_tokens]
            for i, row in enumerate(explanation.pairs.tolist()):
                for word, value in zip(words, row, strict=True):  # wherever in the document the word is
                    cells.setdefault((i, word), [0.0, 0.0])[side] += value
        query = [token.label for token in self.got.query_tokens]
        return _largest_first(Difference(query[i], word, *values) for (i, word), values in cells.items())[:k]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "format": "rag_explain.contrast",
            "version": 1,
            "query": self.query,
            "difference": self.difference,
            "unattributed": self.unattributed,
            "query_words": [item.to_dict() for item in self.query_words()],
            "pairs": [item.to_dict() for item in self.pairs()],
            "stages": [item.to_dict() for item in self.stages],
            "wanted": self.wanted.to_dict(),
            "got": self.got.to_dict(),
        }

    def __repr__(self) -> str:
        return f"Contrast(wanted={self.wanted.score:.4f}, got={self.got.score:.4f}, {self.got.method})"


def _largest_first(differences: Iterable[Difference]) -> list[Difference]:
    return sorted(differences, key=lambda item: -abs(item.value))
