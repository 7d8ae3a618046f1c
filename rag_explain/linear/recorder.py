"""From a recorded forward pass to a frozen affine map, by what each operation is and not by which architecture.

The encoder's own forward pass runs once, unchanged, on a tape. Then each step that the embedding depends on is looked
up in the registry and written down as linear operations with frozen coefficients.

An operation without a rule poisons the values that come out of it. Poison is harmless where it is not used and an error
that names the operation where the embedding needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rag_explain.devices import is_full
from rag_explain.errors import UnsupportedOperation, first_line
from rag_explain.linear.affine_map import AffineMap
from rag_explain.linear.identity import IdentityMap
from rag_explain.linear.operations import Operation, Scale
from rag_explain.linear.registry import Poison, Unfollowable
from rag_explain.linear.rules import Rules
from rag_explain.linear.tape import Step, Tape, values

Function = Callable[[Tensor], Tensor]


@dataclass(eq=False)
class Pointwise:
    """A value that is an elementwise function of one other value: an activation, or a step on the way to one.

    Activations are recognised by this and not by their module: GELU written out with tanh, pow and mul is one function
    of its input, while a tanh on its own is another.
    """

    base: Node
    function: Function
    key: str  # names the function, so that its value and slope at zero are found once
    slope: float | None = None  # set when the function is slope * x + offset
    offset: float = 0.0

    @property
    def is_affine(self) -> bool:
        return self.slope is not None


@dataclass(eq=False)
class Node:
    """A value of the forward pass that depends on the marked hidden state: one of slot, pointwise and poison is set."""

    tensor: Tensor
    slot: int | None = None
    pointwise: Pointwise | None = None
    poison: Poison | None = None
    # A norm's denominator, or something on the way to it: it may only multiply, and is then frozen.
    is_statistic: bool = False

    def as_function(self) -> Pointwise:
        """This value as a function of its base; of itself, when it came out of a linear operation."""
        return self.pointwise or Pointwise(self, lambda x: x, "x", slope=1.0)

    @property
    def is_curved(self) -> bool:
        """Whether the value came out of an activation."""
        return self.pointwise is not None and not self.pointwise.is_affine


class Recorder(Tape):
    """A tape of what a forward pass does to one hidden state, and what each of its steps is as linear operations.

    with Recorder(LRP) as recorder:
        ...                         # the forward pass; calls recorder.mark(hidden) when it comes by
    frozen = recorder.freeze(embedding)
    """

    func: Any  # the operation that is being read, for handlers of several

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        self.nodes: IdentityMap[Node] = IdentityMap()
        self.operations: list[Operation] = []
        self._slots = 0

    def freeze(self, embedding: Tensor, **options: bool) -> AffineMap:
        """The affine map from the marked hidden state to `embedding` (D, e); options are those of `AffineMap`."""
        hidden, source = self.marked, self._new_slot()
        if hidden is not None:
            self.bind(Node(hidden, source))
            self._read(self.needed(embedding))
        node = self.find(embedding)
        if hidden is None or node is None:
            raise UnsupportedOperation("the embedding does not depend on the tokens in a way that could be followed")
        output = self.resolve(node)
        if output is None:
            raise UnsupportedOperation(f"this encoder cannot be explained exactly: {node.poison}")
        return AffineMap(self.operations, source, output, hidden, embedding, **options)

    def freeze_halves(self, middle: Tensor, output: Tensor, **options: bool) -> tuple[AffineMap, AffineMap]:
        """The affine maps from the marked hidden state to `middle` (D, n, h), and from there to `output` (D, e)."""
        upper = Recorder(self.rules)
        upper.marked = middle
        made = next(index for index, step in enumerate(self.steps) if step.out is middle)
        upper.steps = self.steps[made + 1 :]
        return self.freeze(middle, **options), upper.freeze(output, **options)

    def _read(self, steps: Sequence[Step]) -> None:
        for step in steps:
            if not any(value in self.nodes for value in step.reads):  # a norm's statistics, say, have no node
                continue
            self.func, self.where = step.info.func, step.where
            try:
                step.info.handler(self, step.out, **step.info.bind(step.args, step.kwargs))
            except Unfollowable as error:
                reason = error.reason or _no_rule(str(step.info.func.overloadpacket))
                for value in filter(Tensor.is_floating_point, values((step.out,))):
                    self.refuse(value, reason, is_statistic=error.is_statistic)
            except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:  # not as torch has it
                if is_full(error):
                    raise
                what = f"the operation {step.info.func.overloadpacket} in {step.where} could not be followed"
                raise UnsupportedOperation(f"{what} ({first_line(error)})") from error

    def find(self, value: object) -> Node | None:
        """The node of a tensor that depends on the marked hidden state; None for constants."""
        return self.nodes.get(value)

    def bind(self, node: Node) -> None:
        """From now on the node's tensor is what a slot holds, or a function of another value, or cannot be followed."""
        self.nodes[node.tensor] = node

    def emit(self, kind: type[Operation], *inputs: int, like: Tensor, **settings: Any) -> int:
        """Write down one linear operation whose output has the shape of `like`; returns its slot."""
        slot = self._new_slot()
        self.operations.append(kind(inputs=inputs, output=slot, shape=tuple(like.shape), **settings))
        return slot

    def emit_unary(self, source: Tensor, out: Tensor, kind: type[Operation], **settings: Any) -> None:
        """`out` is one linear operation on `source`."""
        node = self.nodes[source]
        source_slot = self.resolve(node)
        slot = None if source_slot is None else self.emit(kind, source_slot, like=out, **settings)
        self.bind(Node(out, slot, poison=node.poison, is_statistic=node.is_statistic))

    def follow(self, function: Callable[[], Tensor]) -> Tensor:
        """Run `function` and write down what it does to values that depend on the hidden state."""
        with Tape(self.rules, self.nodes, self.where) as tape:
            out = function()
        self._read(tape.needed(out))
        return out

    def alias(self, tensor: Tensor, same: Tensor) -> None:
        """`tensor` is what `same` is: a copy of it, perhaps in another precision, or the same found another way."""
        node = self.find(same)
        if node is not None:
            self.bind(replace(node, tensor=tensor))

    def refuse(self, tensor: Tensor, reason: Poison | str, *, is_statistic: bool = False) -> None:
        """`tensor` cannot be followed; an error only if the embedding needs it."""
        poison = Poison(reason, self.where) if isinstance(reason, str) else reason
        self.bind(Node(tensor, poison=poison, is_statistic=is_statistic))

    def resolve(self, node: Node) -> int | None:
        """The slot that holds this value's tangent; None when the value is poisoned."""
        if node.slot is None and node.poison is None and node.pointwise is not None:
            self._settle(node, node.pointwise)
        return node.slot

    def require(self, node: Node) -> int:
        """The slot that holds this value's tangent; a poisoned value makes the whole operation unfollowable."""
        slot = self.resolve(node)
        if slot is None:
            raise Unfollowable(node.poison)
        return slot

    def _new_slot(self) -> int:
        self._slots += 1
        return self._slots - 1

    def _settle(self, node: Node, function: Pointwise) -> None:
        """Turn a function of a base into a linear operation on the base: x -> x * f(x)/x, the ratio frozen."""
        base = self.resolve(function.base)
        if base is None:
            node.poison = function.base.poison
            return
        value, source, constant = node.tensor, function.base.tensor, None
        if function.slope is not None:
            factor = value.new_tensor(function.slope)
            constant = value.new_tensor(function.offset) if function.offset else None
        else:
            at_zero, slope = _at_zero(function.key, function.function)
            if not abs(at_zero) < 1e-12:
                reason = f"the activation {function.key} is {at_zero:.3g} at zero, so it is no multiple of its input"
                node.poison = Poison(reason, self.where)
                return
            # f(x) / x, which is f'(0) where x is zero. What else gives no number gives the embedding none either.
            factor = (value / source).nan_to_num_(nan=slope, posinf=slope, neginf=slope)
        shape = tuple(source.shape)
        node.slot = self.emit(Scale, base, like=value, in_shape=shape, factor=factor, constant=constant)


def _no_rule(operation: str) -> str:
    reason = f"there is no rule for the operation {operation}"
    return reason if operation.startswith("aten.") else f"{reason}: load the model without quantisation, if it has any"


_AT_ZERO: dict[str, tuple[float, float]] = {}
_REMEMBERED = 1000  # functions; a key may hold numbers that a text decided


def _at_zero(key: str, function: Function) -> tuple[float, float]:
    """An activation's value and slope at zero."""
    known = _AT_ZERO.get(key)
    if known is None:
        zero = torch.zeros((), dtype=torch.float64)
        known = float(function(zero)), float(derivative(function, zero))
        if len(_AT_ZERO) < _REMEMBERED:
            _AT_ZERO[key] = known
    return known


def derivative(function: Function, at: Tensor) -> Tensor:
    """f'(x) of an elementwise function."""
    with torch.enable_grad():
        x = at.detach().clone().requires_grad_()
        (slope,) = torch.autograd.grad(function(x).sum(), x)
    return slope
