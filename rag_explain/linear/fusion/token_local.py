"""The operations before positions mix, done for all tokens at once.

At the input a token's tangent is zero everywhere but at its own position, and stays so until attention mixes positions.
Up to there all tokens travel as one tangent, and the first mixing is an outer product instead of a matrix product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rag_explain.linear.fusion.heads import MixHeads
from rag_explain.linear.operations import (
    Center,
    Expand,
    Linear,
    MixLeft,
    Operation,
    Permute,
    Scale,
    Shape,
    Slice,
    Sum,
    View,
)
from rag_explain.linear.workspace import Workspace


@dataclass(frozen=True)
class Place:
    """Where the token axis of a value is: its index, or merged behind the documents into axis 0."""

    axis: int
    merged: bool = False


@dataclass(frozen=True, eq=False)
class TokenLocalPrefix:
    """The operations before positions mix, and the values that the operations behind them read."""

    operations: list[Operation]
    rest: list[Operation]
    places: dict[int, Place]


def find_prefix(operations: Sequence[Operation], source: int, shape: Shape) -> TokenLocalPrefix:
    """Split off the operations that treat every position of (D, n, h) by itself."""
    places = {source: Place(1)}
    shapes = {source: shape}
    head, rest = [], []
    for operation in operations:
        place = None
        if all(slot in places for slot in operation.inputs):
            place = _carried(operation, [places[slot] for slot in operation.inputs], shapes, shape)
        if place is None:
            rest.append(operation)
        else:
            head.append(operation)
            places[operation.output] = place
            shapes[operation.output] = operation.shape
    read = {slot for operation in rest for slot in operation.inputs}
    return TokenLocalPrefix(head, rest, {slot: place for slot, place in places.items() if slot in read})


def _carried(operation: Operation, places: list[Place], shapes: dict[int, Shape], shape: Shape) -> Place | None:
    """Where the token axis is behind an operation that leaves positions alone; None for one that may not."""
    place = places[0]
    before, after = shapes[operation.inputs[0]], operation.shape
    if isinstance(operation, View):
        return _reshaped(place, before, after, shape)
    if isinstance(operation, Permute):
        if place.merged:
            return place if operation.dims[0] == 0 else None
        return Place(operation.dims.index(place.axis))
    is_last = place.axis == len(after) - 1
    if isinstance(operation, Linear | Center):
        return None if is_last else place
    if isinstance(operation, Slice):
        return None if operation.dim == place.axis else place
    if isinstance(operation, Expand | Scale):
        return place if before == after else None
    if isinstance(operation, Sum):
        alike = all(shapes[slot] == after for slot in operation.inputs)
        return place if alike and all(other == place for other in places) else None
    return None


def _reshaped(place: Place, before: Shape, after: Shape, shape: Shape) -> Place | None:
    documents, length = shape[:2]
    if before == after:
        return place
    if place.merged or (place.axis == 1 and before[0] == documents):
        if after[0] == documents * length and len(after) > 1 and (place.merged or len(before) > 2):
            return Place(0, merged=True)
        return Place(1) if after[:2] == (documents, length) else None
    # (D, heads, n, d) -> (D * heads, n, d), the shape of a batched product
    is_batched = place.axis == 2 and len(before) == 4 and after == (before[0] * before[1], *before[2:])
    return Place(1) if is_batched else None


@dataclass(frozen=True, eq=False)
class Tokens:
    """A value before positions mix, for all tokens at once: `alone[position]` belongs to that position's token.

    Attributes:
        alone: the value's tangent, in the shape it had in the forward pass.
        bias: the same for the biases, in the same shape.
        place: where the token axis is.
        count: (documents, positions).
    """

    alone: Tensor
    bias: Tensor
    place: Place
    count: tuple[int, int]

    def first(self, tangent: Tensor) -> Tensor:
        """A tangent of this value with the token axis in front: (n, ...)."""
        if self.place.merged:
            return tangent.reshape(*self.count, *tangent.shape[1:]).transpose(0, 1)
        return tangent.movedim(self.place.axis, 0)


@dataclass(frozen=True, eq=False)
class Chunk:
    """The tangents of tokens start..stop, and behind them of the biases if `has_bias`: B of them, still in `tokens`."""

    tokens: dict[int, Tokens]
    start: int
    stop: int
    has_bias: bool

    def prepare(self, operation: Operation, live: dict[int, Tensor]) -> None:
        """Spread out what the operation reads, unless it has a shorter way."""
        missing = [slot for slot in operation.inputs if slot not in live]
        if self._mixes(operation) or self._adds(operation, missing):
            return
        for slot in missing:
            value = self.tokens[slot]
            live[slot] = value.alone.new_zeros(self.stop - self.start + self.has_bias, *value.alone.shape)
            self._add(value, live[slot], 1.0)

    def run(self, operation: Operation, space: Workspace, spent: Sequence[bool], inputs: Sequence[Tensor]) -> Tensor:
        """An operation that has a shorter way."""
        if isinstance(operation, MixLeft):
            return self._mixed(self.tokens[operation.inputs[0]], operation.matrix, space)
        if isinstance(operation, MixHeads):
            return self._mixed_heads(self.tokens[operation.inputs[0]], operation, space)
        assert isinstance(operation, Sum)
        index = next(i for i, slot in enumerate(operation.inputs) if slot in self.tokens)
        (other,) = inputs
        out = other if spent[0] else other.clone()
        self._add(self.tokens[operation.inputs[index]], out, operation.signs[index])
        return out

    def _mixes(self, operation: Operation) -> bool:
        if not isinstance(operation, MixLeft | MixHeads):
            return False
        value = self.tokens[operation.inputs[0]]
        is_square = operation.matrix.shape[1] == operation.matrix.shape[2]
        return value.place == Place(1) and value.alone.ndim == 3 and is_square

    def _adds(self, operation: Operation, missing: Sequence[int]) -> bool:
        if not isinstance(operation, Sum) or len(operation.inputs) != 2 or len(missing) != 1:
            return False
        dense = 1 - operation.inputs.index(missing[0])
        if operation.inputs[dense] in self.tokens:  # spread out before: which of the two is meant could not be told
            return False
        return operation.signs[dense] == 1 and set(operation.in_shapes) == {operation.shape}

    def _add(self, value: Tokens, out: Tensor, sign: float) -> None:
        """Add each token's tangent to its own position of `out` (B, ...), and the biases' to all of theirs."""
        if value.place.merged:
            positions = out.view(out.shape[0], *value.count, *out.shape[2:]).transpose(1, 2)
        else:
            positions = out.movedim(value.place.axis + 1, 1)
        size = self.stop - self.start
        own = positions[:size, self.start : self.stop].diagonal(dim1=0, dim2=1)
        own.add_(value.first(value.alone)[self.start : self.stop].movedim(0, -1), alpha=sign)
        if self.has_bias:
            out[-1].add_(value.bias, alpha=sign)

    def _mixed(self, value: Tokens, matrix: Tensor, space: Workspace) -> Tensor:
        """What attention makes of each token alone: out[t][:, i] = matrix[:, i, t] * x[:, t], an outer product."""
        groups, length, width = value.alone.shape
        size = self.stop - self.start
        out = space.take(value.alone, size + self.has_bias, length, groups, width)
        weights = matrix[:, :, self.start : self.stop].permute(2, 1, 0).unsqueeze(-1)
        values = value.alone[:, self.start : self.stop].transpose(0, 1).unsqueeze(1)
        torch.mul(weights, values, out=out[:size])
        if self.has_bias:
            out[-1] = (matrix @ value.bias).transpose(0, 1)
        return out.transpose(1, 2)

    def _mixed_heads(self, value: Tokens, operation: MixHeads, space: Workspace) -> Tensor:
        """Heads of a token alone are outer products too, so the dense layer behind them need only see n * H vectors.

        out[t][:, i] = sum over heads h of matrix_h[i, t] * (x_h[t] @ weight_h)
        """
        documents, length, inner = value.alone.shape
        heads, width = operation.heads, operation.shape[-1]
        part = inner // heads
        size = self.stop - self.start  # none at all, where the biases have a chunk of their own
        out = space.take(value.alone, size + self.has_bias, *operation.shape)
        apart = value.alone[:, self.start : self.stop].reshape(documents, size, heads, part).permute(2, 1, 0, 3)
        dense = torch.bmm(apart.reshape(heads, size * documents, part), operation.weight.reshape(heads, part, width))
        by_head = dense.view(heads, size, documents, width).permute(1, 2, 0, 3)
        matrix = operation.matrix.view(documents, heads, -1, length)[..., self.start : self.stop].permute(3, 0, 2, 1)
        torch.bmm(matrix.flatten(0, 1), by_head.flatten(0, 1), out=out[:size].view(-1, *operation.shape[1:]))
        if self.has_bias:
            out[-1] = operation.push(value.bias[None])[0]
        return out
