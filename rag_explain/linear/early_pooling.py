"""Pooling done before the operations that treat every position alike.

A pooling that sums over positions commutes with them: norm weights, residuals and the last dense layer then work on one
vector per text instead of one per position. Each operation says by itself how (`Operation.pooled`).
"""

from collections import Counter

from torch import Tensor

from rag_explain.linear.operations import Operation, Pool, Reduce, Shape
from rag_explain.linear.rearrangements import View


class EarlyPooling:
    """`operations` in which sums over positions, (D, n, k) -> (D, k), come as early as they can."""

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
        earlier = operation.pooled(self, weights) if operation and self._readers[slot] == 1 else None
        return self.pool(slot, weights, shape) if earlier is None else earlier

    def pool(self, slot: int, weights: Tensor, shape: Shape) -> int:
        """The same, of the value as it is."""
        out_shape = (self._texts, shape[-1])
        return self.emit(Pool(inputs=(slot,), output=-1, shape=out_shape, in_shape=shape, weights=weights))

    def emit(self, operation: Operation) -> int:
        """Write down an operation, with a slot of its own that is returned."""
        self._next += 1
        operation.output = self._next
        self.operations.append(operation)
        return self._next

    def _sums_positions(self, operation: Reduce) -> bool:
        leading = (self._texts, self._length)
        return operation.dims == (1,) and len(operation.in_shape) == 3 and operation.in_shape[:2] == leading
