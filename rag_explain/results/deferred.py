"""A value that is computed when it is first needed, once, by whichever thread asks first."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Generic, Literal, TypeVar

T = TypeVar("T")
Status = Literal["ready", "pending", "skipped", "failed"]


class Deferred(Generic[T]):
    """A value that may be ready, pending, skipped or failed.

    A computation that fails leaves a reason and no value: it never raises into the host's search.
    """

    def __init__(
        self,
        compute: Callable[[], T] | None,  # makes the value; None for one that is not pending
        *,
        status: Status = "pending",
        reason: str | None = None,  # why there is no value, for one that is skipped or has failed
        value: T | None = None,
        together: Callable[[Sequence[Deferred[T]]], None] | None = None,  # fills several in one batch: see `load`
        reserved: str | None = None,  # why it is computed only when it is looked at, and not to be logged
    ) -> None:
        self.status, self.reason, self._value, self.reserved = status, reason, value, reserved
        self._compute, self._together = compute, together
        self._lock = threading.Lock()

    @classmethod
    def ready(cls, value: T) -> Deferred[T]:
        """One whose value is there already."""
        return cls(None, status="ready", value=value)

    @classmethod
    def skipped(cls, reason: str) -> Deferred[T]:
        """One that will never have a value."""
        return cls(None, status="skipped", reason=reason)

    def __deepcopy__(self, memo: dict[int, Any]) -> Deferred[T]:
        return self  # frameworks copy their documents; every copy shares the one computation

    def __reduce__(self) -> tuple[Any, ...]:
        if self.status == "pending":  # the computation cannot leave the process
            return Deferred.skipped, ("it was not computed before the hit was pickled",)
        return partial(Deferred, None, status=self.status, reason=self.reason, value=self._value), ()

    def get(self) -> T | None:
        """The value, computed now if it is pending; None when it was skipped or has failed."""
        with self._lock:
            if self.status == "pending":
                assert self._compute is not None
                try:
                    self._settle("ready", value=self._compute())
                except Exception as error:  # the host's search must not fail because an explanation did
                    self._settle("failed", reason=f"{type(error).__name__}: {error}")
            return self._value

    def peek(self) -> T | None:
        """The value if it is ready; never computes."""
        return self._value

    def fill(self, value: T) -> None:
        """Make a pending one ready with a value that was computed elsewhere, in one batch with others, say."""
        with self._lock:
            if self.status == "pending":
                self._settle("ready", value=value)

    def _settle(self, status: Status, *, value: T | None = None, reason: str | None = None) -> None:
        self._value, self.reason, self.status = value, reason, status
        self._compute = self._together = None  # they hold the texts and the explainer


class Parts:
    """Values of one thing that are made when they are first asked for, by name."""

    def __init__(self, make: Callable[[str], Deferred[Any]], ask: Callable[..., Any] | None = None) -> None:
        self._make, self._made = make, dict[str, Deferred[Any]]()
        self.ask = ask  # answers a question about this one thing that has arguments; it stays in this process

    def __getitem__(self, name: str) -> Deferred[Any]:
        return self._made.setdefault(name, self._made.get(name) or self._make(name))

    def __deepcopy__(self, memo: dict[int, Any]) -> Parts:
        return self  # as for every deferred value

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (dict(self._made),)


def _unpickled(made: dict[str, Deferred[Any]]) -> Parts:
    """Parts in another process: those that were computed."""
    parts = Parts(lambda name: Deferred.skipped("it was not computed before the hit was pickled"))
    parts._made = made
    return parts


def load(deferred: Iterable[Deferred[T]]) -> None:
    """Compute all that are pending: in one batch where they share one, else one by one."""
    pending = [one for one in deferred if one.status == "pending"]
    for together in dict.fromkeys(one._together for one in pending):
        if together is not None:
            together([one for one in pending if one._together == together])
    for one in pending:
        one.get()
