"""Sums and products: where values meet weights, and one another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rag_explain.linear import operations as ops
from rag_explain.linear.handlers.pointwise import apply, as_number, combine
from rag_explain.linear.handlers.shapes import emit_unary
from rag_explain.linear.recorder import Node, Recorder
from rag_explain.linear.registry import Arguments, always_frozen, handles, unknown

aten = torch.ops.aten


@handles(aten.mm, aten.addmm, aten.bmm, aten.baddbmm)
def matrices(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    added = func.overloadpacket in (aten.addmm, aten.baddbmm)
    bias, left, right = args if added else (None, *args)
    if added and (rec.find(bias) or kwargs.get("alpha", 1) != 1):
        unknown(rec, func, args, kwargs, out)
        return
    beta = kwargs.get("beta", 1)
    constant = bias if bias is None or beta == 1 else bias * beta
    a, b = rec.find(left), rec.find(right)
    if a and b:
        _two_matrices(rec, a, b, out, constant)
    elif a:
        if left.ndim == 2:
            emit_unary(rec, left, out, ops.Linear, weight=right, constant=constant)
        else:
            emit_unary(rec, left, out, ops.MixRight, matrix=right, constant=constant)
    elif left.ndim == 3:
        emit_unary(rec, right, out, ops.MixLeft, matrix=left, constant=constant)
    else:
        unknown(rec, func, args, kwargs, out)


@handles(aten.linear)
def dense(rec: Recorder, func: Any, args: Arguments, kwargs: dict[str, Any], out: Any) -> None:
    """A dense layer: x (..., k) -> x @ weight^T (k, o) + bias."""
    source, weight, bias = (*args, None)[:3]
    if weight.ndim != 2 or rec.find(weight) or rec.find(bias):
        unknown(rec, func, args, kwargs, out)
    else:
        emit_unary(rec, source, out, ops.Linear, weight=weight.t(), constant=bias)


def _two_matrices(rec: Recorder, a: Node, b: Node, out: Tensor, constant: Tensor | None) -> None:
    """A product of two values that both depend on the tokens: attention scores, or frozen nothing."""
    if rec.rules.matrices == "refused" or a.tensor.ndim != 3:
        rec.refuse(out, "there is no rule for a product of two matrices that both depend on the tokens")
        return
    left, right = rec.resolve(a), rec.resolve(b)
    if left is None or right is None:
        rec.refuse(out, a.poison or b.poison or "")
        return
    share = 0.5 if rec.rules.matrices == "half" else 1.0
    first = rec.emit(ops.MixRight, left, like=out, matrix=b.tensor * share)
    second = rec.emit(ops.MixLeft, right, like=out, matrix=a.tensor * share)
    shape = tuple(out.shape)
    slot = rec.emit(ops.Sum, first, second, like=out, in_shapes=(shape, shape), signs=(1.0, 1.0), constant=constant)
    rec.bind(out, Node(out, slot))


@handles(aten.add, aten.sub, aten.rsub)
def add(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    left, right = args[:2]
    packet = func.overloadpacket
    weight = float(kwargs.get("alpha", args[2] if len(args) > 2 else 1))
    if packet is aten.rsub:
        left, right = right, left
    signs = (1.0, weight if packet is aten.add else -weight)
    if combine(rec, left, right, out, lambda x, y: x + y * signs[1], f"({{}}{signs[1]:+g}*{{}})", signs):
        return
    _sum(rec, [left, right], signs, out)


def _sum(rec: Recorder, terms: list[Any], signs: tuple[float, ...], out: Tensor) -> None:
    slots, shapes, kept, constant = [], [], [], None
    statistic = True
    for term, sign in zip(terms, signs, strict=True):
        node = rec.find(term)
        if node is None:
            value = torch.as_tensor(term, dtype=out.dtype, device=out.device) * sign
            # A mask's "minus infinity" only hides positions from a softmax: as a constant it is nothing.
            value = value.masked_fill(value <= torch.finfo(out.dtype).min, 0.0)
            constant = value if constant is None else constant + value
            continue
        slot = rec.resolve(node)
        statistic = statistic and node.is_statistic
        if slot is None:
            rec.refuse(out, node.poison or "", is_statistic=node.is_statistic)
            return
        slots.append(slot)
        shapes.append(tuple(term.shape))
        kept.append(sign)
    slot = rec.emit(ops.Sum, *slots, like=out, in_shapes=tuple(shapes), signs=tuple(kept), constant=constant)
    rec.bind(out, Node(out, slot, is_statistic=statistic))


@handles(aten.sum, aten.mean)
def reduce(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    source = args[0]
    dims = args[1] if len(args) > 1 else None
    dims = [dims] if isinstance(dims, int) else list(dims or range(source.ndim))
    dims = tuple(sorted(d % source.ndim for d in dims))
    size = ops.count([source.shape[d] for d in dims])
    factor = 1.0 / size if func.overloadpacket is aten.mean else 1.0
    # A mean of squares is the way to a norm's denominator.
    curved = rec.nodes[id(source)].is_curved
    emit_unary(rec, source, out, ops.Reduce, in_shape=tuple(source.shape), dims=dims, factor=factor)
    rec.nodes[id(out)].is_statistic |= curved


@handles(aten.where)
def where(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    if len(args) != 3:
        unknown(rec, func, args, kwargs, out)
        return
    mask, *branches = args
    terms = []
    for branch, chosen in zip(branches, (mask, ~mask), strict=True):
        weight = chosen.to(out.dtype)
        if rec.find(branch):
            part = branch * weight
            emit_unary(rec, branch, part, ops.Scale, in_shape=tuple(branch.shape), factor=weight)
            terms.append(part)
        else:
            terms.append(torch.where(chosen, torch.as_tensor(branch, dtype=out.dtype), out.new_zeros(())))
    _sum(rec, terms, (1.0, 1.0), out)


@handles(aten.mul)
def multiply(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    left, right = args
    if combine(rec, left, right, out, lambda x, y: x * y, "({}*{})", None):
        return
    a, b = rec.find(left), rec.find(right)
    if a and b:
        _two_values(rec, a, b, out)
    else:
        source, factor = (left, right) if a else (right, left)
        emit_unary(rec, source, out, ops.Scale, in_shape=tuple(source.shape), factor=factor)


@handles(aten.div)
def divide(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    left, right = args
    if kwargs.get("rounding_mode") is not None:
        unknown(rec, func, args, kwargs, out)
        return
    a, b = rec.find(left), rec.find(right)
    if b is None:
        number = as_number(right)
        multiply(rec, func, (left, 1 / right if number is None else 1 / number), {}, out)
        return
    inverse = right.reciprocal()
    apply(rec, b, inverse, torch.reciprocal, "1/{}", None)
    if a is None:
        multiply(rec, func, (left, inverse), {}, out)
    else:
        _two_values(rec, a, rec.nodes[id(inverse)], out)


def _two_values(rec: Recorder, a: Node, b: Node, out: Tensor) -> None:
    """x * y, both depending on the tokens: a norm and its denominator, or a gate and its signal."""
    shares = _shares(rec, a, b)
    if shares is None:
        rec.refuse(
            out,
            a.poison or b.poison or "there is no rule for a product of two values that depend on the tokens",
        )
        return
    slots, shapes = [], []
    for node, other, share in ((a, b, shares[0]), (b, a, shares[1])):
        if share == 0:
            continue
        slot = rec.resolve(node)
        if slot is None:
            rec.refuse(out, node.poison or "")
            return
        factor = other.tensor if share == 1 else other.tensor * share
        slots.append(rec.emit(ops.Scale, slot, like=out, in_shape=tuple(node.tensor.shape), factor=factor))
        shapes.append(tuple(out.shape))
    if len(slots) == 2:
        slots = [rec.emit(ops.Sum, *slots, like=out, in_shapes=tuple(shapes), signs=(1.0, 1.0))]
    rec.bind(out, Node(out, slots[0], is_statistic=a.is_statistic and b.is_statistic))


def _shares(rec: Recorder, a: Node, b: Node) -> tuple[float, float] | None:
    """How much of x * y goes to x and to y."""
    if rec.rules.gate == "product":
        return 1.0, 1.0
    if a.is_statistic != b.is_statistic:
        return (0.0, 1.0) if a.is_statistic else (1.0, 0.0)
    if a.poison or b.poison:
        return None
    if rec.rules.gate == "signal" and a.is_curved != b.is_curved:
        return (0.0, 1.0) if a.is_curved else (1.0, 0.0)
    return 0.5, 0.5


# Choices and shapes: frozen like everything else that decides without being summed.
always_frozen(
    aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge, aten.isnan, aten.isinf, aten.argmax, aten.argmin,
    aten.argsort, aten.zeros_like, aten.ones_like, aten.empty_like, aten.full_like, aten.new_zeros, aten.new_ones,
    aten.new_empty, aten.new_full, aten.any, aten.all, aten.sym_size,
)  # fmt: skip
