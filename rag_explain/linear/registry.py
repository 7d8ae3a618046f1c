"""What is known of torch's operations: which handler says what becomes of a tangent, and what torch says of them.

A handler is called as `handler(recorder, out, **arguments)`, the arguments by the names of torch's own schema, defaults
included, so that it reads like torch's documentation. It writes down what the result `out` is: linear operations on the
arguments that depend on the hidden state, a function of one of them, a constant (nothing), or it raises `Unfollowable`.
Handlers are in `handlers`; this module is apart from them because the tape needs it and they need the recorder.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rag_explain import _torch
from rag_explain._torch import Arguments
from rag_explain.linear.rules import Rules

Handler = Callable[..., None]
Frozen = Callable[[Rules], bool]
Reads = Callable[[Rules], tuple[str, ...]]


@dataclass(frozen=True)
class Poison:
    """Why a value cannot be followed, and the module in which that began."""

    reason: str
    where: str

    def __str__(self) -> str:
        return f"{self.reason} in {self.where}" if self.where else self.reason


class Unfollowable(Exception):
    """A handler cannot say what the result of its operation is. An error only if the embedding needs the result.

    Args:
        reason: a poison that comes from an argument, or a sentence; without one the operation has no rule.
        is_statistic: whether the result is a norm's denominator, which may be frozen unseen.
    """

    def __init__(self, reason: Poison | str | None = None, *, is_statistic: bool = False) -> None:
        self.reason = reason
        self.is_statistic = is_statistic


@dataclass(frozen=True, eq=False)
class Registered:
    """A handler, and when it is not needed."""

    handler: Handler
    is_frozen: Frozen  # whether the result is a coefficient under the rules, and no longer a value to be followed
    reads: Reads | None = None  # the arguments that the result is a function of under the rules; None for all of them


@dataclass(frozen=True, eq=False)
class OpInfo:
    """One overload of an operation."""

    func: Any  # kept, so that its id is never another operation's
    registered: Registered | None  # None where there is no handler
    first_of: Any  # the operation of which this one hands out the first result, with the same arguments; None for most
    is_mutable: bool
    is_composite: bool  # made of other operations, into which it can be taken apart
    names: tuple[str, ...]  # of its arguments, in order
    defaults: dict[str, Any]  # of those arguments that have one, by name

    def bind(self, args: Arguments, kwargs: dict[str, Any]) -> dict[str, Any]:
        """All arguments of a call by name, those left out with their defaults."""
        return {**self.defaults, **dict(zip(self.names, args, strict=False)), **kwargs}

    @property
    def handler(self) -> Handler:
        return no_rule if self.registered is None else self.registered.handler


_HANDLERS: dict[Any, Registered] = {}
_FIRST_OF: dict[Any, Any] = {}
_INFOS: dict[int, OpInfo] = {}


def handles(
    *packets: Any, frozen: Frozen = lambda rules: False, reads: Reads | None = None
) -> Callable[[Handler], Handler]:
    """Register a handler for these operations of `torch.ops.aten`."""

    def register(handler: Handler) -> Handler:
        _HANDLERS.update(dict.fromkeys(packets, Registered(handler, frozen, reads)))
        return handler

    return register


def is_first_of(packet: Any, func: Any) -> None:
    """`packet` hands out the first result of `func`: that one is recorded, which saves taking the other apart."""
    _FIRST_OF[packet] = func


def always_frozen(*packets: Any) -> None:
    """The results of these operations of `torch.ops.aten` are coefficients, whatever the rules."""
    handles(*packets, frozen=lambda rules: True)(no_rule)


def registered() -> dict[Any, Registered]:
    """Every operation with a handler: `torch.ops.aten` packet by packet."""
    return dict(_HANDLERS)


def info_of(func: Any) -> OpInfo:
    """What is known of an operation. Found by identity: torch hashes operations in Python, which is slow."""
    info = _INFOS.get(id(func))
    if info is None:
        packet, parameters = func.overloadpacket, _torch.parameters(func)
        info = _INFOS[id(func)] = OpInfo(
            func,
            _HANDLERS.get(packet),
            _FIRST_OF.get(packet),
            is_mutable=_torch.is_mutable(func),
            is_composite=_torch.is_composite(func),
            names=tuple(one.name for one in parameters),
            defaults={one.name: one.default_value for one in parameters if one.has_default_value()},
        )
    return info


def no_rule(recorder: object, out: object, **arguments: object) -> None:
    """The handler of operations that have none."""
    raise Unfollowable
