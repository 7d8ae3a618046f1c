"""The linear operations a frozen encoder is made of, each with its transpose.

Every operation maps tangents of its inputs to a tangent of its output (`push`) and a cotangent of its output to
cotangents of its inputs (`pull`). Tangents and cotangents carry one leading batch axis B in front of the shape that the
value had in the forward pass; shapes below leave B out where it only travels along. For every operation
`<pull(c), t> == <c, push(t)>`: a test holds it for each.

`constant` is what the operation adds that comes from no input (a bias): value_out = push(value_in) + constant. Where it
enters is known by the `owner` of the output, and for a pooled one by `constants`, one for each position.

`run` is `push` and `run_back` is `pull` for production, and an operation has one of each two: they may write into a
tangent that is not read again and take their memory from a workspace. `pooled` is what `early_pooling` needs to know of
an operation; one that does not say stays where it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from rag_explain import _torch
from rag_explain.linear.owners import Owner
from rag_explain.linear.workspace import Workspace

if TYPE_CHECKING:
    from rag_explain.linear.early_pooling import EarlyPooling

Shape = tuple[int, ...]


@dataclass(eq=False, kw_only=True)
class Operation:
    """One step of a frozen encoder: reads the slots `inputs`, writes the slot `output`."""

    inputs: tuple[int, ...]
    output: int
    shape: Shape  # of the output's value, without the batch of tangents
    constant: Tensor | None = None
    owner: Owner | None = None  # of the output, where biases are counted by position and the operation adds one
    constants: Tensor | None = None  # (D, n, k): what each position has of a pooled constant (D, k)
    overwrites: ClassVar[bool] = False  # whether `run` may write into an input that is spent
    scratch: ClassVar[int] = 2  # how many times its output a step may need while it runs

    def at(self, coefficients: dict[str, Any]) -> Self:
        """This operation with other coefficients; `copy.copy` would take several times as long."""
        other = object.__new__(type(self))
        other.__dict__ = {**self.__dict__, **coefficients}
        return other

    def push(self, *tangents: Tensor) -> Tensor:
        """The output's tangent (B, *shape) for tangents of the inputs, which are only read."""
        return self.run(Workspace(), (False,) * len(tangents), *tangents)

    def pull(self, cotangent: Tensor) -> tuple[Tensor, ...]:
        """The inputs' cotangents for the output's, which is only read."""
        return self.run_back(Workspace(), False, cotangent)

    def run(self, space: Workspace, spent: Sequence[bool], *tangents: Tensor) -> Tensor:
        """`push`, where `spent[i]` says that input i's memory is not read afterwards."""
        return self.push(*tangents)

    def run_back(self, space: Workspace, spent: bool, cotangent: Tensor) -> tuple[Tensor, ...]:
        """`pull`, where `spent` says that the cotangent's memory is not read afterwards."""
        return self.pull(cotangent)

    def pooled(self, pooling: EarlyPooling, weights: Tensor) -> int | None:
        """Write down the pooled output, sum_i weights[:, i] * out[:, i], in terms of pooled inputs; returns its slot.

        None where that is not the same. weights (D, n); the output is (D, n, k), or (D * n, k).
        """
        return None

    def on_pooled(self, weights: Tensor, *inputs: int, **changes: Any) -> Operation:
        """This operation on pooled inputs, (D, k) each, with its constant pooled too."""
        shape, constant = (len(weights), self.shape[-1]), pooled_constant(self.constant, weights, self.shape[-1])
        constants = None
        if self.owner is not None and self.constant is not None:
            constants = spread_constant(self.constant, weights, self.shape[-1])
        changes |= {"shape": shape, "constant": constant, "constants": constants, "owner": None}
        return replace(self, inputs=inputs, **changes)

    def owner_of(self, *owners: Owner | None) -> Owner | None:
        """Which positions the output's elements belong to, given those of the inputs; None: to none, or not known."""
        return None

    def cast(self, dtype: torch.dtype) -> None:
        """Coefficients in the precision of the tangents: some encoders compute a part of them in another one."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and value.dtype != dtype and value.is_floating_point():
                setattr(self, name, value.to(dtype))


@dataclass(eq=False, kw_only=True)
class Scale(Operation):
    """Elementwise product with a frozen tensor, either of which may be broadcast: x -> x * factor."""

    overwrites = True
    in_shape: Shape
    factor: Tensor

    def run(self, space: Workspace, spent: Sequence[bool], *tangents: Tensor) -> Tensor:
        (t,) = tangents
        in_place = spent[0] and self.in_shape == self.shape
        return t.mul_(self.factor) if in_place else lift(t, len(self.shape)) * self.factor

    def run_back(self, space: Workspace, spent: bool, cotangent: Tensor) -> tuple[Tensor, ...]:
        scaled = cotangent.mul_(self.factor) if spent else cotangent * self.factor
        return (sum_to(scaled, self.in_shape),)

    def pooled(self, pooling: EarlyPooling, weights: Tensor) -> int | None:
        if self.in_shape != self.shape or self.shape[:-1] != weights.shape:
            return None
        source = self.inputs[0]
        factor = self.factor.reshape((1,) * (3 - self.factor.ndim) + tuple(self.factor.shape))
        if factor.shape[2] == 1 and self.constant is None:  # by position: part of the weights
            return pooling.pooled(source, weights * factor[..., 0], self.shape)
        if factor.shape[:2] != (1, 1):
            return None
        inner = pooling.pooled(source, weights, self.shape)
        in_shape = (len(weights), self.shape[-1])
        return pooling.emit(self.on_pooled(weights, inner, in_shape=in_shape, factor=factor[0]))

    def owner_of(self, *owners: Owner | None) -> Owner | None:
        return owners[0] and owners[0].lifted(len(self.shape))


@dataclass(eq=False, kw_only=True)
class Linear(Operation):
    """x (m, k) -> x @ weight (k, o): mm and addmm, which is every dense layer."""

    weight: Tensor

    def run(self, space: Workspace, spent: Sequence[bool], *tangents: Tensor) -> Tensor:
        return _product(tangents[0], self.weight, space)

    def run_back(self, space: Workspace, spent: bool, cotangent: Tensor) -> tuple[Tensor, ...]:
        return (_product(cotangent, self.weight.mT, space),)

    def pooled(self, pooling: EarlyPooling, weights: Tensor) -> int | None:
        in_shape = (*self.shape[:-1], len(self.weight))
        return pooling.emit(self.on_pooled(weights, pooling.pool(self.inputs[0], weights, in_shape)))

    def owner_of(self, *owners: Owner | None) -> Owner | None:
        return owners[0] if owners[0] and owners[0].is_by_row else None


def _product(t: Tensor, weight: Tensor, space: Workspace) -> Tensor:
    """t (..., k) @ weight (k, o)."""
    if _torch.has_onednn(t):
        return _torch.onednn_product(t, weight)
    out = space.take(t, *t.shape[:-1], weight.shape[1])
    torch.mm(t.reshape(-1, t.shape[-1]), weight, out=out.view(-1, weight.shape[1]))
    return out


@dataclass(eq=False, kw_only=True)
class MixLeft(Operation):
    """x (b, m, d) -> matrix (b, n, m) @ x: attention with frozen probabilities."""

    matrix: Tensor

    def push(self, *tangents: Tensor) -> Tensor:
        return _mix(self.matrix, tangents[0], Workspace())

    def run_back(self, space: Workspace, spent: bool, cotangent: Tensor) -> tuple[Tensor, ...]:
        return (_mix(self.matrix.mT, cotangent, space),)

    def owner_of(self, *owners: Owner | None) -> Owner | None:
        """Attention: what is read at a position is at that position."""
        is_square = self.matrix.shape[1] == self.matrix.shape[2]
        return owners[0] if owners[0] and is_square and owners[0].axis == 1 else None


@dataclass(eq=False, kw_only=True)
class MixRight(Operation):
    """x (b, n, m) -> x @ matrix (b, m, d): the other side of a batched product."""

    matrix: Tensor

    def push(self, *tangents: Tensor) -> Tensor:
        return _mix(self.matrix.mT, tangents[0].mT, Workspace()).mT

    def pull(self, cotangent: Tensor) -> tuple[Tensor, ...]:
        return (_mix(self.matrix, cotangent.mT, Workspace()).mT,)

    def owner_of(self, *owners: Owner | None) -> Owner | None:
        return owners[0] if owners[0] and owners[0].is_by_row else None


def _mix(matrix: Tensor, x: Tensor, space: Workspace) -> Tensor:
    """matrix (b, n, m) times each of x (B, b, m, d) as b large products, not B * b small ones."""
    batch, groups, inner, width = x.shape
    side_by_side = space.take(x, groups, inner, batch, width).copy_(x.permute(1, 2, 0, 3))
    out = space.take(x, groups, matrix.shape[1], batch, width)
    torch.bmm(matrix, side_by_side.view(groups, inner, -1), out=out.view(groups, matrix.shape[1], -1))
    space.give(side_by_side)
    return out.permute(2, 0, 1, 3)


@dataclass(eq=False, kw_only=True)
class Sum(Operation):
    """signs[0] * x_0 + signs[1] * x_1 + ..., each broadcast to the output's shape."""

    overwrites = True
    in_shapes: tuple[Shape, ...]
    signs: tuple[float, ...]

    def push(self, *tangents: Tensor) -> Tensor:
        first, *others = (lift(t, len(self.shape)) for t in tangents)
        total = first if self.signs[0] == 1 else first * self.signs[0]
        for sign, t in zip(self.signs[1:], others, strict=True):
            total = torch.add(total, t, alpha=sign)
        if not others:  # a broadcast with a constant: the output may be larger than the input
            total = total.expand(total.shape[0], *self.shape).clone()
        return total

    def run(self, space: Workspace, spent: Sequence[bool], *tangents: Tensor) -> Tensor:
        target = next((i for i, shape in enumerate(self.in_shapes) if spent[i] and shape == self.shape), None)
        if target is None or len(tangents) != 2 or self.signs[target] != 1 or tangents[0] is tangents[1]:
            return self.push(*tangents)
        other = 1 - target
        return tangents[target].add_(lift(tangents[other], len(self.shape)), alpha=self.signs[other])

    def pull(self, cotangent: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            sum_to(cotangent if sign == 1 else cotangent * sign, shape)
            for sign, shape in zip(self.signs, self.in_shapes, strict=True)
        )

    def pooled(self, pooling: EarlyPooling, weights: Tensor) -> int | None:
        if self.shape[:-1] != weights.shape or any(shape != self.shape for shape in self.in_shapes):
            return None
        inner = [pooling.pooled(part, weights, self.shape) for part in self.inputs]
        in_shapes = ((len(weights), self.shape[-1]),) * len(inner)
        return pooling.emit(self.on_pooled(weights, *inner, in_shapes=in_shapes))

    def owner_of(self, *owners: Owner | None) -> Owner | None:
        """Of an input that has one; attention scores are the reading position's, whose part comes first."""
        return next((owner.lifted(len(self.shape)) for owner in owners if owner), None)


