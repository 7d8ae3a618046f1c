"""What every leg of a fusion adds to a document's score: the arithmetic of fused rankings, split by leg.

Each rule takes lists of documents with their scores, in the order in which the legs returned them, and gives for each
leg what it contributes to each document. A document's fused score is the sum over the legs, in the frameworks' own
order of operations, so that it is theirs to the last digit.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

RRF_CONSTANT = 60  # of the paper, and of all frameworks
_SPREAD = 3  # standard deviations on either side of the mean


@dataclass(frozen=True)
class Leg:
    """One ranked list of a fusion: what each document is known by, with its score where there is one."""

    found: Sequence[tuple[Hashable, float | None]]
    weight: float = 1.0


Shares = list[dict[Hashable, float]]
"""For each leg what it adds to each document that it found."""


def reciprocal_rank(legs: Sequence[Leg], constant: float = RRF_CONSTANT, *, first: int = 1) -> Shares:
    """weight / (constant + rank), the leg's first document having the rank `first` (1 in the paper, 0 in LlamaIndex).

    Equation 1 of Cormack, Clarke and Buettcher (SIGIR 2009), with a weight per leg.
    """
    return [
        _summed((key, leg.weight / (rank + constant)) for rank, (key, _) in enumerate(leg.found, first)) for leg in legs
    ]


def weighted(legs: Sequence[Leg]) -> Shares:
    """weight * score."""
    return [_summed((key, leg.weight * (score or 0.0)) for key, score in leg.found) for leg in legs]


def relative(legs: Sequence[Leg], queries: int = 1) -> Shares:
    """weight * (score - lowest) / (highest - lowest), shared among so many queries. All alike count 1, or 0 if <= 0."""
    return [_scaled(leg, min(scores, default=0.0), max(scores, default=0.0), queries) for leg, scores in _scored(legs)]


def distribution(legs: Sequence[Leg], queries: int = 1, *, is_sample: bool = False) -> Shares:
    """The same between mean - 3 standard deviations and mean + 3: what stands out of its own list counts.

    With `is_sample` as Qdrant does: the deviation is a sample's, and all alike count a half.
    """
    same = 0.5 if is_sample else None
    return [_scaled(leg, *_spread(scores, is_sample), queries, same) for leg, scores in _scored(legs)]


def highest(legs: Sequence[Leg]) -> Shares:
    """The score of the leg that gave the highest one; the others add nothing."""
    shares: Shares = []
    best: dict[Hashable, tuple[float, int]] = {}
    for index, (leg, scores) in enumerate(_scored(legs)):
        shares.append(dict.fromkeys((key for key, _ in leg.found), 0.0))
        for (key, _), score in zip(leg.found, scores, strict=True):
            if key not in best or score > best[key][0]:
                best[key] = score, index
    for key, (score, index) in best.items():
        shares[index][key] = score
    return shares


def totals(shares: Sequence[Mapping[Hashable, float]]) -> dict[Hashable, float]:
    """The fused score of each document, in the order in which the legs found them."""
    found: dict[Hashable, float] = {}
    for share in shares:
        for key, value in share.items():
            found[key] = found.get(key, 0.0) + value
    return found


def _summed(values: Iterable[tuple[Hashable, float]]) -> dict[Hashable, float]:
    """A leg may return a document twice."""
    found: dict[Hashable, float] = {}
    for key, value in values:
        found[key] = found.get(key, 0.0) + value
    return found


def _scored(legs: Sequence[Leg]) -> list[tuple[Leg, list[float]]]:
    return [(leg, [score or 0.0 for _, score in leg.found]) for leg in legs]


def _spread(scores: Sequence[float], is_sample: bool) -> tuple[float, float]:
    if not scores:
        return 0.0, 0.0
    mean = sum(scores) / len(scores)
    deviation = (sum((score - mean) ** 2 for score in scores) / max(1, len(scores) - is_sample)) ** 0.5
    return mean - _SPREAD * deviation, mean + _SPREAD * deviation


def _scaled(leg: Leg, low: float, high: float, queries: int, same: float | None = None) -> dict[Hashable, float]:
    same = float(high > 0) if same is None else same
    values = ((key, same if high == low else ((score or 0.0) - low) / (high - low)) for key, score in leg.found)
    return _summed((key, value * leg.weight / queries) for key, value in values)
