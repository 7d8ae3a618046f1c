"""One pair under several methods: what each says, what it costs, and how far they agree."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, ClassVar, Self, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from rag_explain.results.display import Paged
from rag_explain.results.explanation import Explanation
from rag_explain.results.serialization import to_plain
from rag_explain.texts.tokens import Role

T = TypeVar("T")
Place: TypeAlias = tuple[int, int, int, int]  # where a word of the query begins and ends, and one of the document

TOP = 10  # pairs that are looked at first


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


@dataclass(frozen=True, slots=True)
class Loss:
    """What the score loses without one part of either text, and what each method says that it carries."""

    text: str
    role: Role
    lost: float | None  # None where no text would be left
    carried: tuple[float | None, ...]  # by each method, in their order; None where it does not say


@dataclass(frozen=True, eq=False)
class Comparison(Paged):
    """Several methods on one pair.

    Attributes:
        agreement: (m, m) float64, Spearman's rank correlation of the values that two methods give to the pairs of
            words that both know; NaN where a method refused or gives all pairs the same value.
        overlap: (m, m) float64, the share of pairs that two methods have in common among their `TOP` strongest by size
            (Jaccard: of those that either has); NaN where a method refused. Small values, which are most of them and
            mean least, decide a rank correlation; they have no part in this.
        real: (m,) float64, Spearman's rank correlation of what a method says that parts carry with what the score
            loses without them, computed again; NaN where a method refused, or says nothing of three of the parts.
        losses: the parts that were left out for that, with the split of each method and the real loss.
    """

    _width: ClassVar[int] = 120
    _title: ClassVar[str] = "Methods side by side"

    rows: tuple[Compared, ...]
    agreement: NDArray[np.float64]
    overlap: NDArray[np.float64]
    real: NDArray[np.float64]
    losses: tuple[Loss, ...] = ()

    @classmethod
    def of(cls, rows: Sequence[Compared], real: Sequence[float] | None = None, losses: Sequence[Loss] = ()) -> Self:
        """Compare answers about the same pair of texts."""
        pairs = [{} if row.explanation is None else _pairs(row.explanation.by_word()) for row in rows]
        followed = np.full(len(rows), np.nan) if real is None else np.asarray(real, np.float64)
        overlap = _table([_strongest(one) for one in pairs], jaccard)
        return cls(tuple(rows), _table(pairs, _correlation), overlap, followed, tuple(losses))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: the table, with every explanation in full."""
        return {
            "rows": [row.to_dict() for row in self.rows],
            "agreement": to_plain(self.agreement),
            "overlap": to_plain(self.overlap),
            "real": to_plain(self.real),
            "losses": [asdict(one) for one in self.losses],
        }

    def __repr__(self) -> str:
        return f"Comparison({', '.join(row.method for row in self.rows)})"


def _table(values: Sequence[T], measure: Callable[[T, T], float]) -> NDArray[np.float64]:
    """(m, m): every value with every other."""
    found = np.array([[measure(one, other) for other in values] for one in values], dtype=np.float64)
    found.flags.writeable = False
    return found


def _pairs(explanation: Explanation) -> dict[Place, float]:
    """The value of each pair of words, by where the two stand: a method may know only some of the words."""
    tokens = product(explanation.query_tokens, explanation.document_tokens)
    places = [(one.start, one.end, other.start, other.end) for one, other in tokens]
    return dict(zip(places, explanation.pairs.ravel().tolist(), strict=True))


def _correlation(left: Mapping[Place, float], right: Mapping[Place, float]) -> float:
    """Over the pairs that both know."""
    both = [place for place in left if place in right]
    return rank_correlation(np.array([left[one] for one in both]), np.array([right[one] for one in both]))


def _strongest(pairs: Mapping[Place, float]) -> frozenset[Place]:
    """The places of the strongest pairs, of either sign; a pair of no value is none of them."""
    return frozenset(one for one in sorted(pairs, key=lambda place: -abs(pairs[place]))[:TOP] if pairs[one] != 0)


def jaccard(left: frozenset[Any], right: frozenset[Any]) -> float:
    """What two sets have in common, of what either has; NaN where one is empty."""
    return len(left & right) / len(left | right) if left and right else math.nan


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
