"""Biases counted where they enter: into the tangent of the token at their position, or by position on the way back."""

from collections.abc import Hashable, Sequence

import numpy as np
import torch
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

    `groups` (D, n) is the number of each position's group; those of no group, -1, are added to nothing.
    """

    def __init__(self, groups: Tensor) -> None:
        self._groups, self._flat = groups, groups.cpu().numpy().ravel()
        self._found: dict[Hashable, tuple[int, Tensor, Tensor]] = {}
        self.start, self.stop = 0, 0  # the groups whose tangents are on their way

    def add(self, operation: Operation, out: Tensor) -> Tensor:
        """To tangents (B, *shape) of groups `start` to `stop`, in place where their memory allows it."""
        assert operation.constant is not None
        if operation.constants is not None:
            index = torch.arange(self.start, self.stop, device=out.device)[:, None, None]
            share = (self._groups == index).to(out.dtype)  # (B, D, n)
            return out.add_(torch.einsum("bdn,dnk->bdk", share, operation.constants))
        assert operation.owner is not None
        by_row, constant, out = operation.owner.is_by_row, operation.constant, out.contiguous()
        width = operation.shape[-1:] if by_row else ()
        index, chosen = self._rows(operation, operation.owner, out.device)
        if constant.ndim > 1 or not by_row:
            constant = constant.expand(operation.shape).reshape(-1, *width)[chosen]
        out.view(-1, *width).index_add_(0, index, constant.expand(len(index), *width))
        return out

    def _rows(self, operation: Operation, owner: Owner, device: torch.device) -> tuple[Tensor, Tensor]:
        """Rows of all tangents, numbered through, that a constant enters; and which rows of the constant these are."""
        found = self._found.get((owner, operation.shape))
        if found is None or found[0] != self.start:
            positions, _ = owner.rows(operation.shape)
            groups = self._flat[positions]
            (chosen,) = np.nonzero((groups >= self.start) & (groups < self.stop))
            rows = (groups[chosen] - self.start) * len(positions) + chosen
            # torch adds rows five times as fast by 32-bit numbers.
            index = torch.as_tensor(rows, dtype=torch.int32 if rows.max(initial=0) < 2**31 else None, device=device)
            found = self._found[owner, operation.shape] = self.start, index, torch.as_tensor(chosen, device=device)
        return found[1:]


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
