"""Every private name of torch that recording uses. A test notices when torch renames one."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Arguments = tuple[Any, ...]


class DispatchMode(TorchDispatchMode):
    """A mode that sees every tensor operation of this thread. torch.compile never meets one: recorded code is eager."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's guard against compiled code costs as much as looking an operation up


def parameters(func: Any) -> tuple[Any, ...]:
    """The formal arguments of an operation, in order: each has a name, and a default value where it is optional."""
    return tuple(func._schema.arguments)


def is_mutable(func: Any) -> bool:
    """Whether the operation writes into one of its arguments."""
    return bool(func._schema.is_mutable)


def is_written(parameter: Any) -> bool:
    """Whether an operation writes into this one of its formal arguments."""
    return parameter.alias_info is not None and bool(parameter.alias_info.is_write)


def overload(packet: Any, like: Any) -> Any:
    """The overload of `packet` that has the same name as the overload `like` of another packet; None without one."""
    return getattr(packet, like._overloadname, None)


def is_composite(func: Any) -> bool:
    """Whether the operation is made of other operations, into which `decompose` takes it apart."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def decompose(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Run the operations that a composite operation is made of, one by one."""
    return func.decompose(*args, **kwargs)
