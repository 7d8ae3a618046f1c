"""Factors at hand: each document's rows as one tensor on the device that will multiply them.

Each device keeps up to a limit of bytes and drops what was used longest ago. However many threads ask for a key, it is
computed once.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from rag_explain.factors import Factors
from rag_explain.pairing import Placed

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

DEFAULT_MEMORY_BYTES = 2**29


def _to_device(block: torch.Tensor, device: str) -> torch.Tensor:
    return block.to(device)


@dataclass(slots=True)
class _Slot:
    placed: Placed
    owners: set[bytes]


class Memory:
    """Placed factors by key, with the documents that own them, in at most `max_bytes` per device.

    Args:
        max_bytes: per device ("cpu", "cuda", "cuda:1"); one number is the limit of every device.
        place: moves a block to a device; it may raise `torch.OutOfMemoryError`.
    """

    def __init__(
        self,
        max_bytes: int | Mapping[str, int] = DEFAULT_MEMORY_BYTES,
        *,
        place: Callable[[torch.Tensor, str], torch.Tensor] = _to_device,
    ) -> None:
        self._max_bytes = max_bytes
        self._place = place
        self._lock = threading.Lock()
        self._shelves: dict[str, OrderedDict[bytes, _Slot]] = {}  # by device; a key is on one device only
        self._bytes: dict[str, int] = {}

    def get(self, keys: Iterable[bytes], device: str = "cpu") -> dict[bytes, Placed]:
        """Those of the keys that are here, on `device` or, where that had no room, on the CPU."""
        found = {}
        with self._lock:
            for key in keys:
                for name in (device, "cpu"):
                    shelf = self._shelves.get(name)
                    if shelf is not None and key in shelf:
                        shelf.move_to_end(key)
                        found[key] = shelf[key].placed
                        break
        return found

    def has(self, keys: Iterable[bytes]) -> set[bytes]:
        """Those of the keys that are here, on any device."""
        with self._lock:
            return {key for key in keys if self._slot(key)}

    def put(self, key: bytes, factors: Factors, *, device: str = "cpu", owners: Iterable[bytes] = ()) -> Placed:
        """Keep these factors on `device`, and hand them back as they will be multiplied."""
        placed, device = self._reside(factors, device)
        limit = self.max_bytes(device)
        with self._lock:
            self._drop(key)
            if placed.nbytes <= limit:
                self._shelves.setdefault(device, OrderedDict())[key] = _Slot(placed, set(owners))
                self._bytes[device] = self._bytes.get(device, 0) + placed.nbytes
                self._evict(device, limit)
        return placed

    def link(self, key: bytes, owners: Iterable[bytes]) -> bool:
        """Give what is kept under `key` these owners; False when all of them are known to own it already."""
        with self._lock:
            slot = self._slot(key)
            if slot is None:
                return True
            known = len(slot.owners)
            slot.owners.update(owners)
            return len(slot.owners) > known

    def forget(self, owners: Iterable[bytes]) -> set[bytes]:
        """Let go of what these documents own; the keys that were here."""
        wanted = set(owners)
        with self._lock:
            gone = {key for shelf in self._shelves.values() for key, slot in shelf.items() if slot.owners & wanted}
            for key in gone:
                self._drop(key)
        return gone

    def drop(self, keys: Iterable[bytes]) -> None:
        """Let go of these keys."""
        with self._lock:
            for key in keys:
                self._drop(key)

    def clear(self) -> None:
        """Let go of everything."""
        with self._lock:
            self._shelves.clear()
            self._bytes.clear()

    def max_bytes(self, device: str) -> int:
        """What may be kept on `device`: "cuda:1" has the limit of "cuda" unless it has its own."""
        if isinstance(self._max_bytes, int):
            return self._max_bytes
        return self._max_bytes.get(device, self._max_bytes.get(device.partition(":")[0], DEFAULT_MEMORY_BYTES))

    def info(self) -> dict[str, Any]:
        """Documents and bytes per device, and the limit."""
        with self._lock:
            return {
                device: {"documents": len(shelf), "bytes": self._bytes[device], "max_bytes": self.max_bytes(device)}
                for device, shelf in self._shelves.items()
            }

    def _reside(self, factors: Factors, device: str) -> tuple[Placed, str]:
        """Factors as a block on `device`; without room there, half of ours goes, then the CPU serves."""
        import torch

        block = Placed.on_host(factors).block
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
        return Placed(factors, block), device

    def _evict(self, device: str, limit: int) -> None:
        while self._bytes.get(device, 0) > limit:
            self._drop(next(iter(self._shelves[device])))

    def _drop(self, key: bytes) -> None:
        for device, shelf in self._shelves.items():
            slot = shelf.pop(key, None)
            if slot is not None:
                self._bytes[device] -= slot.placed.nbytes

    def _slot(self, key: bytes) -> _Slot | None:
        return next((shelf[key] for shelf in self._shelves.values() if key in shelf), None)


class SingleFlight:
    """One computation per key at a time: a thread that asks for a key that is being computed waits for its result."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[bytes, Future[Mapping[bytes, Any]]] = {}

    def run(self, keys: Sequence[bytes], compute: Callable[[list[bytes]], Mapping[bytes, T]]) -> dict[bytes, T]:
        """`compute` for those of the keys that no thread is computing, and the other threads' results for the rest.

        When another thread's computation fails, its keys are computed here: its error is its own.
        """
        results: dict[bytes, T] = {}
        wanted = list(dict.fromkeys(keys))
        while wanted:
            future: Future[Mapping[bytes, T]] = Future()
            with self._lock:
                others = {key: self._running[key] for key in wanted if key in self._running}
                mine = [key for key in wanted if key not in others]
                self._running |= dict.fromkeys(mine, future)
            results |= self._run(mine, compute, future)
            for key, other in others.items():
                if key in other.result():
                    results[key] = other.result()[key]
            wanted = [key for key in others if key not in results]
        return results

    def _run(
        self, keys: list[bytes], compute: Callable[[list[bytes]], Mapping[bytes, T]], future: Future[Mapping[bytes, T]]
    ) -> Mapping[bytes, T]:
        """`compute` for keys that this thread has claimed; threads that wait get nothing when it fails."""
        results: Mapping[bytes, T] = {}
        try:
            if keys:
                results = compute(list(keys))
        finally:
            with self._lock:
                for key in keys:
                    del self._running[key]
            future.set_result(results)
        return results
