"""The structure of a frozen encoder, kept from one text for other texts of the same length.

Recording a forward pass and reading it costs a short query as much as the pass itself, and comes to the same for every
text of its length: the same operations of torch in the same order, on other tokens. So all of them, the model's and
those that make coefficients, are written down once, and run again for the next text without model, tape or handlers.
What does not depend on the tokens (masks, positions, turned weights) is not computed again.

A pass that looks at what its tensors hold (a router, a loop until convergence) may do something else for other tokens.
It is never kept: torch says which operations hand out values, and the functions of Python that do are watched.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rag_explain import _torch
from rag_explain._torch import Arguments
from rag_explain.linear.affine_map import AffineMap
from rag_explain.linear.identity import IdentityMap, storage_of
from rag_explain.linear.operations import Operation
from rag_explain.linear.rearrangements import Rearrange
from rag_explain.linear.registry import info_of
from rag_explain.linear.tape import values

Frozen = tuple[AffineMap, Tensor]


class _Slot(NamedTuple):
    """Where a tensor that depends on the tokens is while a structure runs."""

    number: int


class _Call(NamedTuple):
    """out = func(*args, **kwargs), in which slots stand for tensors that depend on the tokens."""

    func: Any
    args: Arguments
    kwargs: dict[str, Any]
    reads: tuple[int, ...]
    writes: tuple[int, ...]  # one slot per tensor of the result
    is_mutable: bool


class Structures:
    """The structures of the lengths that were asked for last. Thread-safe.

    A structure is used from its third text on: at the second, recording must come to the same.
    """

    def __init__(self, capacity: int = 64) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, Structure | None] = OrderedDict()  # None: recorded each time

    def freeze(self, alike: Hashable, tokens: Tensor, record: Callable[[], Frozen]) -> Frozen:
        """What `record` gives for these tokens; `alike` is equal for texts that differ in their tokens alone."""
        with self._lock:
            is_known, kept = alike in self._kept, self._kept.pop(alike, None)
            if is_known:
                self._kept[alike] = kept  # the newest again
        if kept is not None and kept.is_checked:
            return kept.at(tokens)
        if is_known and kept is None:
            return record()
        if kept is None:
            frozen, kept = Structure.capture(tokens, record)
        else:
            frozen = record()
            kept.is_checked = kept.agrees(frozen[0], tokens)
            kept = kept if kept.is_checked else None
        with self._lock:
            self._kept[alike] = kept
            if len(self._kept) > self._capacity:
                self._kept.popitem(last=False)
        return frozen


class Structure:
    """Freezes an encoder at other tokens as it was frozen at those that it was captured with."""

    def __init__(self, calls: Sequence[_Call], template: AffineMap, find: Callable[[Any], Any]) -> None:
        self._template = template
        self._hidden, self._embedding = find(template.hidden), find(template.embedding)
        self._attributes = [
            (index, {name: find(value) for name, value in vars(operation).items() if isinstance(find(value), _Slot)})
            for index, operation in enumerate(template.operations)
        ]
        wanted = {slot.number for _, found in self._attributes for slot in found.values()}
        needed = _needed(calls, wanted | {self._hidden.number, self._embedding.number})
        self._calls = [(call, _places(call)) for call in needed]
        self._size = 1 + max((max(call.writes) for call in needed if call.writes), default=0)
        # The tensors of the text that it was captured with are not kept.
        self._template = self._filled([None] * self._size)
        self.is_checked = False

    @classmethod
    def capture(cls, tokens: Tensor, freeze: Callable[[], Frozen]) -> tuple[Frozen, Structure | None]:
        """What `freeze` gives, and its structure for other `tokens` of this shape; None where there may be none."""
        with _Capture(tokens) as capture, _Reading(capture):
            frozen = freeze()
        ends = [capture.find(end) for end in (frozen[0].hidden, frozen[0].embedding, frozen[1])]
        is_fit = capture.is_fit and all(isinstance(end, _Slot) for end in ends) and ends[1] == ends[2]
        if not is_fit or any(capture.depends(_held(operation)) for operation in frozen[0].operations):
            return frozen, None
        return frozen, cls(capture.calls, frozen[0], capture.find)

    def at(self, tokens: Tensor) -> Frozen:
        """The encoder frozen at these tokens."""
        memory: list[Any] = [None] * self._size
        memory[0] = tokens
        with torch.inference_mode():
            for call, places in self._calls:
                if places is None:
                    out = call.func(*_filled(call.args, memory), **_filled(call.kwargs, memory))
                else:  # nearly all: hundreds for a short query
                    args = list(call.args)
                    for index, slot in places:
                        args[index] = memory[slot]
                    out = call.func(*args, **call.kwargs)
                for slot, value in zip(call.writes, values((out,)), strict=True):
                    memory[slot] = value
        frozen = self._filled(memory)
        return frozen, frozen.embedding

    def _filled(self, memory: Sequence[Any]) -> AffineMap:
        operations: list[Operation] = []
        for index, found in self._attributes:
            operation = self._template.operations[index]
            if found:
                operation = operation.at({name: memory[slot.number] for name, slot in found.items()})
            operations.append(operation)
        return self._template.like(operations, memory[self._hidden.number], memory[self._embedding.number])

    def agrees(self, frozen: AffineMap, tokens: Tensor) -> bool:
        """Whether it freezes the encoder at these tokens just as recording did."""
        mine, theirs = self.at(tokens)[0], frozen
        ends = [(mine.hidden, theirs.hidden), (mine.embedding, theirs.embedding)]
        if len(mine.operations) != len(theirs.operations):
            return False
        for one, other in zip(mine.operations, theirs.operations, strict=True):
            if type(one) is not type(other) or (one.inputs, one.output) != (other.inputs, other.output):
                return False
            both, their = vars(one), vars(other)
            ends += [(both[name], their[name]) for name in both if isinstance(both[name], Tensor)]
        return all(_is_close(one, other) for one, other in ends)


class _Capture(_torch.DispatchMode):
    """Writes down every operation of torch that depends on the tokens."""

    def __init__(self, tokens: Tensor) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.is_fit = True
        self._slots: IdentityMap[_Slot] = IdentityMap()
        self._slots[tokens] = _Slot(0)
        self._count = 1
        self._constants: set[int] = set()  # the memory that calls read and that does not depend on the tokens

    def find(self, value: Any) -> Any:
        """A tensor that depends on the tokens as its slot; anything else as it is."""
        slot = self._slots.get(value)
        return value if slot is None else slot

    def depends(self, arguments: Iterable[Any]) -> bool:
        return any(value in self._slots for value in values(arguments))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = list(values((args, kwargs.values())))
        reads = tuple(self._slots[value].number for value in given if value in self._slots)
        is_mutable = info_of(func).is_mutable
        if reads:
            self._write(_Call(func, self._marked(args), self._marked(kwargs), reads, (), is_mutable), out, args)
            self._constants.update(storage_of(value) for value in given if value not in self._slots)
        elif is_mutable and not self._constants.isdisjoint(map(storage_of, given)):  # read as it was before
            self.is_fit = False
        return out

    def _write(self, call: _Call, out: Any, args: Arguments) -> None:
        results = out if isinstance(out, (tuple, list)) else (out,)
        if not all(isinstance(value, Tensor) for value in results) or _torch.hands_out_values(call.func):
            self.is_fit = False
        if _torch.draws(call.func) and info_of(call.func).bind(call.args, call.kwargs).get("dropout_p") != 0:
            self.is_fit = False
        if call.is_mutable and args[0] not in self._slots:  # memory that would have to be made anew each time
            self.is_fit = False
        slots = []
        for value in values(results):
            if value not in self._slots:
                self._slots[value] = _Slot(self._count)
                self._count += 1
            slots.append(self._slots[value].number)
        self.calls.append(call._replace(writes=tuple(slots)))

    def _marked(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.find(value)
        if isinstance(value, (list, tuple)):
            return type(value)(self._marked(item) for item in value)
        if isinstance(value, dict):
            return {name: self._marked(item) for name, item in value.items()}
        return value


class _Reading(_torch.FunctionMode):
    """Notices when Python takes values out of a tensor that depends on the tokens."""

    def __init__(self, capture: _Capture) -> None:
        super().__init__()
        self._capture = capture

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _torch.READERS and self._capture.depends(args):
            self._capture.is_fit = False
        return func(*args, **(kwargs or {}))


def _held(operation: Operation) -> list[Any]:
    """What the function of an operation has about it, an index say: it cannot be replaced."""
    function = operation.function if isinstance(operation, Rearrange) else None
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    return [item for cell in cells for item in (cell.values() if isinstance(cell, dict) else (cell,))]


def _needed(calls: Sequence[_Call], wanted: set[int]) -> list[_Call]:
    """The calls that the wanted slots depend on; those that write into memory stay, since others may share it."""
    kept = []
    for call in reversed(calls):
        if call.is_mutable or not wanted.isdisjoint(call.writes):
            kept.append(call)
            wanted.update(call.reads)
    return kept[::-1]


def _places(call: _Call) -> list[tuple[int, int]] | None:
    """Which arguments are slots, and which slots these are; None where there are slots inside others."""
    places = [(index, value.number) for index, value in enumerate(call.args) if type(value) is _Slot]
    return places if len(places) == len(call.reads) else None


def _filled(value: Any, memory: Sequence[Any]) -> Any:
    if type(value) is _Slot:
        return memory[value.number]
    if isinstance(value, dict):
        return {name: _filled(item, memory) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_filled(item, memory) for item in value)
    return value


def _is_close(one: Tensor, other: Any) -> bool:
    if not isinstance(other, Tensor) or one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return bool((one == other).all())
    return bool(torch.allclose(one, other, rtol=1e-5, atol=1e-6, equal_nan=True))
