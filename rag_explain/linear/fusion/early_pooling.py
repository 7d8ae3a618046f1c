"""Pooling done before the operations that treat every position alike.

A pooling that sums over positions commutes with them: norm weights, residuals and the last dense layer then work on one
vector per text instead of one per position.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from rag_explain.linear.operations import Center, Linear, Operation, Pool, Reduce, Scale, Shape, Sum, View


def pool_early(operations: list[Operation], hidden: Tensor) -> list[Operation]:
    """Operations in which sums over positions, (D, n, k) -> (D, k), come as early as they can."""
    return _Pooling(operations, hidden).operations


class _Pooling:
    def __init__(self, operations: list[Operation], hidden: Tensor) -> None:
        self._documents, self._length = hidden.shape[:2]
        self._producers = {operation.output: operation for operation in operations}
        self._readers = Counter(slot for operation in operations for slot in operation.inputs)
        self._next = 1 + max((operation.output for operation in operations), default=0)
        self.operations: list[Operation] = []
        for operation in operations:
            if isinstance(operation, Reduce) and self._sums_positions(operation):
                weights = hidden.new_full((self._documents, self._length), operation.factor)
                slot = self._pooled(operation.inputs[0], weights, operation.in_shape)
                in_shape = (self._documents, operation.in_shape[-1])
                operation = View(inputs=(slot,), output=operation.output, shape=operation.shape, in_shape=in_shape)
            self.operations.append(operation)

    def _sums_positions(self, operation: Reduce) -> bool:
        leading = (self._documents, self._length)
        return operation.dims == (1,) and len(operation.in_shape) == 3 and operation.in_shape[:2] == leading

    def _emit(self, kind: type[Operation], *inputs: int, width: int, **settings: Any) -> int:
        self._next += 1
        shape = (self._documents, width)
        self.operations.append(kind(inputs=inputs, output=self._next, shape=shape, **settings))
        return self._next

    def _pooled(self, slot: int, weights: Tensor, shape: Shape) -> int:
        """The slot of sum_i weights[:, i] * x[:, i], (D, k), for the value x (D, n, k) in `slot`."""
        operation = self._producers.get(slot)
        width = shape[-1]
        if operation is not None and self._readers[slot] == 1:
            constant = self._constant(operation.constant, weights, shape)
            if isinstance(operation, Center) and operation.shape == shape:
                inner = self._pooled(operation.inputs[0], weights * operation.inverse[..., 0], shape)
                one = torch.ones_like(weights[:, :1])
                return self._emit(Center, inner, width=width, inverse=one, weight=operation.weight, constant=constant)
            if isinstance(operation, Scale) and operation.in_shape == shape:
                factor = operation.factor.reshape((1,) * (3 - operation.factor.ndim) + tuple(operation.factor.shape))
                if factor.shape[2] == 1 and constant is None:
                    return self._pooled(operation.inputs[0], weights * factor[..., 0], shape)
                if factor.shape[:2] == (1, 1):
                    inner = self._pooled(operation.inputs[0], weights, shape)
                    return self._emit(
                        Scale,
                        inner,
                        width=width,
                        in_shape=(self._documents, width),
                        factor=factor[0],
                        constant=constant,
                    )
            if isinstance(operation, Sum) and all(part == shape for part in operation.in_shapes):
                inner_slots = [self._pooled(part, weights, shape) for part in operation.inputs]
                in_shapes = ((self._documents, width),) * len(inner_slots)
                return self._emit(
                    Sum, *inner_slots, width=width, in_shapes=in_shapes, signs=operation.signs, constant=constant
                )
            dense = self._dense(operation, shape)
            if dense is not None:
                inner_width = dense.weight.shape[0]
                in_shape = (*dense.shape[:-1], inner_width)
                inner = self._emit(Pool, dense.inputs[0], width=inner_width, in_shape=in_shape, weights=weights)
                bias = self._constant(dense.constant, weights, shape)
                return self._emit(Linear, inner, width=width, constant=bias, weight=dense.weight)
        return self._emit(Pool, slot, width=width, in_shape=shape, weights=weights)

    def _dense(self, operation: Operation, shape: Shape) -> Linear | None:
        """The dense layer that this operation is, or that it is a view of: (D * n, k) seen as (D, n, k)."""
        if isinstance(operation, View):
            inner = self._producers.get(operation.inputs[0])
            rows = (self._documents * self._length, shape[-1])
            if inner is None or self._readers[inner.output] != 1 or inner.shape != rows:
                return None
            operation = inner
        return operation if isinstance(operation, Linear) else None

    def _constant(self, constant: Tensor | None, weights: Tensor, shape: Shape) -> Tensor | None:
        """What a constant of (D, n, k) adds up to over the positions: (D, k)."""
        if constant is None:
            return None
        if constant.ndim <= 1:
            return weights.sum(dim=1, keepdim=True) * constant
        whole = constant.reshape(shape) if constant.numel() == math.prod(shape) else constant.expand(shape)
        return (weights.unsqueeze(-1) * whole).sum(dim=1)
