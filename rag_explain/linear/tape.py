"""What a forward pass does to one hidden state, written down while it runs, unchanged.

Every tensor operation that touches a value depending on the marked hidden state becomes a `Step`; nothing is worked out
yet, so the pass is little slower than without a tape, and its results are the same to the last bit. The modes used here
are thread-local in torch: nothing is patched, no class is changed, another thread's `model.encode` does not notice, and
leaving the `with` leaves nothing behind, whether by return or by exception.

A tape runs in torch's inference mode, as `encode` does. Without autograd above it, the tape sees a dense layer or an
attention as one operation, and takes apart only those that the table does not know whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rag_explain.errors import UnsupportedOperation
from rag_explain.linear.registry import Arguments, Handler, entry_of, info_of, unknown
from rag_explain.linear.rules import Rules


@dataclass(eq=False, slots=True)
class Step:
    """One operation: out = func(*args, **kwargs), which depends on the hidden state through `reads`."""

    handler: Handler
    func: Any
    args: Arguments
    kwargs: dict[str, Any]
    out: Any
    reads: Sequence[Tensor]
    where: str  # the module that was running, for error messages


class Tape:
    """Records the steps of a forward pass that depend on a hidden state.

    Args:
        rules: decide what is a coefficient and need not be followed.
        known: values that are followed from the start, by `id`.
    """

    def __init__(self, rules: Rules, known: Iterable[int] = (), where: str = "") -> None:
        self.rules = rules
        self.where = where
        self.steps: list[Step] = []
        self.marked: Tensor | None = None
        # By id: steps keep their tensors alive, so that an id is never used twice.
        self._known = set(known)
        self._modes: list[Any] = []

    def __enter__(self) -> Tape:
        # Not only once the hidden state is marked: that happens inside the model's own contexts, and an inference mode
        # that ends after it would take this mode along.
        self._modes = [torch.inference_mode(), _Operations(self)]
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._modes:
            self._modes.pop().__exit__(kind, error, trace)

    def mark(self, hidden: Tensor) -> None:
        """Everything that depends on `hidden` is written down from here on."""
        self.marked = hidden
        self._known.add(id(hidden))

    def followed(self, arguments: Iterable[Any]) -> list[Tensor]:
        """Those arguments of an operation that are followed; lists of tensors are looked into."""
        known = self._known
        found = []
        if known:  # nothing before the hidden state was marked
            for value in arguments:
                if id(value) in known:
                    found.append(value)
                elif isinstance(value, (list, tuple)):
                    found += self.followed(value)
        return found

    def write(self, step: Step) -> None:
        self.steps.append(step)
        if isinstance(step.out, Tensor):  # nearly always, and this is the inner loop of recording
            self._known.add(id(step.out))
        else:
            self._known.update(map(id, values((step.out,))))

    def needed(self, output: Tensor) -> list[Step]:
        """The steps that `output` depends on: under frozen attention, queries and keys fall away here."""
        wanted = {id(output)}
        kept = []
        for step in reversed(self.steps):
            out = step.out
            if id(out) in wanted or (
                not isinstance(out, Tensor) and any(id(value) in wanted for value in values((out,)))
            ):
                kept.append(step)
                wanted.update(map(id, step.reads))
        return kept[::-1]

    def overwrite(self, func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
        """`x.op_(...)` is `x = x.op(...)`, unless other values share x's memory: then no telling what changed."""
        target = args[0]
        name = str(func.overloadpacket).removeprefix("aten.")
        plain = getattr(torch.ops.aten, name.removesuffix("_"), None)
        entry, same = entry_of(plain), getattr(plain, func._overloadname, None)
        known = isinstance(target, Tensor) and id(target) in self._known and name.endswith("_")
        if not known or entry is None or same is None or self._shares(target, (*args[1:], *kwargs.values())):
            raise _unfollowed(func)
        before = target.clone()
        self._known.add(id(before))
        self.marked = before if self.marked is target else self.marked
        self._swap(target, before)
        func(*args, **kwargs)
        args, kwargs = _swapped(args, target, before), _swapped(kwargs, target, before)
        reads = self.followed((*args, *kwargs.values()))
        self.write(Step(entry.handler, same, args, kwargs, target, reads, self.where))
        return target

    def keep(self, func: Any, args: Arguments, kwargs: dict[str, Any]) -> None:
        """A constant is about to be overwritten: the steps that were taken keep it as it was."""
        specs = func._schema.arguments
        given = (*args, *(kwargs.get(spec.name) for spec in specs[len(args) :]))
        is_written = [spec.alias_info is not None and spec.alias_info.is_write for spec in specs]
        written = values(value for value, is_it in zip(given, is_written, strict=True) if is_it)
        places = {_memory(value) for value in written}
        for value in {id(value): value for value in self._values() if _memory(value) in places}.values():
            if id(value) in self._known:
                raise _unfollowed(func)
            self._swap(value, value.clone())

    def _shares(self, target: Tensor, arguments: Arguments) -> bool:
        """Whether another value, of a step or among the arguments, lies in the target's memory."""
        others = (*self._values(), *values(arguments))
        return any(value is not target and _memory(value) == _memory(target) for value in others)

    def _values(self) -> Iterator[Tensor]:
        for step in self.steps:
            yield from values((step.args, step.kwargs.values(), step.out))

    def _swap(self, old: Tensor, new: Tensor) -> None:
        for step in self.steps:
            step.args, step.reads, step.out, step.kwargs = (
                _swapped(part, old, new) for part in (step.args, step.reads, step.out, step.kwargs)
            )


class _Operations(TorchDispatchMode):
    """Sees every tensor operation of this thread."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the twin is never compiled, and torch's guard costs as much as looking an operation up

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self.tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tape = self.tape
        kwargs = kwargs or {}
        reads = tape.followed((*args, *kwargs.values()) if kwargs else args)
        if not reads:
            if tape.steps and info_of(func).is_mutable:
                tape.keep(func, args, kwargs)
            return func(*args, **kwargs)
        kind = info_of(func)
        if kind.inside is not None:
            func, args = kind.inside(*args, **kwargs)
            return self.__torch_dispatch__(func, types, args)[0]
        if kind.is_composite and (kind.entry is None or kind.is_mutable):
            with self:
                return func.decompose(*args, **kwargs)
        if kind.is_mutable:
            return tape.overwrite(func, args, kwargs)
        out = func(*args, **kwargs)
        if any(out is value for value in args):  # nothing to convert, to copy or to drop out
            return out
        entry = kind.entry
        if entry is None:
            tape.write(Step(unknown, func, args, kwargs, out, reads, tape.where))
        elif not entry.is_frozen(tape.rules):
            if entry.reads is not None:
                reads = tape.followed(entry.reads(tape.rules, args))
                if not reads:
                    return out
            tape.write(Step(entry.handler, func, args, kwargs, out, reads, tape.where))
        return out


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


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
