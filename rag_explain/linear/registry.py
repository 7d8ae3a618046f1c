"""The table that a recorded forward pass is looked up in: tensor operations, by what they are.

A handler gets an operation, its arguments and its result, and writes down what the result is: linear operations on the
arguments that depend on the hidden state, a function of one of them, a constant (nothing), or poison. Handlers are in
`structure` (the same elements elsewhere), `functions` (of one value), `arithmetic` (sums, products, norms) and
`attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rag_explain.linear.rules import Rules

if TYPE_CHECKING:
    from rag_explain.linear.recorder import Recorder

Arguments = tuple[Any, ...]
Handler = Callable[["Recorder", Any, Arguments, dict[str, Any], Any], None]
Reads = Callable[[Rules, Arguments], Arguments]
Frozen = Callable[[Rules], bool]
Inside = Callable[..., tuple[Any, Arguments]]


@dataclass(frozen=True, eq=False)
class Entry:
    """What the table says of an operation.

    Attributes:
        is_frozen: whether the result is a coefficient under the rules, and no longer a value to be followed.
        reads: the arguments that the result is a function of; None for all of them.
    """

    handler: Handler
    is_frozen: Frozen
    reads: Reads | None = None


@dataclass(frozen=True, eq=False)
class OpInfo:
    """One overload of an operation: its entry, None where it has none, and what torch says of it.

    Attributes:
        inside: makes the one operation, and its arguments, whose first result this one hands out; None for most.
    """

    func: Any  # kept, so that its id is never another operation's
    entry: Entry | None
    inside: Inside | None
    is_mutable: bool
    is_composite: bool  # made of other operations, into which it can be taken apart


_TABLE: dict[Any, Entry] = {}
_INSIDE: dict[Any, Inside] = {}
_INFOS: dict[int, OpInfo] = {}


def handles(
    *packets: Any, frozen: Frozen = lambda rules: False, reads: Reads | None = None
) -> Callable[[Handler], Handler]:
    """Enter a handler into the table for these operations of `torch.ops.aten`."""

    def register(handler: Handler) -> Handler:
        _TABLE.update(dict.fromkeys(packets, Entry(handler, frozen, reads)))
        return handler

    return register


def is_first_of(packet: Any) -> Callable[[Inside], Inside]:
    """Enter an operation that hands out the first of another's results: that one is recorded, and no time is lost."""

    def register(inside: Inside) -> Inside:
        _INSIDE[packet] = inside
        return inside

    return register


def always_frozen(*packets: Any) -> None:
    """The results of these operations of `torch.ops.aten` are coefficients, whatever the rules."""
    _TABLE.update(dict.fromkeys(packets, Entry(unknown, lambda rules: True)))


def entry_of(packet: Any) -> Entry | None:
    return _TABLE.get(packet)


def info_of(func: Any) -> OpInfo:
    """What is known of an operation. Found by identity: torch hashes operations in Python, which is slow."""
    kind = _INFOS.get(id(func))
    if kind is None:
        packet = func.overloadpacket
        composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
        kind = OpInfo(func, _TABLE.get(packet), _INSIDE.get(packet), func._schema.is_mutable, composite)
        _INFOS[id(func)] = kind
    return kind


def unknown(rec: Recorder, func: Any, args: Arguments, kwargs: dict[str, Any], out: Any) -> None:
    """No rule: everything that comes out is poisoned, and the operation is named."""
    for value in out if isinstance(out, (tuple, list)) else [out]:
        if isinstance(value, Tensor) and value.is_floating_point():
            rec.refuse(value, f"there is no rule for the operation {func.overloadpacket}")
