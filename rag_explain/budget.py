"""How many texts may be sent to a model that costs money, retries included."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from rag_explain.errors import BudgetSpent, InvalidInput, whole_number

_lock = threading.Lock()


class Budget:
    """Counts the texts that were sent; with a limit, no text more is.

    Attributes:
        sent: how many texts were sent, each retry counted again.
    """

    def __init__(self, max_calls: int | None = None) -> None:
        if max_calls is not None and (max_calls := whole_number(max_calls, "max_calls")) < 0:
            raise InvalidInput(f"max_calls must be 0 or more texts, not {max_calls}")
        self.max_calls, self.sent = max_calls, 0

    @property
    def left(self) -> float:
        """How many texts may still be sent."""
        return min(float("inf") if one.max_calls is None else one.max_calls - one.sent for one in self._all())

    def grant(self, wanted: int) -> int:
        """Count as many of these texts as may be sent; how many that are."""
        with _lock:
            granted = int(max(0, min(wanted, self.left)))
            for one in self._all():
                one.sent += granted
            return granted

    def take(self, count: int) -> None:
        """Count these texts, all of them or none."""
        with _lock:
            if count > self.left:
                raise self.spent()
            for one in self._all():
                one.sent += count

    def spent(self) -> BudgetSpent:
        """What to raise when there is no more to send."""
        limits = [(one.max_calls - one.sent, one.max_calls) for one in self._all() if one.max_calls is not None]
        return BudgetSpent(
            f"max_calls is spent ({min(limits)[1]} texts): what was embedded until then is kept, raise it to go on"
        )

    def _all(self) -> tuple[Budget, ...]:
        return tuple(dict.fromkeys((self, *_within.get())))


_within: ContextVar[tuple[Budget, ...]] = ContextVar("rag_explain_budgets", default=())


@contextmanager
def at_most(budget: int | Budget | None) -> Iterator[None]:
    """Inside the block no more than this many texts are sent, whatever embeds them; a `Budget` counts over blocks."""
    token = _within.set((*_within.get(), budget if isinstance(budget, Budget) else Budget(budget)))
    try:
        yield
    finally:
        _within.reset(token)
