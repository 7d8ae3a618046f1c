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

from torch import Tensor

from rag_explain.linear.rules import Rules

if TYPE_CHECKING:
    from rag_explain.linear.trace import Recorder

Arguments = tuple[Any, ...]
Handler = Callable[["Recorder", Any, Arguments, dict[str, Any], Any], None]


@dataclass(frozen=True, eq=False)
class Whole:
    """A function that is taken as one step and not as the operations that torch makes of it.

    Attributes:
        arguments: puts the arguments of a call in order.
        reads: the arguments that the result is a function of, under the rules.
    """

    handler: Handler
    arguments: Callable[..., Arguments]
    reads: Callable[[Rules, Arguments], Arguments]


@dataclass(frozen=True, eq=False)
class Kind:
    """What the table says of one operation.

    Attributes:
        is_frozen: whether the result is a coefficient under the rules, and no longer a value to be followed.
    """

    func: Any  # kept, so that its id is never another operation's
    handler: Handler
    is_mutable: bool
    is_frozen: Callable[[Rules], bool]


_HANDLERS: dict[Any, Handler] = {}
_FROZEN: dict[Any, Callable[[Rules], bool]] = {}
_KINDS: dict[int, Kind] = {}
WHOLE: dict[Any, Whole] = {}


def handles(*packets: Any, frozen: Callable[[Rules], bool] = lambda rules: False) -> Callable[[Handler], Handler]:
    """Enter a handler into the table for these operations of `torch.ops.aten`."""

    def register(handler: Handler) -> Handler:
        for packet in packets:
            _HANDLERS[packet] = handler
            _FROZEN[packet] = frozen
        return handler

    return register


def always_frozen(*packets: Any) -> None:
    """The results of these operations of `torch.ops.aten` are coefficients, whatever the rules."""
    _FROZEN.update(dict.fromkeys(packets, lambda rules: True))


def handles_whole(
    function: Any,
    arguments: Callable[..., Arguments],
    reads: Callable[[Rules, Arguments], Arguments] = lambda rules, arguments: arguments,
) -> Callable[[Handler], Handler]:
    """Enter a handler into the table for a function of torch that is to be one step."""

    def register(handler: Handler) -> Handler:
        WHOLE[function] = Whole(handler, arguments, reads)
        return handler

    return register


def kind_of(func: Any) -> Kind:
    """What the table says of an operation. Found by identity: torch hashes operations in Python, which is slow."""
    kind = _KINDS.get(id(func))
    if kind is None:
        packet = func.overloadpacket
        handler, frozen = _HANDLERS.get(packet, unknown), _FROZEN.get(packet, lambda rules: False)
        kind = _KINDS[id(func)] = Kind(func, handler, func._schema.is_mutable, frozen)
    return kind


def handler_of(packet: Any) -> Handler | None:
    return _HANDLERS.get(packet)


def unknown(rec: Recorder, func: Any, args: Arguments, kwargs: dict[str, Any], out: Any) -> None:
    """No rule: everything that comes out is poisoned, and the operation is named."""
    name = getattr(func, "overloadpacket", None) or func.__name__
    for value in out if isinstance(out, (tuple, list)) else [out]:
        if isinstance(value, Tensor) and value.is_floating_point():
            rec.refuse(value, f"there is no rule for the operation {name}")
