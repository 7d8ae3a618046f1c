"""Elementwise functions of one value: activations, and the steps on the way to one."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rag_explain.linear.operations import Scale
from rag_explain.linear.recorder import Node, Pointwise, Recorder, derivative
from rag_explain.linear.registry import Unfollowable, handles

aten = torch.ops.aten


@handles(
    aten.gelu, aten.relu, aten.silu, aten.tanh, aten.sigmoid, aten.erf, aten.exp, aten.pow, aten.sqrt, aten.rsqrt,
    aten.reciprocal, aten.abs, aten.neg, aten.hardtanh, aten.hardswish, aten.hardsigmoid, aten.leaky_relu, aten.elu,
    aten.mish, aten.softplus, aten.clamp, aten.clamp_min, aten.clamp_max, aten.log, aten.log1p, aten.expm1, aten.sin,
    aten.cos, aten.square,
)  # fmt: skip
def pointwise(rec: Recorder, out: Tensor, self: Tensor, **scalars: Any) -> None:
    func, node = rec.func, rec.find(self)
    if func is aten.clamp.Tensor and not any(rec.find(bound) for bound in scalars.values()):
        func = aten.clamp.default  # a bound without axes is a number
        scalars = {name: bound if bound is None else as_number(bound) for name, bound in scalars.items()}
    if node is None or any(isinstance(value, Tensor) for value in scalars.values()):
        raise Unfollowable
    name = str(func.overloadpacket).removeprefix("aten.")
    key = "".join(f",{value}" for value in scalars.values())
    slope = -1.0 if func.overloadpacket is aten.neg else None
    apply(rec, node, out, lambda x: func(x, **scalars), f"{name}({{}}{key})", slope)


@handles(aten.log_sigmoid_forward)
def log_sigmoid(rec: Recorder, out: tuple[Tensor, Tensor], self: Tensor) -> None:
    apply(rec, rec.nodes[self], out[0], torch.nn.functional.logsigmoid, "log_sigmoid({})", None)


def apply(
    rec: Recorder,
    node: Node,
    out: Tensor,
    step: Callable[[Tensor], Tensor],
    key: str,
    slope: float | None,
    offset: float = 0.0,
) -> None:
    """`out` is `step` of `node`, element by element; `slope` and `offset` say so when the step is affine."""
    if node.poison:
        rec.refuse(out, node.poison, is_statistic=node.is_statistic)
        return
    if rec.rules.activation == "derivative":
        source = node.tensor
        factor = derivative(step, source) if slope is None else out.new_full((), slope)
        scale = rec.emit(Scale, rec.require(node), like=out, in_shape=tuple(source.shape), factor=factor)
        rec.bind(Node(out, scale))
        return
    inner = node.as_function()
    before = inner.function
    function = Pointwise(inner.base, lambda x: step(before(x)), key.format(inner.key))
    if slope is not None and inner.slope is not None:
        function.slope, function.offset = slope * inner.slope, slope * inner.offset + offset
    rec.bind(Node(out, pointwise=function, is_statistic=node.is_statistic))


def combine(
    rec: Recorder,
    left: Any,
    right: Any,
    out: Tensor,
    step: Callable[[Tensor, Tensor], Tensor],
    key: str,
    signs: tuple[float, float] | None,
) -> bool:
    """Whether `out` is a function of one value: of a number and a value, or of two functions of the same value.

    `signs` are the weights of a sum; None for a product.
    """
    a, b = rec.find(left), rec.find(right)
    if a and b:
        return _combine_functions(rec, a, b, out, step, key, is_sum=signs is not None)
    node, number = (a, as_number(right)) if a else (b, as_number(left))
    if node is None or number is None:
        return False
    if signs is None:
        slope, offset = number, 0.0
    else:
        slope, offset = (signs[0], signs[1] * number) if a else (signs[1], signs[0] * number)
    text = key.format("{}", number) if a else key.format(number, "{}")
    apply(rec, node, out, lambda x: x * slope + offset, text, slope, offset)
    return True


def _combine_functions(
    rec: Recorder, a: Node, b: Node, out: Tensor, step: Callable[[Tensor, Tensor], Tensor], key: str, *, is_sum: bool
) -> bool:
    if rec.rules.activation == "derivative" or a.poison or b.poison:
        return False
    if a.pointwise is None and b.pointwise is None and a is not b:  # a residual, nearly always
        return False
    f, g = a.as_function(), b.as_function()
    if f.base is not g.base or (is_sum and f.is_affine and g.is_affine):
        return False
    function = Pointwise(f.base, lambda x: step(f.function(x), g.function(x)), key.format(f.key, g.key))
    rec.bind(Node(out, pointwise=function, is_statistic=a.is_statistic))
    return True


def as_number(value: Any) -> float | None:
    """A Python number or a tensor without axes as a float; None for anything else."""
    if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.ndim == 0):
        return float(value)
    return None