@dataclass(eq=False, kw_only=True)
class Reduce(Operation):
    """Sum over `dims`, times `factor` (1 / count for a mean)."""

    in_shape: Shape
    dims: Shape
    factor: float

    def push(self, *tangents: Tensor) -> Tensor:
        total = tangents[0].sum(dim=[d + 1 for d in self.dims]) * self.factor
        return total.reshape(total.shape[0], *self.shape)

    def pull(self, cotangent: Tensor) -> tuple[Tensor, ...]:
        kept = [1 if d in self.dims else size for d, size in enumerate(self.in_shape)]
        spread = (cotangent * self.factor).reshape(cotangent.shape[0], *kept)
        return (spread.expand(cotangent.shape[0], *self.in_shape),)

    def owner_of(self, *owners: Owner | None) -> Owner | None:
        return owners[0] and owners[0].reduced(self.dims, self.shape)


@dataclass(eq=False, kw_only=True)
class Pool(Operation):
    """A weighted sum over positions: x (D, n, k), or (D * n, k), -> sum_i weights[:, i] * x[:, i], (D, k)."""

    in_shape: Shape
    weights: Tensor  # (D, n)

    def push(self, *tangents: Tensor) -> Tensor:
        (t,) = tangents
        by_position = t.reshape(t.shape[0], *self.weights.shape, self.shape[-1])
        return (self.weights[:, None, :] @ by_position).squeeze(2)

    def pull(self, cotangent: Tensor) -> tuple[Tensor, ...]:
        spread = self.weights[:, :, None] * cotangent[:, :, None, :]
        return (spread.reshape(cotangent.shape[0], *self.in_shape),)


