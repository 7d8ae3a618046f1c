"""One pair under several methods: what each says, what it costs, and how far they agree."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from rag_explain.results.display import Viewable
from rag_explain.results.explanation import Explanation
from rag_explain.results.serialization import to_plain


@dataclass(frozen=True)
class Compared:
    """One method's answer."""

    method: str  # its name, with the options that were given
    explanation: Explanation | None  # None when the method refused; `reason` says why
    seconds: float  # the time of one explanation with nothing kept from before
    reason: str | None = None

    @property
    def error(self) -> float | None:
        """The largest relative error that the method itself reports of its two halves; None where it has none."""
        return None if self.explanation is None else self.explanation.error

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: the figures of the table, and the explanation in full."""
        why = self.explanation
        figures = {name: None if why is None else to_plain(getattr(why, name)) for name in ("score", "gap", "error")}
        rest = {"seconds": self.seconds, "reason": self.reason, "explanation": None if why is None else why.to_dict()}
        return {"method": self.method, **figures, **rest}


@dataclass(frozen=True, eq=False)
class Comparison(Viewable):
    """Several methods on one pair.

    Attributes:
        agreement: (m, m) float64, Spearman's rank correlation of the values that two methods give to the pairs of
            words; NaN where a method refused or gives all pairs the same value.
    """

    _width: ClassVar[int] = 120

    rows: tuple[Compared, ...]
    agreement: NDArray[np.float64]

    @classmethod
    def of(cls, rows: Sequence[Compared]) -> Self:
        """Compare answers about the same pair of texts."""
        nothing = np.empty(0)  # correlates with nothing
        pairs = [nothing if row.explanation is None else row.explanation.by_word().pairs.ravel() for row in rows]
        agreement = np.array([rank_correlation(one, other) for one in pairs for other in pairs])
        agreement = agreement.reshape(len(rows), len(rows))
        agreement.flags.writeable = False
        return cls(tuple(rows), agreement)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: the table, with every explanation in full."""
        return {"rows": [row.to_dict() for row in self.rows], "agreement": to_plain(self.agreement)}

    def __repr__(self) -> str:
        return f"Comparison({', '.join(row.method for row in self.rows)})"


def rank_correlation(left: NDArray[Any], right: NDArray[Any]) -> float:
    """Spearman's correlation: Pearson's of the ranks, where equal values share their mean rank."""
    if left.shape != right.shape or left.size < 2:
        return math.nan
    a, b = (_ranks(np.asarray(values, dtype=np.float64)) for values in (left, right))
    a, b = a - a.mean(), b - b.mean()
    size = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / size if size > 0 else math.nan


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: NDArray[np.float64] = (last - (counts - 1) / 2)[place]
    return ranks
