"""What a forward pass does to one hidden state, written down while it runs, unchanged.

Every tensor operation that touches a value depending on the marked hidden state becomes a `Step`; nothing is worked out
yet, so the pass is little slower than without a tape, and its results are the same to the last bit. The modes used here
are thread-local in torch: nothing is patched, no class is changed, another thread's `model.encode` does not notice, and
leaving the `with` leaves nothing behind, whether by return or by exception.

A tape runs in torch's inference mode, as `encode` does. Without autograd above it, the tape sees a dense layer or an
attention as one operation, and takes apart only those that the registry does not know whole.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from rag_explain import _torch
from rag_explain._torch import Arguments
from rag_explain.errors import UnsupportedOperation
from rag_explain.linear.identity import IdentityMap, storage_of
from rag_explain.linear.registry import OpInfo, info_of
from rag_explain.linear.rules import Rules


@dataclass(eq=False, slots=True)
class Step:
    """One operation: out = func(*args, **kwargs), which depends on the hidden state through `reads`."""

    info: OpInfo
    args: Arguments
    kwargs: dict[str, Any]
    out: Any
    reads: Sequence[Tensor]
    where: str  # the module that was running, for error messages


class Tape:
    """Records the steps of a forward pass that depend on a hidden state.

    Args:
        rules: decide what is a coefficient and need not be followed.
        known: values that are followed from the start.
        where: the module that runs, for error messages.
    """

    def __init__(self, rules: Rules, known: Iterable[Tensor] = (), where: str = "") -> None:
        self.rules = rules
        self.where = where
        self.steps: list[Step] = []
        self.marked: Tensor | None = None
        self._known: IdentityMap[None] = IdentityMap()
        for tensor in known:
            self._known[tensor] = None
        self._modes = ExitStack()

    def __enter__(self) -> Self:
        # Not only once the hidden state is marked: that happens inside the model's own contexts, and an inference mode
        # that ends after it would take this mode along.
        self._modes.enter_context(torch.inference_mode())
        self._modes.enter_context(_Operations(self))
        return self

    def __exit__(self, *error: object) -> None:
        self._modes.close()

    def mark(self, hidden: Tensor) -> None:
        """Everything that depends on `hidden` (D, n, h) is written down from here on."""
        self.marked = hidden
        self._known[hidden] = None

    def enter(self, module: str) -> None:
        """This module runs now: for error messages."""
        self.where = module

    def followed(self, arguments: Iterable[Any]) -> list[Tensor]:
        """Those arguments of an operation that are followed; lists of tensors are looked into."""
        known = self._known
        found = []
        for value in arguments:
            if isinstance(value, Tensor):
                if value in known:
                    found.append(value)
            elif isinstance(value, (list, tuple)):
                found += self.followed(value)
        return found

    def needed(self, output: Tensor) -> list[Step]:
        """The steps that `output` depends on: under frozen attention, queries and keys fall away here."""
        wanted = {id(output)}  # of tensors that the steps keep alive
        kept = []
        for step in reversed(self.steps):
            if any(id(value) in wanted for value in values((step.out,))):
                kept.append(step)
                wanted.update(map(id, step.reads))
        return kept[::-1]

    def record(self, info: OpInfo, args: Arguments, kwargs: dict[str, Any], reads: Sequence[Tensor]) -> Any:
        """Run an operation that reads followed values, and write it down unless its result is a coefficient."""
        out = info.func(*args, **kwargs)
        if any(out is value for value in args):  # nothing to convert, to copy or to drop out
            return out
        registered = info.registered
        if registered is not None:
            if registered.is_frozen(self.rules):
                return out
            if registered.reads is not None:
                given = info.bind(args, kwargs)
                reads = self.followed(given[name] for name in registered.reads(self.rules))
        if reads:
            self._write(Step(info, args, kwargs, out, reads, self.where))
        return out

    def overwrite(self, info: OpInfo, args: Arguments, kwargs: dict[str, Any]) -> Any:
        """`x.op_(...)` is `x = x.op(...)`. Refused where another value shares x's memory: that one changes too."""
        target, func = args[0], info.func
        name = str(func.overloadpacket).removeprefix("aten.")
        same = _torch.overload(getattr(torch.ops.aten, name.removesuffix("_"), None), func)
        is_known = isinstance(target, Tensor) and target in self._known and name.endswith("_")
        has_rule = same is not None and info_of(same).registered is not None
        if not is_known or not has_rule or self._shares(target, (*args[1:], *kwargs.values())):
            raise _unfollowed(func)
        before = target.clone()
        self._known[before] = None
        self.marked = before if self.marked is target else self.marked
        self._swap(target, before)
        func(*args, **kwargs)
        args, kwargs = _swapped(args, target, before), _swapped(kwargs, target, before)
        self._write(Step(info_of(same), args, kwargs, target, self.followed((*args, *kwargs.values())), self.where))
        return target

    def keep(self, info: OpInfo, args: Arguments, kwargs: dict[str, Any]) -> None:
        """A constant is about to be overwritten: the steps that were taken keep it as it was."""
        given = info.bind(args, kwargs)
        written = (given.get(one.name) for one in _torch.parameters(info.func) if _torch.is_written(one))
        places = {storage_of(value) for value in values(written)}
        changed = {id(value): value for value in self._values() if storage_of(value) in places}
        for value in changed.values():
            if value in self._known:
                raise _unfollowed(info.func)
            self._swap(value, value.clone())

    def _write(self, step: Step) -> None:
        self.steps.append(step)
        for value in values((step.out,)):
            self._known[value] = None

    def _shares(self, target: Tensor, arguments: Arguments) -> bool:
        """Whether another value, of a step or among the arguments, lies in the target's memory."""
        others = (*self._values(), *values(arguments))
        return any(value is not target and storage_of(value) == storage_of(target) for value in others)

    def _values(self) -> Iterator[Tensor]:
        for step in self.steps:
            yield from values((step.args, step.kwargs.values(), step.out))

    def _swap(self, old: Tensor, new: Tensor) -> None:
        for step in self.steps:
            for name in ("args", "kwargs", "out", "reads"):
                setattr(step, name, _swapped(getattr(step, name), old, new))


