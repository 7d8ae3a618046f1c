"""What an index's scores are: a base distance times a form, and the similarity that such a score stands for.

| name | base | form |
|---|---|---|
| cosine, inner product | the same | itself |
| negative inner product | inner product | negative |
| 1 - inner product, cosine distance | inner product, cosine | one minus |
| L2, squared L2 | the same | itself |
| exp(-...) | any distance above | exponential of its negative |
| unknown | not known | - |
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from rag_explain.errors import InvalidInput

Base = Literal["cosine", "inner product", "L2", "squared L2", "unknown"]
Form = Literal["itself", "negative", "one minus", "exponential"]

_NOT_NORMALISED = " of vectors that are not normalised"


@dataclass(frozen=True, slots=True)
class Metric:
    """How an index compares vectors and what it returns.

    Attributes:
        base, form: see the table above.
        inner: for form "exponential", the distance inside exp(-d).
        is_normalised: whether the vectors are as the model compares them: of length one, unless it compares by inner
            product. If they are not, neither a distance nor an inner product tells the similarity.
    """

    base: Base
    form: Form = "itself"
    inner: Form = "itself"
    is_normalised: bool = True

    @property
    def name(self) -> str:
        """What people call it, and `Metric.named` reads."""
        plain = _plain_name(self.base, self.inner if self.form == "exponential" else self.form)
        shown = f"exp(-{plain})" if self.form == "exponential" else plain
        return shown if self.is_normalised else shown + _NOT_NORMALISED

    @classmethod
    def named(cls, name: str) -> Metric:
        """The metric with this name; an unknown name is refused with the known ones."""
        metric = cls.find(name)
        if metric is None:
            known = ", ".join([*_BY_NAME, "exp(-d) of a distance d"])
            raise InvalidInput(f"there is no metric {name!r}: use one of {known}")
        return metric

    @classmethod
    def find(cls, name: str) -> Metric | None:
        """The metric with this name; None for a name of somebody else's."""
        plain = name.removesuffix(_NOT_NORMALISED)
        is_normalised = plain == name
        if plain.startswith("exp(-") and plain.endswith(")"):
            distance = _BY_NAME.get(plain[len("exp(-") : -1])
            if distance is None or distance.base == "unknown":
                return None
            return cls(distance.base, "exponential", distance.form, is_normalised)
        metric = _BY_NAME.get(plain)
        return metric if metric is None else cls(metric.base, metric.form, is_normalised=is_normalised)

    def similarity(self, score: float | None) -> float | None:
        """The similarity that a score stands for; None where the metric does not tell."""
        if score is None or self.base == "unknown":
            return None
        if self.form == "exponential":
            return self._undone(-math.log(score), self.inner) if score > 0 else None
        return self._undone(score, self.form)

    def _undone(self, value: float, form: Form) -> float | None:
        if form == "negative":
            value = -value
        elif form == "one minus":
            value = 1 - value
        if self.base == "cosine":
            return value
        if not self.is_normalised:
            return None
        if self.base == "inner product":
            return value
        squared = value if self.base == "squared L2" else value * value
        return 1 - squared / 2  # |a - b|^2 = 2 - 2 cos between vectors of length one


def _plain_name(base: Base, form: Form) -> str:
    if form == "one minus":
        return "cosine distance" if base == "cosine" else f"1 - {base}"
    return f"negative {base}" if form == "negative" else base


_BY_NAME = {
    _plain_name(metric.base, metric.form): metric
    for metric in (
        Metric("cosine"),
        Metric("inner product"),
        Metric("inner product", "negative"),
        Metric("inner product", "one minus"),
        Metric("cosine", "one minus"),
        Metric("L2"),
        Metric("squared L2"),
        Metric("unknown"),
    )
}
UNKNOWN = Metric("unknown")
