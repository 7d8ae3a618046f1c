"""Factors at hand: each document's rows as one tensor on the device that will multiply them.

Each device keeps up to a limit of bytes and drops what was used longest ago.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from rag_explain.factors import Factors
from rag_explain.pairing import Placed, place

DEFAULT_MEMORY_BYTES = 2**29


@dataclass(slots=True)
class _Slot:
    placed: Placed
    device: str
    owners: set[bytes]
    home: str  # the device to which it goes back from the CPU


class Memory:
    """Placed factors by key, with the documents that own them; one number for `max_bytes` is every device's limit.

    With `is_half`, blocks take half of the memory on a device that is not the CPU, where factors are in float32 anyway.
    """

    def __init__(self, max_bytes: int | Mapping[str, int] = DEFAULT_MEMORY_BYTES, *, is_half: bool = False) -> None:
        self._max_bytes, self._is_half = max_bytes, is_half
        self._lock = threading.Lock()
        self._slots: OrderedDict[bytes, _Slot] = OrderedDict()  # of all devices; the last was used last
        self._bytes: Counter[str] = Counter()  # by device

    def get(self, keys: Iterable[bytes], device: str = "cpu") -> dict[bytes, Placed]:
        """Those of the keys that are here, on `device` or, where that had no room, on the CPU.

        What is on another device is moved, and what had to leave this one comes back: factors are in main memory too.
        """
        found, elsewhere = {}, dict[bytes, tuple[Factors, Iterable[bytes]]]()
        with self._lock:
            for key in keys:
                slot = self._slots.get(key)
                if slot is None:
                    continue
                if slot.device == device or (slot.device == "cpu" and slot.home != device):
                    self._slots.move_to_end(key)
                    found[key] = slot.placed
                else:
                    elsewhere[key] = slot.placed.factors, slot.owners
        return found | (self._put(elsewhere, device, moves=True) if elsewhere else {})

    def has(self, keys: Iterable[bytes]) -> set[bytes]:
        """Those of the keys that are here, on any device."""
        with self._lock:
            return {key for key in keys if key in self._slots}

    def put(self, key: bytes, factors: Factors, *, device: str = "cpu", owners: Iterable[bytes] = ()) -> Placed:
        """Keep these factors on `device`, and hand them back as they will be multiplied."""
        return self.put_many({key: (factors, owners)}, device=device)[key]

    def put_many(
        self, new: Mapping[bytes, tuple[Factors, Iterable[bytes]]], *, device: str = "cpu"
    ) -> dict[bytes, Placed]:
        """`put` for several, each with its owners: they are moved to the device together."""
        return self._put(new, device)

    def _put(
        self, new: Mapping[bytes, tuple[Factors, Iterable[bytes]]], device: str, *, moves: bool = False
    ) -> dict[bytes, Placed]:
        """Keep factors on `device`, or move there what is kept elsewhere unless it was forgotten meanwhile."""
        every, device = self._reside([factors for factors, _ in new.values()], device, may_displace=not moves)
        limit = self.max_bytes(device)
        with self._lock:
            for (key, (_, owners)), placed in zip(new.items(), every, strict=True):
                if moves and key not in self._slots:
                    continue
                owners = self._slots[key].owners if moves else owners
                self._drop(key)
                if placed.nbytes <= limit:
                    self._slots[key] = _Slot(placed, device, set(owners), device)
                    self._bytes[device] += placed.nbytes
                    self._evict(device, limit)
        return dict(zip(new, every, strict=True))

    def make_room(self, device: str) -> None:
        """Keep in main memory what is on a device, until it is asked for there again."""
        self._displace(device, 1)

    def link(self, key: bytes, owners: Iterable[bytes]) -> bool:
        """Give what is kept under `key` these owners; False when all of them are known to own it already."""
        with self._lock:
            slot = self._slots.get(key)
            if slot is None:
                return True
            known = len(slot.owners)
            slot.owners.update(owners)
            return len(slot.owners) > known

    def forget(self, owners: Iterable[bytes]) -> set[bytes]:
        """Let go of what these documents own; the keys that were here."""
        wanted = set(owners)
        with self._lock:
            gone = {key for key, slot in self._slots.items() if not slot.owners.isdisjoint(wanted)}
        self.drop(gone)
        return gone

    def drop(self, keys: Iterable[bytes]) -> None:
        """Let go of these keys."""
        with self._lock:
            for key in keys:
                self._drop(key)

    def clear(self) -> None:
        """Let go of everything."""
        with self._lock:
            self._slots.clear()
            self._bytes.clear()

    def max_bytes(self, device: str) -> int:
        """What may be kept on `device`: "cuda:1" has the limit of "cuda" unless it has its own."""
        if isinstance(self._max_bytes, int):
            return self._max_bytes
        return self._max_bytes.get(device, self._max_bytes.get(device.partition(":")[0], DEFAULT_MEMORY_BYTES))

    def info(self) -> dict[str, Any]:
        """Documents and bytes per device, and the limit."""
        with self._lock:
            documents = Counter(slot.device for slot in self._slots.values())
            return {
                device: {"documents": documents[device], "bytes": size, "max_bytes": self.max_bytes(device)}
                for device, size in self._bytes.items()
            }

    def _reside(self, factors: Sequence[Factors], device: str, may_displace: bool) -> tuple[list[Placed], str]:
        """Factors as blocks on `device`; without room there, half of ours goes, then the CPU serves."""
        import torch

        from rag_explain.devices import Attempt, keeps

        placed, there = [Placed.on_host(one) for one in factors], torch.device(device)
        if there.type != "cpu":
            keeps(self)
            for clear in (partial(self._displace, device, 2), lambda: None) if may_displace else (lambda: None,):
                with Attempt(lambda: there, clear):
                    return place(placed, there, self._is_half), device
        return placed, "cpu"

    def _displace(self, device: str, part: int) -> None:
        """Move the 1/`part` of the bytes on a device that was used longest ago to main memory."""
        with self._lock:
            left = self._bytes[device] - self._bytes[device] // part
            for slot in [slot for slot in self._slots.values() if slot.device == device != "cpu"]:
                if self._bytes[device] <= left:
                    break
                self._bytes[device] -= slot.placed.nbytes
                slot.placed, slot.device = Placed.on_host(slot.placed.factors), "cpu"
                self._bytes["cpu"] += slot.placed.nbytes
            self._evict("cpu", self.max_bytes("cpu"))

    def _evict(self, device: str, limit: int) -> None:
        while self._bytes[device] > limit:
            self._drop(next(key for key, slot in self._slots.items() if slot.device == device))

    def _drop(self, key: bytes) -> None:
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._bytes[slot.device] -= slot.placed.nbytes


@dataclass(eq=False)
class Build:
    """One key that threads want built: the lock of the one that builds it, and what it built, for those that wait."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    result: Any = None


class Builds:
    """What several threads want built is built by one of them, and the others take its result."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._builds: WeakValueDictionary[bytes, Build] = WeakValueDictionary()  # as long as a thread wants the key

    @contextmanager
    def hold(self, keys: Iterable[bytes]) -> Iterator[dict[bytes, Build]]:
        """Until the end of the block no other thread builds one of these keys."""
        with self._guard:
            # In the same order in every thread: two threads never wait for each other.
            builds = {key: self._builds.setdefault(key, Build()) for key in sorted(set(keys))}
        with ExitStack() as held:
            for build in builds.values():
                held.enter_context(build.lock)
            yield builds
