"""What divides by a statistic of the values: layer norms, vector norms, softmax."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rag_explain.linear.operations import Center, CenterProject, Reduce, Scale, SoftmaxJacobian
from rag_explain.linear.recorder import Recorder
from rag_explain.linear.registry import Unfollowable, handles, is_first_of

aten = torch.ops.aten

is_first_of(aten.layer_norm, aten.native_layer_norm.default)


@handles(aten.native_layer_norm)
def native_layer_norm(
    rec: Recorder,
    out: tuple[Tensor, Tensor, Tensor],
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> None:
    value, mean, inverse = out
    if len(normalized_shape) != 1:
        raise Unfollowable
    if rec.rules.norm == "frozen":
        rec.emit_unary(input, value, Center, inverse=inverse, weight=weight, constant=bias)
    else:
        factor = inverse if weight is None else inverse * weight
        normalised = (input - mean) * inverse
        rec.emit_unary(input, value, CenterProject, factor=factor, normalised=normalised, constant=bias)


@handles(aten.linalg_vector_norm)
def linalg_vector_norm(
    rec: Recorder, out: Tensor, self: Tensor, ord: float, dim: Sequence[int] | None, **_: Any
) -> None:
    if ord != 2 or dim is None:
        raise Unfollowable(
            f"there is no rule for the operation {rec.func.overloadpacket} of order {ord}", is_statistic=True
        )
    dims = tuple(sorted(d % self.ndim for d in dim))
    length = out.reshape([1 if d in dims else n for d, n in enumerate(self.shape)])
    direction = self / length.clamp_min(torch.finfo(self.dtype).tiny)
    part, in_shape = self * direction, tuple(self.shape)
    rec.emit_unary(self, part, Scale, in_shape=in_shape, factor=direction)
    rec.emit_unary(part, out, Reduce, in_shape=in_shape, dims=dims, factor=1.0)
    rec.nodes[out].is_statistic = True


@handles(aten._softmax, frozen=lambda rules: rules.softmax == "frozen")
def softmax(rec: Recorder, out: Tensor, self: Tensor, dim: int, half_to_float: bool) -> None:
    dim %= self.ndim
    # p - J x, the constant of the first-order expansion; -inf of a mask never counts, since p is zero there.
    finite = torch.where(out == 0, out.new_zeros(()), self)
    weighted = out * finite
    constant = out - (weighted - out * weighted.sum(dim=dim, keepdim=True))
    rec.emit_unary(self, out, SoftmaxJacobian, probabilities=out, dim=dim, constant=constant)
