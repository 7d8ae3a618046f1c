"""The linear operations that move elements and change none: each only picks, repeats or lays them out otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rag_explain.linear.operations import Operation, Shape
from rag_explain.linear.owners import Owner
from rag_explain.linear.workspace import Workspace

if TYPE_CHECKING:
    from rag_explain.linear.early_pooling import EarlyPooling


@dataclass(eq=False, kw_only=True)
class View(Operation):
    """A reshape: (in_shape) -> (shape)."""

    in_shape: Shape

    def push(self, *tangents: Tensor) -> Tensor:
        (t,) = tangents
        return t.reshape(t.shape[0], *self.shape)

    def run_back(self, space: Workspace, spent: bool, cotangent: Tensor) -> tuple[Tensor, ...]:
        return (_reshaped(cotangent, self.in_shape, space),)

    def pooled(self, pooling: EarlyPooling, weights: Tensor) -> int | None:
        rows = weights.numel(), self.shape[-1]  # (D * n, k), as some dense layers see (D, n, k)
        return pooling.pooled(self.inputs[0], weights, rows) if self.in_shape == rows else None

    def owner_of(self, *owners: Owner | None) -> Owner | None:
        return owners[0] and owners[0].reshaped(self.in_shape, self.shape)


def _reshaped(t: Tensor, shape: Shape, space: Workspace) -> Tensor:
    """`t` (B, ...) as (B, *shape): a view if there is one, else a copy in the workspace's memory."""
    try:
        return t.view(t.shape[0], *shape)
    except RuntimeError:
        return space.take(t, *t.shape).copy_(t).view(t.shape[0], *shape)


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

    def owner_of(self, *owners: Owner | None) -> Owner | None:
        return owners[0] and owners[0].permuted(self.dims)


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

    def owner_of(self, *owners: Owner | None) -> Owner | None:
        return owners[0] and owners[0].sliced(self.dim, self.in_shape[self.dim], self.shape[self.dim])


@dataclass(eq=False, kw_only=True)
class Concatenate(Operation):
    """Inputs side by side along one axis; `sizes[i] < 0` marks a constant block, whose values are in `constant`."""

    dim: int
    sizes: tuple[int, ...]

    def push(self, *tangents: Tensor) -> Tensor:
        (first, *_), given = tangents, iter(tangents)
        before, after = (first.shape[0], *self.shape[: self.dim]), self.shape[self.dim + 1 :]
        blocks = [next(given) if size >= 0 else first.new_zeros(*before, -size, *after) for size in self.sizes]
        return torch.cat(blocks, dim=self.dim + 1)

    def pull(self, cotangent: Tensor) -> tuple[Tensor, ...]:
        blocks = cotangent.split([abs(size) for size in self.sizes], dim=self.dim + 1)
        return tuple(block for block, size in zip(blocks, self.sizes, strict=True) if size >= 0)

    def owner_of(self, *owners: Owner | None) -> Owner | None:
        """Side by side within each position: features, heads."""
        first = owners[0]
        is_apart = first is not None and first.axis != self.dim and first.index.shape[self.dim] == 1
        return first if is_apart and all(owners) else None


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

    def owner_of(self, *owners: Owner | None) -> Owner | None:
        return owners[0] and owners[0].broadcast(self.shape)
