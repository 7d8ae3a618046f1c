"""Factors at hand: each document's rows as one tensor on the device that will multiply them.

A byte budget per device, least recently used out. One computation per key, however many threads ask for it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from rag_explain.factors import Factors
from rag_explain.pairing import Placed, host_block

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

DEFAULT_BUDGET = 2**29


Resident = Placed


def _to_device(block: torch.Tensor, device: str) -> torch.Tensor:
    return block.to(device)


class Memory:
    """Residents by key, within a byte budget per device.

    Args:
        budgets: bytes per device ("cpu", "cuda", "cuda:1"); one number is the budget of every device.
        place: moves a block to a device; it may raise `torch.OutOfMemoryError`.
    """

    def __init__(
        self,
        budgets: int | Mapping[str, int] = DEFAULT_BUDGET,
        *,
        place: Callable[[torch.Tensor, str], torch.Tensor] = _to_device,
    ) -> None:
        self._budgets = budgets
        self._place = place
        self._lock = threading.Lock()
        self._shelves: dict[str, OrderedDict[bytes, Resident]] = {}
        self._bytes: dict[str, int] = {}
        self._keys: dict[bytes, set[bytes]] = {}  # owner -> its keys
        self._owners: dict[bytes, set[bytes]] = {}  # key -> its owners

    def get(self, keys: Iterable[bytes], device: str = "cpu") -> dict[bytes, Resident]:
        """Those of the keys that are here, on `device` or, where that had no room, on the CPU."""
        found = {}
        with self._lock:
            for key in keys:
                for name in dict.fromkeys((device, "cpu")):
                    shelf = self._shelves.get(name)
                    if shelf is not None and key in shelf:
                        shelf.move_to_end(key)
                        found[key] = shelf[key]
                        break
        return found

    def has(self, keys: Iterable[bytes]) -> set[bytes]:
        """Those of the keys that are here, on any device."""
        with self._lock:
            return {key for key in keys if any(key in shelf for shelf in self._shelves.values())}

    def put(self, key: bytes, factors: Factors, *, device: str = "cpu", owners: Sequence[bytes] = ()) -> Resident:
        """Keep these factors on `device`, and hand them back as they will be multiplied."""
        resident, device = self._reside(factors, device)
        with self._lock:
            for other in self._shelves.values():
                if key in other:
                    self._drop(key)
                    break
            budget = self.budget(device)
            if resident.nbytes <= budget:
                self._shelves.setdefault(device, OrderedDict())[key] = resident
                self._bytes[device] = self._bytes.get(device, 0) + resident.nbytes
                self._evict(device, budget)
                self._link(key, owners)
        return resident

    def link(self, key: bytes, owners: Sequence[bytes]) -> None:
        """Give what is kept under `key`, if anything is, more owners."""
        with self._lock:
            if any(key in shelf for shelf in self._shelves.values()):
                self._link(key, owners)

    def owned(self, key: bytes, owners: Iterable[bytes]) -> bool:
        """Whether all of these documents are known to own what is kept under `key`."""
        with self._lock:
            return self._owners.get(key, set()).issuperset(owners)

    def forget(self, owners: Iterable[bytes] = (), keys: Iterable[bytes] = ()) -> set[bytes]:
        """Let go of what these documents own, and of these keys; the keys that were here."""
        with self._lock:
            gone = {key for owner in owners for key in self._keys.get(owner, ())}
            gone |= {key for key in keys if any(key in shelf for shelf in self._shelves.values())}
            for key in gone:
                self._drop(key)
        return gone

    def clear(self) -> None:
        """Let go of everything."""
        with self._lock:
            for state in (self._shelves, self._bytes, self._keys, self._owners):
                state.clear()

    def budget(self, device: str) -> int:
        """The bytes that may be kept on `device`: "cuda:1" has the budget of "cuda" unless it has its own."""
        if isinstance(self._budgets, int):
            return self._budgets
        return self._budgets.get(device, self._budgets.get(device.partition(":")[0], DEFAULT_BUDGET))

    def info(self) -> dict[str, Any]:
        """Documents, bytes and budget per device."""
        with self._lock:
            return {
                device: {
                    "documents": len(shelf),
                    "bytes": self._bytes[device],
                    "budget": self.budget(device),
                }
                for device, shelf in self._shelves.items()
            }

    def _reside(self, factors: Factors, device: str) -> tuple[Resident, str]:
        """Factors as a block on `device`; without room there, half of ours goes, then the CPU serves."""
        import torch

        block = host_block(factors)
        if device != "cpu":
            try:
                block = self._place(block, device)
            except torch.OutOfMemoryError:
                with self._lock:
                    self._evict(device, self._bytes.get(device, 0) // 2)
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
                try:
                    block = self._place(block, device)
                except torch.OutOfMemoryError:
                    device = "cpu"
        resident = Placed.of(factors, block)
        return resident, device

    def _evict(self, device: str, budget: int) -> None:
        shelf = self._shelves.get(device)
        while shelf and self._bytes[device] > budget:
            self._drop(next(iter(shelf)))

    def _drop(self, key: bytes) -> None:
        for device, shelf in self._shelves.items():
            resident = shelf.pop(key, None)
            if resident is not None:
                self._bytes[device] -= resident.nbytes
        for owner in self._owners.pop(key, ()):
            self._keys[owner].discard(key)
            if not self._keys[owner]:
                del self._keys[owner]

    def _link(self, key: bytes, owners: Sequence[bytes]) -> None:
        for owner in owners:
            self._keys.setdefault(owner, set()).add(key)
            self._owners.setdefault(key, set()).add(owner)


class SingleFlight:
    """One computation per key at a time: whoever asks for a key that is being computed waits for that one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flights: dict[bytes, _Flight] = {}

    def run(self, keys: Sequence[bytes], compute: Callable[[list[bytes]], Mapping[bytes, T]]) -> dict[bytes, T]:
        """`compute` for those of the keys that nobody is computing, and other threads' results for the rest.

        When another thread's computation fails, its keys are computed here: its error is its own.
        """
        results: dict[bytes, T] = {}
        wanted = list(dict.fromkeys(keys))
        while wanted:
            mine: dict[bytes, _Flight] = {}
            others: dict[bytes, _Flight] = {}
            with self._lock:
                for key in wanted:
                    flight = self._flights.get(key)
                    if flight is None:
                        mine[key] = self._flights[key] = _Flight()
                    else:
                        others[key] = flight
            try:
                if mine:
                    for key, value in compute(list(mine)).items():
                        mine[key].land(value)
                        results[key] = value
            finally:
                with self._lock:
                    for key in mine:
                        del self._flights[key]
                for flight in mine.values():
                    flight.done.set()
            for key, flight in others.items():
                flight.done.wait()
                if flight.landed:
                    results[key] = flight.value
            wanted = [key for key in others if key not in results]
        return results


class _Flight:
    def __init__(self) -> None:
        self.done = threading.Event()
        self.landed = False
        self.value: Any = None

    def land(self, value: Any) -> None:
        self.value = value
        self.landed = True
