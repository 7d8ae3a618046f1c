"""The linear operations a frozen encoder is made of, each with its transpose.

Every operation maps tangents of its inputs to a tangent of its output (`push`) and a cotangent of its output to
cotangents of its inputs (`pull`). Tangents and cotangents carry one leading batch axis B in front of the shape that the
value had in the forward pass; shapes below leave B out where it only travels along. For every operation
`<pull(c), t> == <c, push(t)>`: a test holds it for each.

`constant` is what the operation adds that comes from no input (a bias): value_out = push(value_in) + constant.

`run` is `push` for production: it may write into a tangent that nobody needs any more and takes its memory from a
workspace, because on a CPU fresh memory for a large tangent costs as much as the arithmetic on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rag_explain.linear.workspace import Workspace

Shape = tuple[int, ...]


@dataclass(eq=False, kw_only=True)
class Operation:
    """One step of a frozen encoder: reads the slots `inputs`, writes the slot `output`."""

    inputs: tuple[int, ...]
    output: int
    shape: Shape  # of the output's value, without the batch of tangents
    constant: Tensor | None = None
    overwrites: ClassVar[bool] = False  # whether `run` may write into an input that is spent
    scratch: ClassVar[int] = 2  # how many times its output a step may need while it runs

    def push(self, *tangents: Tensor) -> Tensor:
        raise NotImplementedError

    def pull(self, cotangent: Tensor) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def run(self, space: Workspace, spent: Sequence[bool], *tangents: Tensor) -> Tensor:
        """`push`, where `spent[i]` says that nobody reads input i's memory afterwards."""
        return self.push(*tangents)

    def cast(self, dtype: torch.dtype) -> None:
        """Coefficients in the precision of the tangents: some encoders compute a part of them in another one."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and value.dtype != dtype and value.is_floating_point():
                setattr(self, name, value.to(dtype))


@dataclass(eq=False, kw_only=True)
class View(Operation):
    """A reshape: (in_shape) -> (shape)."""

    in_shape: Shape

    def push(self, *tangents: Tensor) -> Tensor:
        (t,) = tangents
        return t.reshape(t.shape[0], *self.shape)

    def pull(self, cotangent: Tensor) -> tuple[Tensor, ...]:
        return (cotangent.reshape(cotangent.shape[0], *self.in_shape),)


@dataclass(eq=False, kw_only=True)
class Permute(Operation):
    """Axes in another order: transpose, t, permute."""

    dims: Shape

    def __post_init__(self) -> None:
        self._forth = (0, *(d + 1 for d in self.dims))
        self._back = tuple(sorted(range(len(self._forth)), key=self._forth.__getitem__))

    def push(self, *tangents: Tensor) -> Tensor:
        return tangents[0].permute(self._forth)

    def pull(self, cotangent: Tensor) -> tuple[Tensor, ...]:
        return (cotangent.permute(self._back),)


@dataclass(eq=False, kw_only=True)
class Expand(Operation):
    """Broadcast of (in_shape) to (shape)."""

    in_shape: Shape

    def push(self, *tangents: Tensor) -> Tensor:
        (t,) = tangents
        return lift(t, len(self.shape)).expand(t.shape[0], *self.shape)

    def pull(self, cotangent: Tensor) -> tuple[Tensor, ...]:
        return (sum_to(cotangent, self.in_shape),)


@dataclass(eq=False, kw_only=True)
class Slice(Operation):
    """`x[..., start:stop:step, ...]` along one axis."""

    in_shape: Shape
    dim: int
    start: int
    stop: int
    step: int = 1

    def __post_init__(self) -> None:
        self._index = (slice(None),) * (self.dim + 1) + (slice(self.start, self.stop, self.step),)

    def push(self, *tangents: Tensor) -> Tensor:
        return tangents[0][self._index]

    def pull(self, cotangent: Tensor) -> tuple[Tensor, ...]:
        whole = cotangent.new_zeros(cotangent.shape[0], *self.in_shape)
        whole[self._index] = cotangent
        return (whole,)


@dataclass(eq=False, kw_only=True)
class Scale(Operation):
    """Elementwise product with a frozen tensor, either of which may be broadcast: x -> x * factor."""

    overwrites = True
    in_shape: Shape
    factor: Tensor

    def push(self, *tangents: Tensor) -> Tensor:
        return lift(tangents[0], len(self.shape)) * self.factor

    def run(self, space: Workspace, spent: Sequence[bool], *tangents: Tensor) -> Tensor:
        (t,) = tangents
        return t.mul_(self.factor) if spent[0] and self.in_shape == self.shape else self.push(t)

    def pull(self, cotangent: Tensor) -> tuple[Tensor, ...]:
        return (sum_to(cotangent * self.factor, self.in_shape),)


@dataclass(eq=False, kw_only=True)
class Linear(Operation):
    """x (m, k) -> x @ weight (k, o): mm and addmm, which is every dense layer."""

    weight: Tensor

    def push(self, *tangents: Tensor) -> Tensor:
        return tangents[0] @ self.weight

    def run(self, space: Workspace, spent: Sequence[bool], *tangents: Tensor) -> Tensor:
        (t,) = tangents
        out = space.take(t, t.shape[0], *self.shape)
        torch.mm(t.reshape(-1, t.shape[-1]), self.weight, out=out.view(-1, self.shape[-1]))
        return out

    def pull(self, cotangent: Tensor) -> tuple[Tensor, ...]:
        return (cotangent @ self.weight.mT,)


@dataclass(eq=False, kw_only=True)
class MixLeft(Operation):
    """x (b, m, d) -> matrix (b, n, m) @ x: attention with frozen probabilities."""

    matrix: Tensor

    def push(self, *tangents: Tensor) -> Tensor:
        return _mix(self.matrix, tangents[0])

    def pull(self, cotangent: Tensor) -> tuple[Tensor, ...]:
        return (_mix(self.matrix.mT, cotangent),)


@dataclass(eq=False, kw_only=True)
class MixRight(Operation):
    """x (b, n, m) -> x @ matrix (b, m, d): the other side of a batched product."""

    matrix: Tensor

    def push(self, *tangents: Tensor) -> Tensor:
        return _mix(self.matrix.mT, tangents[0].mT).mT

    def pull(self, cotangent: Tensor) -> tuple[Tensor, ...]:
        return (_mix(self.matrix, cotangent.mT).mT,)


def _mix(matrix: Tensor, x: Tensor) -> Tensor:
    """matrix (b, n, m) times each of x (B, b, m, d) as b large products, not B * b small ones."""
    batch, groups, inner, width = x.shape
    wide = torch.bmm(matrix, x.permute(1, 2, 0, 3).reshape(groups, inner, batch * width))
    return wide.view(groups, -1, batch, width).permute(2, 0, 1, 3)


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


@dataclass(eq=False, kw_only=True)
class Reduce(Operation):
    """Sum over `dims`, times `factor` (1 / count for a mean)."""

    in_shape: Shape
    dims: Shape
    factor: float

    def push(self, *tangents: Tensor) -> Tensor:
        (t,) = tangents
        total = t.sum(dim=[d + 1 for d in self.dims]) * self.factor
        return total.reshape(t.shape[0], *self.shape)

    def pull(self, cotangent: Tensor) -> tuple[Tensor, ...]:
        kept = [1 if d in self.dims else size for d, size in enumerate(self.in_shape)]
        spread = (cotangent * self.factor).reshape(cotangent.shape[0], *kept)
        return (spread.expand(cotangent.shape[0], *self.in_shape),)


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

    def push(self, *tangents: Tensor) -> Tensor:
        (t,) = tangents
        return (t - t.mean(dim=-1, keepdim=True)).mul_(self.factor)

    def run(self, space: Workspace, spent: Sequence[bool], *tangents: Tensor) -> Tensor:
        (t,) = tangents
        return t.sub_(t.mean(dim=-1, keepdim=True)).mul_(self.factor) if spent[0] else self.push(t)

    def pull(self, cotangent: Tensor) -> tuple[Tensor, ...]:
        c = cotangent * self.factor
        return (c.sub_(c.mean(dim=-1, keepdim=True)),)


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


@dataclass(eq=False, kw_only=True)
class Gather(Operation):
    """`x.gather(dim, index)` with a frozen index: CLS and last-token pooling, and max pooling by its argmax."""

    in_shape: Shape
    dim: int
    index: Tensor

    def push(self, *tangents: Tensor) -> Tensor:
        (t,) = tangents
        return t.gather(self.dim + 1, self.index.expand(t.shape[0], *self.index.shape))

    def pull(self, cotangent: Tensor) -> tuple[Tensor, ...]:
        whole = cotangent.new_zeros(cotangent.shape[0], *self.in_shape)
        index = self.index.expand(cotangent.shape[0], *self.index.shape)
        return (whole.scatter_add_(self.dim + 1, index, cotangent),)


@dataclass(eq=False, kw_only=True)
class Concatenate(Operation):
    """Inputs side by side along one axis; `sizes[i] < 0` marks a constant block, whose values are in `constant`."""

    dim: int
    sizes: tuple[int, ...]

    def push(self, *tangents: Tensor) -> Tensor:
        batch = tangents[0].shape[0]
        given = iter(tangents)
        blocks = []
        for size in self.sizes:
            if size >= 0:
                blocks.append(next(given))
            else:
                shape = (*self.shape[: self.dim], -size, *self.shape[self.dim + 1 :])
                blocks.append(tangents[0].new_zeros(batch, *shape))
        return torch.cat(blocks, dim=self.dim + 1)

    def pull(self, cotangent: Tensor) -> tuple[Tensor, ...]:
        blocks = cotangent.split([abs(size) for size in self.sizes], dim=self.dim + 1)
        return tuple(block for block, size in zip(blocks, self.sizes, strict=True) if size >= 0)


@dataclass(eq=False, kw_only=True)
class Rearrange(Operation):
    """Any operation that only picks, repeats or pads elements; its transpose comes from reverse-mode autograd."""

    in_shape: Shape
    function: Callable[[Tensor], Tensor]

    def push(self, *tangents: Tensor) -> Tensor:
        return torch.vmap(self.function)(tangents[0])

    def pull(self, cotangent: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            x = cotangent.new_zeros(cotangent.shape[0], *self.in_shape, requires_grad=True)
            (result,) = torch.autograd.grad(torch.vmap(self.function)(x), x, cotangent)
        return (result,)


def lift(t: Tensor, ndim: int) -> Tensor:
    """`t` (B, *shape) with axes of size 1 put behind B, so that shape has `ndim` axes and broadcasts to the right."""
    missing = ndim + 1 - t.ndim
    return t if missing <= 0 else t.reshape(t.shape[0], *[1] * missing, *t.shape[1:])


def sum_to(t: Tensor, shape: Sequence[int]) -> Tensor:
    """`t` (B, *larger) summed over every axis along which `shape` was broadcast: (B, *shape)."""
    extra = t.ndim - 1 - len(shape)
    axes = [
        *range(1, extra + 1),
        *(i + extra + 1 for i, n in enumerate(shape) if n == 1 and t.shape[i + extra + 1] != 1),
    ]
    if axes:
        t = t.sum(dim=axes, keepdim=True)
    return t.reshape(t.shape[0], *shape)


def count(shape: Sequence[int]) -> int:
    """The number of elements of a value of this shape."""
    return math.prod(shape)
