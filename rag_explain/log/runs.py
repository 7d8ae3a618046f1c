"""Runs that are under way in a framework: which outermost run each belongs to, and what is known of that one.

An outermost run (a chain, a query, a chat) becomes one record. Runs are told apart by their ids, never by time or
thread, so any number of them may be under way at once.
"""

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from rag_explain.errors import InvalidInput
from rag_explain.log.writer import ExplanationLog

Key = TypeVar("Key", bound=Hashable)
State = TypeVar("State")

# How many outermost runs may be open. A stream that its reader gave up never ends: beyond this, the oldest is given up.
MAX_OPEN = 10_000
NEVER_ENDED = "it never ended"
NOT_WRAPPED = "its retriever is not wrapped in an ExplainingRetriever"


def check_log(log: object) -> None:
    """Refuse what is no log, such as its folder: frameworks pass over what fails in an adapter later."""
    if not isinstance(log, ExplanationLog):
        raise InvalidInput(f"log must be an ExplanationLog, not {type(log).__name__}: ExplanationLog(folder) opens one")


@dataclass(frozen=True)
class OutermostRun(Generic[Key, State]):
    """A run that no other run is known to contain."""

    key: Key
    state: State  # what the adapter keeps of it
    parents: dict[Key, Key | None]  # every run inside it, itself included, and the run that contains it

    def around(self, run: Key) -> Iterator[Key]:
        """The runs that contain `run`, innermost first."""
        parent = self.parents.get(run)
        while parent is not None:
            yield parent
            parent = self.parents.get(parent)


class OpenRuns(Generic[Key, State]):
    """The runs that have begun and not ended; `give_up` takes an outermost run when more than `limit` are open."""

    def __init__(self, give_up: Callable[[OutermostRun[Key, State]], None], *, limit: int | None = None) -> None:
        self._give_up = give_up
        self._limit = limit
        self._lock = threading.Lock()
        self._open: dict[Key, OutermostRun[Key, State]] = {}  # by outermost run, oldest first
        self._of: dict[Key, OutermostRun[Key, State]] = {}  # by every run

    def __len__(self) -> int:
        """How many runs are known, inner ones included."""
        return len(self._of)

    def join(self, run: Key, parent: Key | None) -> bool:
        """Count a run to its parent's outermost run; False where the parent is not known."""
        with self._lock:
            outermost = None if parent is None else self._of.get(parent)
            if outermost is None:
                return False
            outermost.parents[run] = parent
            self._of[run] = outermost
            return True

    def open(self, run: Key, state: State) -> None:
        """Begin an outermost run. A run that is inside another one stays there."""
        with self._lock:
            if run in self._of:
                return
            self._open[run] = self._of[run] = OutermostRun(run, state, {run: None})
            given_up = self._remove(next(iter(self._open))) if self._is_full() else None
        if given_up is not None:
            self._give_up(given_up)

    def _is_full(self) -> bool:
        return len(self._open) > (MAX_OPEN if self._limit is None else self._limit)

    @contextmanager
    def outermost(self, run: Key) -> Iterator[OutermostRun[Key, State] | None]:
        """The outermost run that contains `run`, to change its state; None where it is not known or has ended."""
        with self._lock:
            yield self._of.get(run)

    def close(self, run: Key) -> State | None:
        """End an outermost run, with all inside it; its state, or None where it is inside another one or not known."""
        with self._lock:
            closed = self._remove(run)
        return None if closed is None else closed.state

    def close_all(self) -> list[State]:
        """End all that are open."""
        with self._lock:
            states = [outermost.state for outermost in self._open.values()]
            self._open.clear()
            self._of.clear()
        return states

    def _remove(self, run: Key) -> OutermostRun[Key, State] | None:
        outermost = self._open.pop(run, None)
        for inner in () if outermost is None else outermost.parents:
            self._of.pop(inner, None)
        return outermost
