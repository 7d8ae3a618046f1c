"""What an index's scores are: a base in some form, perhaps inside exp(-d); and which similarity a score stands for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from rag_explain.errors import InvalidInput

Base = Literal["cosine", "inner product", "L2", "squared L2", "unknown"]
Form = Literal["itself", "negative", "one minus"]

_KNOWN: dict[str, tuple[Base, Form]] = {
    "cosine": ("cosine", "itself"),
    "inner product": ("inner product", "itself"),
    "negative inner product": ("inner product", "negative"),
    "1 - inner product": ("inner product", "one minus"),
    "cosine distance": ("cosine", "one minus"),
    "L2": ("L2", "itself"),
    "squared L2": ("squared L2", "itself"),
    "unknown": ("unknown", "itself"),
}
_NAMES = {metric: name for name, metric in _KNOWN.items()}
_NOT_NORMALISED = " of vectors that are not normalised"


@dataclass(frozen=True, slots=True)
class Metric:
    """How an index compares vectors and what it returns.

    Attributes:
        base, form: one of the pairs in the table above.
        is_exponential: whether the index returns exp(-d) of that distance d.
        is_normalised: whether the vectors are as the model compares them: of length one, unless it compares by inner
            product. If they are not, neither a distance nor an inner product tells the similarity.
    """

    base: Base
    form: Form = "itself"
    is_exponential: bool = False
    is_normalised: bool = True

    def __post_init__(self) -> None:
        if (self.base, self.form) not in _NAMES:
            raise InvalidInput(f"there is no metric of the base {self.base!r} and the form {self.form!r}")

    @property
    def name(self) -> str:
        """What people call it, and `Metric.named` reads."""
        plain = _NAMES[self.base, self.form]
        return (f"exp(-{plain})" if self.is_exponential else plain) + _NOT_NORMALISED * (not self.is_normalised)

    @classmethod
    def named(cls, name: str) -> Metric:
        """The metric with this name; an unknown name is refused with the known ones."""
        metric = cls.find(name)
        if metric is None:
            known = ", ".join([*_KNOWN, "exp(-d) of a distance d"])
            raise InvalidInput(f"there is no metric {name!r}: use one of {known}")
        return metric

    @classmethod
    def find(cls, name: str) -> Metric | None:
        """The metric with this name; None for a name that is not known here."""
        shown = name.removesuffix(_NOT_NORMALISED)
        is_exponential = shown.startswith("exp(-") and shown.endswith(")")
        plain = shown[len("exp(-") : -1] if is_exponential else shown
        if plain not in _KNOWN or (is_exponential and plain == "unknown"):
            return None
        return cls(*_KNOWN[plain], is_exponential, is_normalised=shown == name)

    def similarity(self, score: float | None) -> float | None:
        """The similarity that a score stands for; None where the metric does not tell."""
        is_told = self.base == "cosine" or (self.base != "unknown" and self.is_normalised)
        if score is None or not is_told or (self.is_exponential and score <= 0):
            return None
        value = -math.log(score) if self.is_exponential else score
        if self.base in ("cosine", "inner product"):
            return {"itself": value, "negative": -value, "one minus": 1 - value}[self.form]
        squared = value if self.base == "squared L2" else value * value
        return 1 - squared / 2  # |a - b|^2 = 2 - 2 cos between vectors of length one


UNKNOWN = Metric("unknown")
