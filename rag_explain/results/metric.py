"""What an index's scores are: a similarity or a distance, perhaps inside exp(-d); and what similarity a score tells."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from rag_explain.errors import InvalidInput

# For each base, the similarity that a score stands for.
_SIMILARITIES: dict[str, Callable[[float], float | None]] = {
    "cosine": lambda score: score,
    "inner product": lambda score: score,
    "negative inner product": lambda score: -score,
    "1 - inner product": lambda score: 1 - score,
    "cosine distance": lambda score: 1 - score,
    "twice the cosine distance": lambda score: 1 - score / 2,
    "(1 + cosine) / 2": lambda score: 2 * score - 1,
    "sigmoid(inner product / 100)": lambda score: 100 * math.log(score / (1 - score)) if 0 < score < 1 else None,
    "L2": lambda score: 1 - score * score / 2,  # |a - b|^2 = 2 - 2 cos between vectors of length one
    "squared L2": lambda score: 1 - score / 2,
    "unknown": lambda score: None,
}
# For each base whose scores tell a similarity, the score of one: the other way round.
_SCORES: dict[str, Callable[[float], float]] = {
    "cosine": lambda similarity: similarity,
    "inner product": lambda similarity: similarity,
    "negative inner product": lambda similarity: -similarity,
    "1 - inner product": lambda similarity: 1 - similarity,
    "cosine distance": lambda similarity: 1 - similarity,
    "twice the cosine distance": lambda similarity: 2 * (1 - similarity),
    "(1 + cosine) / 2": lambda similarity: (similarity + 1) / 2,
    "sigmoid(inner product / 100)": lambda similarity: 1 / (1 + math.exp(-similarity / 100)),
    "L2": lambda similarity: math.sqrt(max(0.0, 2 * (1 - similarity))),
    "squared L2": lambda similarity: 2 * (1 - similarity),
}
_DISTANCES = frozenset(("negative inner product", "1 - inner product", "cosine distance", "L2", "squared L2"))
_DISTANCES |= {"twice the cosine distance"}
# What tells the same of vectors of any length.
SCALE_FREE = ("cosine", "cosine distance", "twice the cosine distance", "(1 + cosine) / 2")
_NOT_NORMALISED = " of vectors that are not normalised"


@dataclass(frozen=True, slots=True)
class Metric:
    """How an index compares vectors and what it returns."""

    base: str  # a name in the table above
    is_exponential: bool = False  # whether the index returns exp(-d) of that distance d
    # Whether the vectors are as the model compares them: of length one, unless it compares by inner product. If they
    # are not, neither a distance nor an inner product tells the similarity.
    is_normalised: bool = True

    def __post_init__(self) -> None:
        if self.base not in _SIMILARITIES:
            raise InvalidInput(f"there is no metric of the base {self.base!r}")

    @property
    def name(self) -> str:
        """What people call it, and `Metric.named` reads."""
        base = f"({self.base})" if self.is_exponential and " - " in self.base else self.base
        shown = f"exp(-{base})" if self.is_exponential else base
        return shown if self.is_normalised else shown + _NOT_NORMALISED

    @classmethod
    def named(cls, name: str | Metric) -> Metric:
        """The metric with this name; a metric is its own. An unknown name is refused with the known ones."""
        metric = name if isinstance(name, Metric) else cls.find(name)
        if metric is None:
            known = ", ".join([*_SIMILARITIES, "exp(-d) of a distance d"])
            raise InvalidInput(f"there is no metric {name!r}: use one of {known}")
        return metric

    @classmethod
    def find(cls, name: str) -> Metric | None:
        """The metric with this name; None for a name that is not known here."""
        if not isinstance(name, str):
            return None
        shown = name.removesuffix(_NOT_NORMALISED)
        is_exponential = shown.startswith("exp(-") and shown.endswith(")")
        base = shown[len("exp(-") : -1].removeprefix("(").removesuffix(")") if is_exponential else shown
        if base not in _SIMILARITIES or (is_exponential and base == "unknown"):
            return None
        return cls(base, is_exponential, is_normalised=shown == name)

    def similarity(self, score: float | None) -> float | None:
        """The similarity that a score stands for; None where the metric does not tell."""
        is_told = self.is_normalised or self.base in SCALE_FREE
        if score is None or not is_told or (self.is_exponential and score <= 0):
            return None
        return _SIMILARITIES[self.base](-math.log(score) if self.is_exponential else score)

    def score(self, similarity: float) -> float | None:
        """The score that this index gives for a similarity; None where the metric does not tell."""
        if self.base == "unknown" or (not self.is_normalised and self.base not in SCALE_FREE):
            return None
        score = _SCORES[self.base](similarity)
        return math.exp(-score) if self.is_exponential else score

    @property
    def is_distance(self) -> bool:
        """Whether a smaller score is a better one."""
        return self.base in _DISTANCES and not self.is_exponential


UNKNOWN = Metric("unknown")