@dataclass(eq=False, kw_only=True)
class Center(Operation):
    """Layer norm with a frozen denominator: x -> (x - mean(x)) * factor over the last axis."""

    overwrites = True
    inverse: Tensor  # (..., 1): one over the standard deviation
    weight: Tensor | None  # (h,)

    def __post_init__(self) -> None:
        self.factor = self.inverse if self.weight is None else self.inverse * self.weight

    def run(self, space: Workspace, spent: Sequence[bool], *tangents: Tensor) -> Tensor:
        (t,) = tangents
        mean = t.mean(dim=-1, keepdim=True)
        return (t.sub_(mean) if spent[0] else t - mean).mul_(self.factor)

    def run_back(self, space: Workspace, spent: bool, cotangent: Tensor) -> tuple[Tensor, ...]:
        c = cotangent.mul_(self.factor) if spent else cotangent * self.factor
        return (c.sub_(c.mean(dim=-1, keepdim=True)),)

    def pooled(self, pooling: EarlyPooling, weights: Tensor) -> int | None:
        if self.shape[:-1] != weights.shape:
            return None
        inner = pooling.pooled(self.inputs[0], weights * self.inverse[..., 0], self.shape)
        return pooling.emit(self.on_pooled(weights, inner, inverse=torch.ones_like(weights[:, :1])))

    def owner_of(self, *owners: Owner | None) -> Owner | None:
        return owners[0]


