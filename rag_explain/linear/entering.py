"""Biases counted where they enter: into the tangent of the token at their position, or by position on the way back."""

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rag_explain.linear.operations import Operation
from rag_explain.linear.owners import Owner


def find_owners(operations: Sequence[Operation], source: int, texts: int, length: int) -> None:
    """Tell every operation that adds a constant which positions its output belongs to."""
    owners: dict[int, Owner | None] = {source: Owner.of_hidden(texts, length)}
    known: dict[Hashable, Owner] = {}
    for operation in operations:
        owner = operation.owner_of(*(owners[slot] for slot in operation.inputs))
        if operation.constant is not None:
            operation.owner = owner = owner and known.setdefault(owner.content, owner)
        owners[operation.output] = owner
    if length == 1:
        _disown_pooled(operations)


def _disown_pooled(operations: Sequence[Operation]) -> None:
    """Of one position, (D, n, k) and (D, k) hold the same: pooled is what has no axis for it from there to the end."""
    pooled = {operations[-1].output} if operations else set[int]()
    for operation in reversed(operations):
        if operation.output in pooled and len(operation.shape) == 2:
            operation.owner = None
            pooled.update(operation.inputs)


def enters_at_positions(operation: Operation) -> bool:
    """Whether the operation's constant can be told apart by position; one without, such as a bias after pooling, is
    what no token owns."""
    return operation.owner is not None or operation.constants is not None


class Entering:
    """Adds constants to the tangents of the groups of tokens whose positions they enter at.

    `groups` (D, n) is the number of each position's group, in main memory; those of no group, -1, are added to nothing.
    """

    def __init__(self, groups: Tensor, device: torch.device) -> None:
        self._groups, self._flat = groups.to(device), groups.numpy().ravel()
        self._found: dict[Hashable, tuple[NDArray[Any], Tensor]] = {}
        self._here: dict[Hashable, tuple[Tensor, Tensor]] = {}

    def choose(self, start: int, stop: int) -> Tensor:
        """The groups whose tangents are on their way from now on: (B, D, n) which positions belong to each."""
        self._ends, self._here = (start, stop), {}
        self._share = self._groups == torch.arange(start, stop, device=self._groups.device)[:, None, None]
        return self._share

    def add(self, operation: Operation, out: Tensor) -> Tensor:
        """To tangents (B, *shape) of the chosen groups, in place where their memory allows it."""
        assert operation.constant is not None
        if operation.constants is not None:
            return out.add_(torch.einsum("bdn,dnk->bdk", self._share.to(out.dtype), operation.constants))
        assert operation.owner is not None
        by_row, constant, out = operation.owner.is_by_row, operation.constant, out.contiguous()
        width = operation.shape[-1:] if by_row else ()
        index, chosen = self._rows(operation, operation.owner)
        if constant.ndim > 1 or not by_row:
            constant = constant.expand(operation.shape).reshape(-1, *width)[chosen]
        out.view(-1, *width).index_add_(0, index, constant.expand(len(index), *width))
        return out

    def _rows(self, operation: Operation, owner: Owner) -> tuple[Tensor, Tensor]:
        """Rows of all tangents, numbered through, that a constant enters; and which rows of the constant these are."""
        key = None if owner.has_all_in_order(operation.shape) else (owner, operation.shape)
        if key in self._here:
            return self._here[key]
        positions, _ = owner.rows(operation.shape)
        if key not in self._found:
            groups = self._flat[positions]
            order = np.argsort(groups, kind="stable")
            order = order[np.searchsorted(groups[order], 0) :]
            groups = groups[order]
            rows = np.stack([groups * len(positions) + order, order])
            # torch adds rows five times as fast by 32-bit numbers. Moved once for all tangents.
            kind = torch.int32 if rows.max(initial=0) < 2**31 else None
            self._found[key] = groups, torch.as_tensor(rows, dtype=kind).to(self._groups.device)
        owned, every = self._found[key]
        first, last = np.searchsorted(owned, self._ends)
        index, chosen = every[:, first:last]
        start = self._ends[0] * len(positions)
        self._here[key] = (index - start if start else index), chosen
        return self._here[key]


def collect(operation: Operation, cotangent: Tensor, entered: Tensor) -> None:
    """Add <cotangent, constant> (C, *shape) to what enters at each position, (C, D, n)."""
    assert operation.constant is not None
    if operation.constants is not None:
        entered += torch.einsum("cdk,dnk->cdn", cotangent, operation.constants)
        return
    assert operation.owner is not None
    constant, owner = operation.constant, operation.owner
    is_vector = constant.ndim == 1 and len(constant) > 1
    if is_vector and owner.is_by_row and owner.has_all_in_order(operation.shape):
        entered.view(-1).addmv_(cotangent.reshape(-1, len(constant)), constant)  # by far the most: in one go
        return
    if not owner.is_by_row:
        parts = cotangent * constant
    elif is_vector:
        parts = cotangent @ constant
    else:
        parts = (cotangent * constant).sum(dim=-1)
    positions, _ = owner.rows(operation.shape)
    flat = entered.view(len(entered), -1)
    flat.index_add_(1, torch.as_tensor(positions, device=flat.device), parts.reshape(len(parts), -1))
