"""Attention heads as one operation.

Torch takes attention apart: heads are split off and moved aside, mixed, moved back and laid side by side, and a dense
layer joins them, eight operations of which six only move elements. Joined to one they cost less, and the first block,
where tokens are still alone, can do without most of the dense layer (`token_local`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rag_explain.linear.operations import Linear, MixLeft, Operation, Shape
from rag_explain.linear.rearrangements import Permute, View
from rag_explain.linear.workspace import Workspace

_ASIDE = (0, 2, 1, 3)  # (D, n, H, d) <-> (D, H, n, d)


@dataclass(eq=False, kw_only=True)
class MixHeads(Operation):
    """x (D, m, H * d) -> (D, n, o): frozen attention by each head, and the dense layer that joins them."""

    scratch = 4
    matrix: Tensor  # (D * H, n, m)
    heads: int
    dense: Linear  # H * d -> o

    @property
    def weight(self) -> Tensor:
        """(H * d, o), of the dense layer."""
        return self.dense.weight

    def push(self, *tangents: Tensor) -> Tensor:
        return self.dense.push(self.mix(self.matrix, tangents[0]))

    def run(self, space: Workspace, spent: Sequence[bool], *tangents: Tensor) -> Tensor:
        return self.dense.run(space, (), self.mix(self.matrix, tangents[0]))

    def pull(self, cotangent: Tensor) -> tuple[Tensor, ...]:
        return (self.mix(self.matrix.mT, *self.dense.pull(cotangent)),)

    def cast(self, dtype: torch.dtype) -> None:
        super().cast(dtype)
        self.dense.cast(dtype)

    def mix(self, matrix: Tensor, x: Tensor) -> Tensor:
        """Each head's matrix (n, m) times its part of x (B, D, m, H * d), as D * H large products: (B, D, n, H * d)."""
        batch, documents, length, width = x.shape
        apart = x.reshape(batch, documents, length, self.heads, -1).permute(1, 3, 2, 0, 4)
        mixed = torch.bmm(matrix, apart.reshape(documents * self.heads, length, -1))
        together = mixed.view(documents, self.heads, matrix.shape[1], batch, -1).permute(3, 0, 2, 1, 4)
        return together.reshape(batch, documents, matrix.shape[1], width)


def join_heads(operations: Sequence[Operation]) -> list[Operation]:
    """The same operations, with attention heads as one wherever they have the usual form."""
    chains = _Chains(operations)
    joined: dict[int, MixHeads] = {}
    gone: set[int] = set()
    for mix in operations:
        if isinstance(mix, MixLeft):
            before, after = chains.before(mix, 3), chains.after(mix, 4)
            heads = _joined(mix, before, after)
            if heads is not None:
                joined[heads.output] = heads
                gone.update(step.output for step in (*before, mix, *after))
    return [
        joined.get(operation.output, operation)
        for operation in operations
        if operation.output in joined or operation.output not in gone
    ]


class _Chains:
    """Operations of which each is the only reader of the one before it."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        reads = Counter(slot for operation in operations for slot in operation.inputs)
        self._producers = {operation.output: operation for operation in operations if reads[operation.output] == 1}
        self._readers = {slot: operation for operation in operations for slot in operation.inputs if reads[slot] == 1}

    def before(self, operation: Operation, length: int) -> list[Operation]:
        """Up to so many operations that only lead to this one, in order."""
        chain: list[Operation] = []
        step = self._producers.get(operation.inputs[0])
        while step is not None and len(chain) < length:
            chain.insert(0, step)
            step = self._producers.get(step.inputs[0])
        return chain

    def after(self, operation: Operation, length: int) -> list[Operation]:
        """Up to so many operations that this one only leads to, in order."""
        chain: list[Operation] = []
        step = self._readers.get(operation.output)
        while step is not None and len(chain) < length:
            chain.append(step)
            step = self._readers.get(step.output)
        return chain


def _joined(mix: MixLeft, before: Sequence[Operation], after: Sequence[Operation]) -> MixHeads | None:
    """One operation for view, permute, view, mix, view, permute, view and dense; None where they are something else."""
    match [*before, *after]:
        case [View() as cut, Permute() as aside, View(), View(), Permute() as back, View() as whole, Linear() as dense]:
            pass
        case _:
            return None
    documents, length, heads, size = cut.shape if len(cut.shape) == 4 else (0, 0, 0, 0)
    found: list[Shape] = [cut.in_shape, aside.dims, mix.shape[::2], back.dims, back.shape[::2], whole.shape[::2]]
    width = heads * size
    usual: list[Shape] = [
        (documents, length, width), _ASIDE, (documents * heads, size), _ASIDE, (documents, heads), (documents, width)
    ]  # fmt: skip
    if found != usual or len(whole.shape) != 3 or mix.constant is not None:
        return None
    return MixHeads(
        inputs=cut.inputs,
        output=dense.output,
        shape=dense.shape,
        constant=dense.constant,
        matrix=mix.matrix,
        heads=heads,
        dense=dense,
    )
