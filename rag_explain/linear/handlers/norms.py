"""What divides by a statistic of the values: layer norms, vector norms, softmax."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rag_explain.linear import operations as ops
from rag_explain.linear.handlers.shapes import emit_unary
from rag_explain.linear.recorder import Recorder
from rag_explain.linear.registry import Arguments, handles, is_first_of, unknown

aten = torch.ops.aten


@is_first_of(aten.layer_norm)
def _native(
    source: Tensor,
    shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> tuple[Any, Arguments]:
    return aten.native_layer_norm.default, (source, shape, weight, bias, eps)


@handles(aten.native_layer_norm)
def layer_norm(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    source, shape, weight, bias = args[:4]
    value, mean, inverse = out
    if len(shape) != 1:
        unknown(rec, func, args, kwargs, value)
        return
    if rec.rules.norm == "frozen":
        emit_unary(rec, source, value, ops.Center, inverse=inverse, weight=weight, constant=bias)
    else:
        factor = inverse if weight is None else inverse * weight
        normalised = (source - mean) * inverse
        emit_unary(rec, source, value, ops.CenterProject, factor=factor, normalised=normalised, constant=bias)


@handles(aten.linalg_vector_norm)
def vector_norm(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    source = args[0]
    order = args[1] if len(args) > 1 else 2
    dims = args[2] if len(args) > 2 else None
    if order != 2 or dims is None:
        rec.refuse(
            out,
            f"there is no rule for the operation {func.overloadpacket} of order {order}",
            is_statistic=True,
        )
        return
    dims = tuple(sorted(d % source.ndim for d in dims))
    length = out.reshape([1 if d in dims else n for d, n in enumerate(source.shape)])
    direction = source / length.clamp_min(torch.finfo(source.dtype).tiny)
    part = source * direction
    in_shape = tuple(source.shape)
    emit_unary(rec, source, part, ops.Scale, in_shape=in_shape, factor=direction)
    emit_unary(rec, part, out, ops.Reduce, in_shape=in_shape, dims=dims, factor=1.0)
    rec.nodes[id(out)].is_statistic = True


@handles(aten._softmax, frozen=lambda rules: rules.softmax == "frozen")
def softmax(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    source, dim = args[0], args[1] % args[0].ndim
    # p - J x, the constant of the first-order expansion; -inf of a mask never counts, since p is zero there.
    finite = torch.where(out == 0, out.new_zeros(()), source)
    weighted = out * finite
    constant = out - (weighted - out * weighted.sum(dim=dim, keepdim=True))
    emit_unary(rec, source, out, ops.SoftmaxJacobian, probabilities=out, dim=dim, constant=constant)