class _Operations(_torch.DispatchMode):
    """Shows every tensor operation of this thread to a tape."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tape, kwargs, info = self.tape, kwargs or {}, info_of(func)
        reads = tape.followed((*args, *kwargs.values()))
        if not reads:
            if info.is_mutable and tape.steps:
                tape.keep(info, args, kwargs)
            return func(*args, **kwargs)
        if info.first_of is not None:
            given = info.bind(args, kwargs)
            inner = tuple(given[name] for name in info_of(info.first_of).names)
            return self.__torch_dispatch__(info.first_of, types, inner)[0]
        if info.is_composite and (info.registered is None or info.is_mutable):
            with self:
                return _torch.decompose(func, args, kwargs)
        if info.is_mutable:
            return tape.overwrite(info, args, kwargs)
        return tape.record(info, args, kwargs, reads)


def values(arguments: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among the arguments or results of an operation; lists are looked into."""
    for value in arguments:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Iterable) and not isinstance(value, str):
            yield from values(value)


def _swapped(value: Any, old: Tensor, new: Tensor) -> Any:
    """`value` with one tensor in place of another, wherever it is in it."""
    if value is old:
        return new
    if isinstance(value, (list, tuple)):
        return type(value)(_swapped(item, old, new) for item in value)
    if isinstance(value, dict):
        return {key: _swapped(item, old, new) for key, item in value.items()}
    return value


def _unfollowed(func: Any) -> UnsupportedOperation:
    return UnsupportedOperation(
        f"the encoder writes into a tensor with {func.overloadpacket}, which cannot be followed: "
        "use an encoder implementation without in-place operations"
    )
