"""Sums and products: where values meet weights, and one another."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rag_explain.linear.handlers.pointwise import apply, as_number, combine
from rag_explain.linear.operations import Linear, MixLeft, MixRight, Reduce, Scale, Sum
from rag_explain.linear.recorder import Node, Recorder
from rag_explain.linear.registry import Unfollowable, handles

aten = torch.ops.aten


@handles(aten.mm, aten.bmm)
def mm(rec: Recorder, out: Tensor, self: Tensor, mat2: Tensor) -> None:
    matrices(rec, out, self, mat2)


@handles(aten.addmm)
def addmm(
    rec: Recorder, out: Tensor, self: Tensor, mat1: Tensor, mat2: Tensor, beta: float = 1, alpha: float = 1
) -> None:
    if rec.find(self) or alpha != 1:
        raise Unfollowable
    matrices(rec, out, mat1, mat2, self if beta == 1 else self * beta)


@handles(aten.baddbmm)
def baddbmm(
    rec: Recorder, out: Tensor, self: Tensor, batch1: Tensor, batch2: Tensor, beta: float = 1, alpha: float = 1
) -> None:
    addmm(rec, out, self, batch1, batch2, beta, alpha)


@handles(aten.linear)
def linear(rec: Recorder, out: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """A dense layer: x (..., k) -> x @ weight^T (k, o) + bias."""
    if weight.ndim != 2 or rec.find(weight) or rec.find(bias):
        raise Unfollowable
    rec.emit_unary(input, out, Linear, weight=weight.t(), constant=bias)


def matrices(rec: Recorder, out: Tensor, left: Tensor, right: Tensor, constant: Tensor | None = None) -> None:
    """out = left @ right + constant, of two axes each, or of three."""
    a, b = rec.find(left), rec.find(right)
    if a and b:
        _two_matrices(rec, out, a, b, constant)
    elif a and left.ndim == 2:
        rec.emit_unary(left, out, Linear, weight=right, constant=constant)
    elif a:
        rec.emit_unary(left, out, MixRight, matrix=right, constant=constant)
    elif left.ndim == 3:
        rec.emit_unary(right, out, MixLeft, matrix=left, constant=constant)
    else:
        raise Unfollowable


def _two_matrices(rec: Recorder, out: Tensor, a: Node, b: Node, constant: Tensor | None) -> None:
    """A product of two values that both depend on the tokens, such as attention scores."""
    if rec.rules.matrices == "refused" or a.tensor.ndim != 3:
        raise Unfollowable("there is no rule for a product of two matrices that both depend on the tokens")
    left, right = rec.require(a), rec.require(b)
    share = 0.5 if rec.rules.matrices == "half" else 1.0
    first = rec.emit(MixRight, left, like=out, matrix=b.tensor * share)
    second = rec.emit(MixLeft, right, like=out, matrix=a.tensor * share)
    shapes = (tuple(out.shape),) * 2
    slot = rec.emit(Sum, first, second, like=out, in_shapes=shapes, signs=(1.0, 1.0), constant=constant)
    rec.bind(Node(out, slot))


@handles(aten.add, aten.sub, aten.rsub)
def add(rec: Recorder, out: Tensor, self: Any, other: Any, alpha: float = 1) -> None:
    """self + alpha * other, self - alpha * other, or other - alpha * self."""
    packet = rec.func.overloadpacket
    sign = float(alpha) if packet is aten.add else -float(alpha)
    left, right, signs = *((other, self) if packet is aten.rsub else (self, other)), (1.0, sign)
    if not combine(rec, left, right, out, lambda x, y: x + y * sign, f"({{}}{sign:+g}*{{}})", signs):
        _sum(rec, out, [left, right], signs)


def _sum(rec: Recorder, out: Tensor, terms: list[Any], signs: tuple[float, ...]) -> None:
    slots, nodes, kept, constant = [], [], [], None
    for term, sign in zip(terms, signs, strict=True):
        node = rec.find(term)
        if node is None:
            value = torch.as_tensor(term, dtype=out.dtype, device=out.device) * sign
            # A mask's "minus infinity" only hides positions from a softmax: as a constant it is nothing.
            value = value.masked_fill(value <= torch.finfo(out.dtype).min, 0.0)
            constant = value if constant is None else constant + value
            continue
        slot = rec.resolve(node)
        if slot is None:
            raise Unfollowable(node.poison, is_statistic=node.is_statistic)
        slots.append(slot)
        nodes.append(node)
        kept.append(sign)
    shapes = tuple(tuple(node.tensor.shape) for node in nodes)
    slot = rec.emit(Sum, *slots, like=out, in_shapes=shapes, signs=tuple(kept), constant=constant)
    rec.bind(Node(out, slot, is_statistic=all(node.is_statistic for node in nodes)))


@handles(aten.sum, aten.mean)
def reduce(rec: Recorder, out: Tensor, self: Tensor, dim: Sequence[int] | None = None, **_: Any) -> None:
    dims = tuple(sorted(d % self.ndim for d in (dim or range(self.ndim))))
    is_mean = rec.func.overloadpacket is aten.mean
    factor = 1.0 / math.prod(self.shape[d] for d in dims) if is_mean else 1.0
    rec.emit_unary(self, out, Reduce, in_shape=tuple(self.shape), dims=dims, factor=factor)
    # A mean of squares is the way to a norm's denominator.
    rec.nodes[out].is_statistic |= rec.nodes[self].is_curved


@handles(aten.where)
def where(rec: Recorder, out: Any, condition: Tensor, self: Any = None, other: Any = None) -> None:
    if self is None:  # the positions of what is true
        raise Unfollowable
    terms = []
    for branch, chosen in ((self, condition), (other, ~condition)):
        if rec.find(branch):
            weight = chosen.to(out.dtype)
            part = branch * weight
            rec.emit_unary(branch, part, Scale, in_shape=tuple(branch.shape), factor=weight)
            terms.append(part)
        else:
            terms.append(torch.where(chosen, torch.as_tensor(branch, dtype=out.dtype), out.new_zeros(())))
    _sum(rec, out, terms, (1.0, 1.0))


@handles(aten.mul)
def mul(rec: Recorder, out: Tensor, self: Any, other: Any) -> None:
    if combine(rec, self, other, out, lambda x, y: x * y, "({}*{})", None):
        return
    a, b = rec.find(self), rec.find(other)
    if a and b:
        _two_values(rec, out, a, b)
    else:
        source, factor = (self, other) if a else (other, self)
        rec.emit_unary(source, out, Scale, in_shape=tuple(source.shape), factor=factor)


@handles(aten.div)
def div(rec: Recorder, out: Tensor, self: Any, other: Any, rounding_mode: str | None = None) -> None:
    if rounding_mode is not None:
        raise Unfollowable
    a, b = rec.find(self), rec.find(other)
    if b is None:
        number = as_number(other)
        mul(rec, out, self, 1 / other if number is None else 1 / number)
        return
    inverse = other.reciprocal()
    apply(rec, b, inverse, torch.reciprocal, "1/{}", None)
    if a is None:
        mul(rec, out, self, inverse)
    else:
        _two_values(rec, out, a, rec.nodes[inverse])


def _two_values(rec: Recorder, out: Tensor, a: Node, b: Node) -> None:
    """x * y, both depending on the tokens: a norm and its denominator, or a gate and its signal."""
    slots = []
    for node, other, share in zip((a, b), (b, a), _shares(rec, a, b), strict=True):
        if share:
            factor = other.tensor if share == 1 else other.tensor * share
            shape = tuple(node.tensor.shape)
            slots.append(rec.emit(Scale, rec.require(node), like=out, in_shape=shape, factor=factor))
    if len(slots) == 2:
        slots = [rec.emit(Sum, *slots, like=out, in_shapes=(tuple(out.shape),) * 2, signs=(1.0, 1.0))]
    rec.bind(Node(out, slots[0], is_statistic=a.is_statistic and b.is_statistic))


def _shares(rec: Recorder, a: Node, b: Node) -> tuple[float, float]:
    """How much of x * y goes to x and to y."""
    if rec.rules.gate == "product":
        return 1.0, 1.0
    if a.is_statistic != b.is_statistic:
        return (0.0, 1.0) if a.is_statistic else (1.0, 0.0)
    if a.poison or b.poison:
        raise Unfollowable(a.poison or b.poison)
    if rec.rules.gate == "signal" and a.is_curved != b.is_curved:
        return (0.0, 1.0) if a.is_curved else (1.0, 0.0)
    return 0.5, 0.5
