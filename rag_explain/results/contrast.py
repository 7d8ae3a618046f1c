"""Contrast: why this document and not that one, word by word."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rag_explain.errors import InvalidInput
from rag_explain.results.display import Viewable
from rag_explain.results.explanation import Explanation

if TYPE_CHECKING:
    from rag_explain.render.blocks import View


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


@dataclass(frozen=True, eq=False)
class Contrast(Viewable):
    """Two documents for one query: the one that was wanted and the one that was got.

    The differences of all pairs of words and `unattributed` sum to `difference`, as far as the method is additive.
    """

    wanted: Explanation
    got: Explanation

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
        """What each word of the query carries for either document; the largest difference first."""
        wanted, got = self.wanted.query_saliency(), self.got.query_saliency()
        found = [
            Difference(token.label, None, float(wanted[i]), float(got[i]))
            for i, token in enumerate(self.got.query_tokens)
        ]
        return sorted(found, key=lambda item: -abs(item.value))

    def pairs(self, k: int | None = None) -> list[Difference]:
        """The pairs of words that made the difference, the largest first; a word of both documents is one pair."""
        cells: dict[tuple[int, str], list[float]] = {}
        for side, explanation in enumerate((self.wanted, self.got)):
            for (i, word), value in _cells(explanation).items():
                cells.setdefault((i, word), [0.0, 0.0])[side] = value
        words = [token.label for token in self.got.query_tokens]
        found = [Difference(words[i], word, wanted, got) for (i, word), (wanted, got) in cells.items()]
        return sorted(found, key=lambda item: -abs(item.value))[:k]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "format": "rag_explain.contrast",
            "version": 1,
            "query": self.query,
            "difference": self.difference,
            "unattributed": self.unattributed,
            "query_words": [_plain(item) for item in self.query_words()],
            "pairs": [_plain(item) for item in self.pairs()],
            "wanted": self.wanted.to_dict(),
            "got": self.got.to_dict(),
        }

    def _view(self) -> View:
        from rag_explain.render.views.contrast import contrast_view

        return contrast_view(self)

    def __repr__(self) -> str:
        return f"Contrast(wanted={self.wanted.score:.4f}, got={self.got.score:.4f}, {self.got.method})"


def _cells(explanation: Explanation) -> dict[tuple[int, str], float]:
    """What a word of the query and a word of the document carry, wherever in the document the word stands."""
    words = [token.label.casefold() for token in explanation.document_tokens]
    columns = {word: number for number, word in enumerate(dict.fromkeys(words))}
    pairs = explanation.pairs
    summed = np.zeros((len(pairs), len(columns)))
    for place, word in enumerate(words):
        summed[:, columns[word]] += pairs[:, place]
    return {(i, word): float(summed[i, j]) for i in range(len(pairs)) for word, j in columns.items()}


def _plain(item: Difference) -> dict[str, Any]:
    return {"query": item.query, "document": item.document, "wanted": item.wanted, "got": item.got, "value": item.value}
