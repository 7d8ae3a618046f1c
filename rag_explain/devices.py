"""The device that computes: what crosses to it and back, how much room it has, and what happens when that is spent.

A graphics card computes while Python goes on, so that each tensor or number that is read from it is a wait, and each
small operation costs its launch. What people look at crosses once per batch, and batches are as large as the room
allows.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.metadata import version
from types import TracebackType
from typing import NamedTuple, Protocol, Self, TypeVar, cast
from weakref import WeakSet

import torch
from torch import Tensor

from rag_explain.errors import DeviceFull, first_line

T = TypeVar("T")
B = TypeVar("B")
C = TypeVar("C", covariant=True)
log = logging.getLogger("rag_explain.devices")


class Selectable(Protocol[C]):
    """A batch of texts of which some can be taken."""

    def __len__(self) -> int: ...

    def select(self, indices: Sequence[int]) -> C: ...


class Keeper(Protocol):
    """What keeps something on devices for later."""

    def make_room(self, device: str) -> None:
        """Take off a device what is kept there."""


# On a CPU products are big ones at this size, and what is larger leaves the cache.
_CPU_BYTES, _CPU_POSITIONS, _CPU_UNEVEN = 48 * 2**20, 2048, 1.25
# On any other device a launch costs more than some padding, and nothing is gained any more beyond these.
_MOST_BYTES, _MOST_POSITIONS, _UNEVEN, _UNFILLED = 2**32, 2**16, 2.0, 2**12
_SHARE = 4  # the part of the free memory that one batch may take: there may be several threads
_UNKNOWN_ROOM = 2**31  # of a device that does not tell
_POSITION_BYTES = 2**18  # what a recorded pass keeps of one position in a small encoder, about
_FULL = ("out of memory", "can't allocate memory")  # as devices without an exception of their own say it
# Of the whole process, as a device's memory is: what one Explainer keeps must not be in the way of another.
_keepers: WeakSet[Keeper] = WeakSet()
_keepers_lock = threading.Lock()


def to_host(*tensors: Tensor) -> list[Tensor]:
    """The tensors in main memory: from another device all in one transfer."""
    if tensors[0].device.type == "cpu":
        return list(tensors)
    parts = torch.cat([one.detach().flatten() for one in tensors]).cpu().split([one.numel() for one in tensors])
    return [part.view(one.shape).to(one.dtype) for part, one in zip(parts, tensors, strict=True)]


def free_bytes(device: torch.device) -> int:
    """The memory that is free on a device, with what torch holds there and does not use."""
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return _UNKNOWN_ROOM
    free: int = module.mem_get_info(device)[0]
    if hasattr(module, "memory_reserved"):
        free += module.memory_reserved(device) - module.memory_allocated(device)
    return free


def room_for_tangents(device: torch.device) -> int:
    """The bytes that tangents on their way may take unless a caller says so."""
    return _CPU_BYTES if device.type == "cpu" else min(_MOST_BYTES, free_bytes(device) // _SHARE)


def missing(name: str) -> str | None:
    """What keeps this machine from computing on a device, in one sentence; None where nothing does."""
    try:
        device = torch.device(name)
        module = torch.get_device_module(device)
    except (RuntimeError, TypeError):
        return f"torch {version('torch')} knows no device of that name: use cpu, cuda, mps or xpu"
    if device.type == "cuda" and torch.version.cuda is None and torch.version.hip is None:
        return f"torch {version('torch')} was built without CUDA: install the build for your card, see pytorch.org"
    if not getattr(module, "is_available", lambda: True)():
        return f"torch {version('torch')} can compute there and finds no such device: look for a card and its driver"
    count = getattr(module, "device_count", lambda: 1)()
    if device.type != "cpu" and (device.index or 0) >= count:
        return f"this machine has {count} of them, counted from 0"
    try:
        torch.zeros(1, device=device).cpu()
    except Exception as error:  # whatever a driver, or a device without memory, makes torch raise
        return f"a first tensor there failed ({first_line(error)})"
    return None


def described(name: str) -> str:
    """A device that is there, for people: its name, and how much memory is free."""
    device = torch.device(name)
    module = torch.get_device_module(device)
    card = f" ({module.get_device_name(device)})" if hasattr(module, "get_device_name") else ""
    return name if device.type == "cpu" else f"{name}{card}, {free_bytes(device) / 2**30:.1f} GB free"


class BatchSize(NamedTuple):
    """Which texts travel together: `positions` at most, and above `unfilled` lengths that differ by `uneven` at most.

    Padding costs a device nothing as long as it is not filled.
    """

    positions: int
    uneven: float = _CPU_UNEVEN
    unfilled: int = 0


class Attempt:
    """`with Attempt(lambda: device) as attempt: ...`, and then `attempt.failed` says whether it had no room for that.

    What was computed before that is let go of, so that all of the device's room is there for the next attempt.
    """

    def __init__(self, device: Callable[[], torch.device], clear: Callable[[], None] = lambda: None) -> None:
        self._device, self._clear = device, clear
        self.failed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> bool:
        if error is None:
            return False
        self.failed = is_full(error)
        if self.failed:
            traceback.clear_frames(trace)  # they hold tensors, and the exception holds them
            self._clear()
            empty_cache(self._device())
        return self.failed


def in_parts(
    count: int, step: int, device: torch.device, compute: Callable[[int, int], None], clear: Callable[[], None]
) -> None:
    """`compute(start, stop)` for `count` items in parts of `step`, in smaller ones where the device has no room.

    `clear` lets go of what `compute` keeps for the next part.
    """
    start, failed_alone = 0, -1
    while start < count:
        stop = min(start + step, count)
        with Attempt(lambda: device, clear) as attempt:
            compute(start, stop)
        if not attempt.failed:
            start = stop
            continue
        if failed_alone == start:  # with all of the room that there is
            raise DeviceFull(f"the device {device} has no room for a single tangent of these texts")
        failed_alone = start if step == 1 else -1
        step = (min(step, count) + 1) // 2
        _say(device, "fewer tangents travel together")


def keeps(keeper: Keeper) -> None:
    """Ask this one, too, to make room on a device that is full, as long as it lives."""
    with _keepers_lock:
        _keepers.add(keeper)


class Device:
    """Where a scorer computes, and what to do when its room is spent.

    Args:
        name: asked each time, since the scorer may be moved to another device.
    """

    def __init__(self, name: Callable[[], str]) -> None:
        self._name = name

    def size(self, positions: int = _CPU_POSITIONS) -> BatchSize:
        """What fills the device, where so many positions fill a CPU."""
        device = torch.device(self._name())
        if device.type == "cpu":
            return BatchSize(positions)
        room = free_bytes(device) // _SHARE // _POSITION_BYTES
        times = min(_MOST_POSITIONS, max(_CPU_POSITIONS, room)) / _CPU_POSITIONS
        return BatchSize(int(positions * times), _UNEVEN, positions * _UNFILLED // _CPU_POSITIONS)

    def sharing(self, compute: Callable[[B], Sequence[T]]) -> Callable[[Selectable[B]], list[T]]:
        """`compute` for the texts of a batch: together, or in halves where the device has no room for that."""
        return partial(self._in_halves, compute)

    def _in_halves(self, compute: Callable[[B], Sequence[T]], batch: Selectable[B]) -> list[T]:
        whole, device = partial(compute, cast("B", batch)), torch.device(self._name())
        if len(batch) == 1:
            return list(self.with_room(whole))
        with Attempt(lambda: device):
            return list(whole())
        _say(device, "fewer texts are computed together")
        middle = len(batch) // 2
        halves = (batch.select(range(middle)), batch.select(range(middle, len(batch))))
        return [one for half in halves for one in self._in_halves(compute, cast("Selectable[B]", half))]

    def with_room(self, compute: Callable[[], T]) -> T:
        """What `compute` gives; where the device has no room for it, once more without what was kept there."""
        with Attempt(lambda: torch.device(self._name())):
            return compute()
        name = self._name()
        device = torch.device(name)
        _say(device, "what is kept there goes to main memory")
        with _keepers_lock:
            keepers = list(_keepers)
        for keeper in keepers:
            keeper.make_room(name)
        empty_cache(device)
        with Attempt(lambda: device):
            return compute()
        raise DeviceFull(
            f"the device {name} is out of memory with one text: free some of it, or use another device, such as cpu"
        )


def empty_cache(device: torch.device) -> None:
    """Give back what torch holds of the device's memory and does not use."""
    if device.type != "cpu":
        getattr(torch.get_device_module(device), "empty_cache", lambda: None)()


def is_full(error: BaseException) -> bool:
    """Whether the error says that a device has no room."""
    if isinstance(error, (torch.OutOfMemoryError, DeviceFull)):
        return True
    return isinstance(error, RuntimeError) and any(said in str(error).lower() for said in _FULL)


@cache  # once each
def _say(device: torch.device, what: str) -> None:
    log.warning("the device %s is out of memory: %s", device, what)