@dataclass(eq=False, kw_only=True)
class CenterProject(Operation):
    """The true derivative of layer norm: x -> (x - mean(x) - z * mean(z * x)) * factor, z the normalised value."""

    factor: Tensor  # (..., h)
    normalised: Tensor  # (..., h)

    def push(self, *tangents: Tensor) -> Tensor:
        return self._project(tangents[0]) * self.factor

    def pull(self, cotangent: Tensor) -> tuple[Tensor, ...]:
        return (self._project(cotangent * self.factor),)

    def _project(self, t: Tensor) -> Tensor:
        along = (t * self.normalised).mean(dim=-1, keepdim=True)
        return t - t.mean(dim=-1, keepdim=True) - self.normalised * along

    def owner_of(self, *owners: Owner | None) -> Owner | None:
        return owners[0]


@dataclass(eq=False, kw_only=True)
class SoftmaxJacobian(Operation):
    """The derivative of p = softmax(x) along `dim`: x -> p * (x - sum(p * x)). It is its own transpose."""

    probabilities: Tensor
    dim: int

    def push(self, *tangents: Tensor) -> Tensor:
        weighted = self.probabilities * tangents[0]
        return weighted - self.probabilities * weighted.sum(dim=self.dim + 1, keepdim=True)

    def pull(self, cotangent: Tensor) -> tuple[Tensor, ...]:
        return (self.push(cotangent),)

    def owner_of(self, *owners: Owner | None) -> Owner | None:
        return owners[0]


def lift(t: Tensor, ndim: int) -> Tensor:
    """`t` (B, *shape) with axes of size 1 put after B, so that shape has `ndim` axes and broadcasts to the right."""
    missing = ndim + 1 - t.ndim
    return t if missing <= 0 else t.reshape(t.shape[0], *[1] * missing, *t.shape[1:])


def sum_to(t: Tensor, shape: Sequence[int]) -> Tensor:
    """`t` (B, *larger) summed over every axis along which `shape` was broadcast: (B, *shape)."""
    extra = t.ndim - 1 - len(shape)
    axes = [*range(1, extra + 1), *(i for i, n in enumerate(shape, extra + 1) if n == 1 and t.shape[i] != 1)]
    if axes:
        t = t.sum(dim=axes, keepdim=True)
    return t.reshape(t.shape[0], *shape)


def pooled_constant(constant: Tensor | None, weights: Tensor, width: int) -> Tensor | None:
    """What a constant of (D, n, k), or one that is broadcast to it, adds up to over the positions: (D, k)."""
    if constant is None:
        return None
    if constant.ndim <= 1:
        return weights.sum(dim=1, keepdim=True) * constant
    return spread_constant(constant, weights, width).sum(dim=1)


def spread_constant(constant: Tensor, weights: Tensor, width: int) -> Tensor:
    """What each position has of a pooled constant, (D, n, k)."""
    shape = (*weights.shape, width)
    whole = constant.reshape(shape) if constant.numel() == math.prod(shape) else constant.expand(shape)
    return weights.unsqueeze(-1) * whole
