"""Whether a document that is looked at again and again is worth building: what has been spent on it decides."""

import threading
from collections import OrderedDict
from collections.abc import Sequence

_SMOOTHING = 0.2  # weight of the newest measurement


class SkiRental:
    """What has been spent on cold explanations of each document, and whether that pays for its factors.

    Ski-rental: whatever queries come, this costs at most twice what it would have cost to know them beforehand. Costs
    are estimated in passes (a tangent or cotangent through one token of the document) and turned into seconds by what
    such passes were measured to take. Thread-safe; remembers the `capacity` documents asked for last.
    """

    def __init__(self, capacity: int = 65_536) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._spent: OrderedDict[bytes, float] = OrderedDict()
        # A cotangent pulled back costs about as much as a tangent pushed forward, until both were measured.
        self._per_pass = {"build": 1.0, "cold": 1.0}
        self._measured: set[str] = set()

    def estimate_build(self, document_tokens: int, rows: int | None = None) -> float:
        """Expected cost of a document's factors: one tangent per row (None: per token), and one for the rest."""
        return self._per_pass["build"] * _passes(document_tokens if rows is None else rows, document_tokens)

    def estimate_cold(self, query_tokens: int, document_tokens: int) -> float:
        """Expected cost of one cold explanation: one cotangent per query token, and one for the rest."""
        return self._per_pass["cold"] * _passes(query_tokens, document_tokens)

    def should_build(self, key: bytes, query_tokens: int, document_tokens: int, rows: int | None = None) -> bool:
        """Whether this look at the document should build its factors; if not, it is charged for the look."""
        with self._lock:
            spent = self._spent.pop(key, 0.0) + self.estimate_cold(query_tokens, document_tokens)
            if spent >= self.estimate_build(document_tokens, rows):
                return True
            self._spent[key] = spent
            if len(self._spent) > self._capacity:
                self._spent.popitem(last=False)
            return False

    def observe_build(self, seconds: float, document_tokens: Sequence[int], rows: Sequence[int] | None = None) -> None:
        """Learn from a batch of builds that took `seconds` together."""
        passes = map(_passes, document_tokens if rows is None else rows, document_tokens)
        self._learn("build", seconds / sum(passes))

    def observe_cold(self, seconds: float, query_tokens: int, document_tokens: Sequence[int]) -> None:
        """Learn from a batch of cold explanations that took `seconds` together."""
        self._learn("cold", seconds / sum(_passes(query_tokens, n) for n in document_tokens))

    def _learn(self, kind: str, seconds: float) -> None:
        with self._lock:
            if not self._measured:  # passes turn into seconds: the other kind and what was spent follow
                self._per_pass = dict.fromkeys(self._per_pass, seconds)
                for key in self._spent:
                    self._spent[key] *= seconds
            elif kind in self._measured:
                self._per_pass[kind] += _SMOOTHING * (seconds - self._per_pass[kind])
            else:
                self._per_pass[kind] = seconds
            self._measured.add(kind)


def _passes(rows: int, document_tokens: int) -> int:
    """How often one row of a block of `rows` and the rest goes through one token of the document."""
    return (rows + 1) * max(1, document_tokens)
