"""Pooling done before the operations that treat every position alike.

A pooling that sums over positions commutes with them: norm weights, residuals and the last dense layer then work on one
vector per text instead of one per position. Each operation says by itself how (`Operation.pooled`).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor

from rag_explain.linear.operations import Operation, Pool, Reduce, Shape
from rag_explain.linear.rearrangements import View


def pool_early(operations: list[Operation], hidden: Tensor) -> list[Operation]:
    """Operations in which sums over positions, (D, n, k) -> (D, k), come as early as they can."""
    return EarlyPooling(operations, hidden).operations


class EarlyPooling:
    """The operations as they are written down anew."""

    def __init__(self, operations: list[Operation], hidden: Tensor) -> None:
        self._texts, self._length = hidden.shape[:2]
        self._producers = {operation.output: operation for operation in operations}
        self._readers = Counter(slot for operation in operations for slot in operation.inputs)
        self._next = 1 + max((operation.output for operation in operations), default=0)
        self.operations: list[Operation] = []
        for operation in operations:
            if isinstance(operation, Reduce) and self._sums_positions(operation):
                weights = hidden.new_full((self._texts, self._length), operation.factor)
                slot = self.pooled(operation.inputs[0], weights, operation.in_shape)
                in_shape = (self._texts, operation.in_shape[-1])
                operation = View(inputs=(slot,), output=operation.output, shape=operation.shape, in_shape=in_shape)
            self.operations.append(operation)

    def pooled(self, slot: int, weights: Tensor, shape: Shape) -> int:
        """The slot of sum_i weights[:, i] * x[:, i], (D, k), for the value x of this shape in `slot`."""
        operation = self._producers.get(slot)
        earlier = None
        if operation is not None and self._readers[slot] == 1:
            earlier = operation.pooled(self, weights)
        return self.emit(Pool, slot, width=shape[-1], in_shape=shape, weights=weights) if earlier is None else earlier

    def emit(self, kind: type[Operation], *inputs: int, width: int, **settings: Any) -> int:
        """Write down one operation whose output is (D, width); returns its slot."""
        self._next += 1
        self.operations.append(kind(inputs=inputs, output=self._next, shape=(self._texts, width), **settings))
        return self._next

    def _sums_positions(self, operation: Reduce) -> bool:
        leading = (self._texts, self._length)
        return operation.dims == (1,) and len(operation.in_shape) == 3 and operation.in_shape[:2] == leading
