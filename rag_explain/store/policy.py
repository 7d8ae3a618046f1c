"""When to build a document's factors: explain it cold until that would have paid for them, then build.

Ski-rental: whatever queries come, this costs at most twice what it would have cost to know them beforehand.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

_SMOOTHING = 0.2  # weight of the newest measurement


class SkiRental:
    """What has been spent on cold explanations of each document, and whether that pays for its factors.

    Costs are estimated in passes (a tangent or cotangent through one token of the document) and turned into
    seconds by what such passes were measured to take. Thread-safe; remembers the `capacity` documents asked
    for last.
    """

    def __init__(self, capacity: int = 65_536) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._spent: OrderedDict[bytes, float] = OrderedDict()
        # A cotangent pulled back costs about as much as a tangent pushed forward, until both were measured.
        self._per_pass = {"build": 1.0, "cold": 1.0}
        self._measured: set[str] = set()

    def estimate_build(self, document_tokens: int) -> float:
        """Expected cost of a document's factors: one tangent per token, and one for the rest."""
        return self._per_pass["build"] * (document_tokens + 1) * max(1, document_tokens)

    def estimate_cold(self, query_tokens: int, document_tokens: int) -> float:
        """Expected cost of one cold explanation: one cotangent per query token, and one for the rest."""
        return self._per_pass["cold"] * (query_tokens + 1) * max(1, document_tokens)

    def should_build(self, key: bytes, query_tokens: int, document_tokens: int) -> bool:
        """Whether this look at the document should build its factors; if not, it is charged for the look."""
        cold = self.estimate_cold(query_tokens, document_tokens)
        build = self.estimate_build(document_tokens)
        with self._lock:
            spent = self._spent.pop(key, 0.0) + cold
            if spent >= build:
                return True
            self._spent[key] = spent
            if len(self._spent) > self._capacity:
                self._spent.popitem(last=False)
            return False

    def observe_build(self, seconds: float, document_tokens: Sequence[int]) -> None:
        """Learn from a batch of builds that took `seconds` together."""
        self._learn("build", seconds / sum((n + 1) * max(1, n) for n in document_tokens))

    def observe_cold(self, seconds: float, query_tokens: int, document_tokens: Sequence[int]) -> None:
        """Learn from a batch of cold explanations that took `seconds` together."""
        self._learn("cold", seconds / sum((query_tokens + 1) * max(1, n) for n in document_tokens))

    def _learn(self, kind: str, seconds: float) -> None:
        other = "cold" if kind == "build" else "build"
        with self._lock:
            if kind in self._measured:
                self._per_pass[kind] += _SMOOTHING * (seconds - self._per_pass[kind])
                return
            # The first measurement turns passes into seconds: the other kind and what was spent follow.
            scale = seconds / self._per_pass[kind]
            self._per_pass[kind] = seconds
            self._measured.add(kind)
            if other not in self._measured:
                self._per_pass[other] *= scale
                for key in self._spent:
                    self._spent[key] *= scale
