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
from rag_explain.linear.operations import MixLeft, Operation, Shape, Sum, TokenAxis
from rag_explain.linear.workspace import Workspace


@dataclass(frozen=True, eq=False)
class TokenLocalPrefix:
    """The operations before positions mix, those after them, and the values that go from the former to the latter."""

    operations: list[Operation]
    suffix: list[Operation]
    axes: dict[int, TokenAxis]


def find_prefix(operations: Sequence[Operation], source: int, shape: Shape) -> TokenLocalPrefix:
    """Split off the operations that treat every position of (D, n, h) by itself."""
    texts, length, _ = shape
    axes = {source: TokenAxis(1, texts, length)}
    prefix, suffix = [], []
    for operation in operations:
        axis = None
        if all(slot in axes for slot in operation.inputs):
            axis = operation.token_axis(*(axes[slot] for slot in operation.inputs))
        if axis is None:
            suffix.append(operation)
        else:
            prefix.append(operation)
            axes[operation.output] = axis
    read = {slot for operation in suffix for slot in operation.inputs}
    return TokenLocalPrefix(prefix, suffix, {slot: axis for slot, axis in axes.items() if slot in read})


@dataclass(frozen=True, eq=False)
class LocalValue:
    """A value before positions mix, for all tokens at once: what is at a position belongs to that position's token.

    Attributes:
        alone: the value's tangent, in the shape it had in the forward pass.
        bias: the same for the biases, in the same shape.
        axis: where the tokens are.
    """

    alone: Tensor
    bias: Tensor
    axis: TokenAxis

    @property
    def by_token(self) -> Tensor:
        """`alone` with the tokens in front: (n, ...)."""
        if self.axis.is_merged:
            return self.alone.reshape(self.axis.texts, self.axis.length, *self.alone.shape[1:]).transpose(0, 1)
        return self.alone.movedim(self.axis.index, 0)

    def positions_of(self, tangents: Tensor) -> Tensor:
        """A view of tangents (B, ...) of this value in which the tokens are the second axis: (B, n, ...)."""
        if self.axis.is_merged:
            shape = (tangents.shape[0], self.axis.texts, self.axis.length, *tangents.shape[2:])
            return tangents.view(shape).transpose(1, 2)
        return tangents.movedim(self.axis.index + 1, 1)


@dataclass(frozen=True, eq=False)
class Chunk:
    """Tangents of tokens start..stop, and after them of the biases if `has_bias`: B in all, not spread out yet.

    Spreading a value out makes n times as many elements, most of them zero. Attention and residuals, which read them
    first, have a shorter way; for any other operation they are spread out.
    """

    values: dict[int, LocalValue]
    start: int
    stop: int
    has_bias: bool

    def has_shortcut(self, operation: Operation, missing: Sequence[int]) -> bool:
        """Whether `run` can do the operation while the inputs `missing` are not spread out."""
        return self._mixes(operation) or self._adds(operation, missing)

    def spread(self, slot: int) -> Tensor:
        """A value's tangents, (B, ...)."""
        value = self.values[slot]
        out = value.alone.new_zeros(self.stop - self.start + self.has_bias, *value.alone.shape)
        self._add(value, out, 1.0)
        return out

    def run(self, operation: Operation, space: Workspace, spent: Sequence[bool], inputs: Sequence[Tensor]) -> Tensor:
        """An operation that has a shortcut; `inputs` are those of its inputs that are spread out."""
        if isinstance(operation, MixLeft):
            return self._mixed(self.values[operation.inputs[0]], operation.matrix, space)
        if isinstance(operation, MixHeads):
            return self._mixed_heads(self.values[operation.inputs[0]], operation, space)
        assert isinstance(operation, Sum)
        index = next(i for i, slot in enumerate(operation.inputs) if slot in self.values)
        (other,) = inputs
        out = other if spent[0] else other.clone()
        self._add(self.values[operation.inputs[index]], out, operation.signs[index])
        return out

    def _mixes(self, operation: Operation) -> bool:
        if not isinstance(operation, MixLeft | MixHeads):
            return False
        value = self.values[operation.inputs[0]]
        is_square = operation.matrix.shape[1] == operation.matrix.shape[2]
        return value.axis.index == 1 and value.alone.ndim == 3 and is_square

    def _adds(self, operation: Operation, missing: Sequence[int]) -> bool:
        if not isinstance(operation, Sum) or len(operation.inputs) != 2 or len(missing) != 1:
            return False
        other = 1 - operation.inputs.index(missing[0])
        if operation.inputs[other] in self.values:  # spread out before: which of the two is meant could not be told
            return False
        return operation.signs[other] == 1 and set(operation.in_shapes) == {operation.shape}

    def _add(self, value: LocalValue, out: Tensor, sign: float) -> None:
        """Add each token's tangent to its own position of `out` (B, ...), and the biases' to all of theirs."""
        size = self.stop - self.start
        own = value.positions_of(out)[:size, self.start : self.stop].diagonal(dim1=0, dim2=1)
        own.add_(value.by_token[self.start : self.stop].movedim(0, -1), alpha=sign)
        if self.has_bias:
            out[-1].add_(value.bias, alpha=sign)

    def _mixed(self, value: LocalValue, matrix: Tensor, space: Workspace) -> Tensor:
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

    def _mixed_heads(self, value: LocalValue, operation: MixHeads, space: Workspace) -> Tensor:
        """Heads of a token alone are outer products too, so the dense layer after them need only see n * H vectors.

        out[t][:, i] = sum over heads h of matrix_h[i, t] * (x_h[t] @ weight_h)
        """
        texts, length, inner = value.alone.shape
        heads, width = operation.heads, operation.shape[-1]
        part = inner // heads
        size = self.stop - self.start  # none at all, where the biases have a chunk of their own
        out = space.take(value.alone, size + self.has_bias, *operation.shape)
        apart = value.alone[:, self.start : self.stop].reshape(texts, size, heads, part).permute(2, 1, 0, 3)
        dense = torch.bmm(apart.reshape(heads, size * texts, part), operation.weight.reshape(heads, part, width))
        by_head = dense.view(heads, size, texts, width).permute(1, 2, 0, 3)
        matrix = operation.matrix.view(texts, heads, -1, length)[..., self.start : self.stop].permute(3, 0, 2, 1)
        torch.bmm(matrix.flatten(0, 1), by_head.flatten(0, 1), out=out[:size].view(-1, *operation.shape[1:]))
        if self.has_bias:
            out[-1] = operation.push(value.bias[None])[0]
        return out
