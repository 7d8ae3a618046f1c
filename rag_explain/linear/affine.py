"""A frozen encoder: the affine map that an encoder is at one text, ready to be run on tangents in either direction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from rag_explain.linear.operations import Operation, Workspace, count

# Tangents are cut into chunks whose intermediate values fit in this many bytes: large enough that every product is a
# big one, small enough to stay near the processor and never to be the reason a machine runs out of memory.
DEFAULT_BUDGET = 64 * 2**20


class AffineMap:
    """embedding = linear(hidden) + rest, with coefficients frozen at one batch of texts.

    Attributes:
        hidden: (D, n, h) the values at the input of the block where the map begins.
        embedding: (D, e) the encoder's own output, before it is normalised.
    """

    def __init__(
        self, operations: Sequence[Operation], source: int, output: int, hidden: Tensor, embedding: Tensor
    ) -> None:
        self.operations = _needed(operations, output)
        self.hidden = hidden
        self.embedding = embedding
        self._source = source
        self._output = output
        for operation in self.operations:
            operation.cast(hidden.dtype)
        self._last_use = _last_use(self.operations, output)
        self._per_tangent = _peak(self.operations, self._last_use, source, hidden.shape) * hidden.element_size()

    def push(self, tangents: Tensor, *, bias: int | None = None, space: Workspace | None = None) -> Tensor:
        """Send tangents (B, D, n, h) forward: (B, D, e). Tangent `bias` also collects every bias on the way.

        With a workspace, the tangents themselves are used up.
        """
        keep = tangents if space is None else None
        space = space or Workspace()
        live = {self._source: tangents}
        for operation, dying in zip(self.operations, self._last_use, strict=True):
            inputs = [live[slot] for slot in operation.inputs]
            dead = [live.pop(slot) for slot in dying if slot in live]
            spent: list[bool] = []
            if operation.overwrites:
                spent = [any(t is d for d in dead) and _alone(t, live.values(), keep) for t in inputs]
            out = operation.run(space, spent, *inputs)
            if bias is not None and operation.constant is not None:
                out[bias] += operation.constant
            live[operation.output] = out
            for tangent in dead:
                if _alone(tangent, live.values(), keep):
                    space.give(tangent)
        return live[self._output]

    def pull(self, cotangents: Tensor) -> tuple[Tensor, Tensor]:
        """Send cotangents (C, D, e) back: to the input, (C, D, n, h), and what the biases contribute, (C, D)."""
        documents = self.hidden.shape[0]
        gathered: dict[int, Tensor] = {self._output: cotangents}
        rest = cotangents.new_zeros(cotangents.shape[0], documents)
        for operation in reversed(self.operations):
            cotangent = gathered.pop(operation.output, None)
            if cotangent is None:
                continue
            if operation.constant is not None:
                # Documents lead in every value of a forward pass, alone or merged with the axes behind them.
                rest += (cotangent * operation.constant).reshape(len(cotangent), documents, -1).sum(dim=-1)
            for slot, part in zip(operation.inputs, operation.pull(cotangent), strict=True):
                gathered[slot] = gathered[slot] + part if slot in gathered else part
        source = gathered.get(self._source)
        if source is None:
            source = cotangents.new_zeros(cotangents.shape[0], *self.hidden.shape)
        return source, rest

    def chunk(self, budget: int) -> int:
        """How many tangents can travel at once when their values may take `budget` bytes."""
        return max(1, budget // max(1, self._per_tangent))

    def rows(self, budget: int = DEFAULT_BUDGET, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """What each token of each document contributes, (D, n, e), and what the biases do, (D, e): n + 1 tangents.

        Token t's tangent is its own hidden value at position t and zero elsewhere, for all documents at once (they do
        not meet in the forward pass). `weights` (D, n, h) replaces the hidden values, for paths that do not start at 0.
        """
        values = self.hidden if weights is None else weights
        documents, length, _ = values.shape
        width = self.embedding.shape[-1]
        if length + 1 > width:  # more tokens than dimensions: the other way round is shorter
            every = torch.eye(width, dtype=values.dtype, device=values.device)[:, None, :].expand(-1, documents, -1)
            tokens, rest = self.relevance(every, budget, weights)
            return tokens.permute(1, 2, 0), rest.transpose(0, 1)
        result = values.new_empty(length + 1, documents, width)
        space = Workspace()
        step = self.chunk(budget)
        for start in range(0, length + 1, step):
            stop = min(start + step, length + 1)
            tangents = values.new_zeros(stop - start, *values.shape)
            here = torch.arange(start, min(stop, length), device=values.device)
            tangents[here - start, :, here] = values[:, here].transpose(0, 1)
            result[start:stop] = self.push(tangents, bias=length - start if stop == length + 1 else None, space=space)
        return result[:length].transpose(0, 1), result[length]

    def relevance(
        self, cotangents: Tensor, budget: int = DEFAULT_BUDGET, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """<cotangent, row of each token>, (C, D, n), and <cotangent, rest>, (C, D), without building rows: C pulls."""
        values = self.hidden if weights is None else weights
        step = self.chunk(budget)
        tokens, rests = [], []
        for part in cotangents.split(step):
            source, rest = self.pull(part)
            tokens.append((source * values).sum(dim=-1))
            rests.append(rest)
        return torch.cat(tokens), torch.cat(rests)


def _alone(tangent: Tensor, others: Iterable[Tensor], keep: Tensor | None) -> bool:
    """Whether nobody else reads this tangent's memory, and every element of it is an element of the tangent."""
    memory = tangent.untyped_storage().data_ptr()
    if keep is not None and keep.untyped_storage().data_ptr() == memory:
        return False
    if any(other.untyped_storage().data_ptr() == memory for other in others):
        return False
    return 0 not in tangent.stride()


def _needed(operations: Sequence[Operation], output: int) -> list[Operation]:
    """The operations that the output depends on: under frozen attention, queries and keys fall away here."""
    wanted = {output}
    kept: list[Operation] = []
    for operation in reversed(operations):
        if operation.output in wanted:
            kept.append(operation)
            wanted.update(operation.inputs)
    return kept[::-1]


def _last_use(operations: Sequence[Operation], output: int) -> list[list[int]]:
    """For each step, the slots that nothing reads after it."""
    seen = {output}
    dying: list[list[int]] = []
    for operation in reversed(operations):
        last = [slot for slot in dict.fromkeys((*operation.inputs, operation.output)) if slot not in seen]
        seen.update(last)
        dying.append(last)
    return dying[::-1]


def _peak(operations: Sequence[Operation], last_use: Sequence[Sequence[int]], source: int, shape: Sequence[int]) -> int:
    """The largest number of elements alive at once for one tangent; twice the output of a step, for its own scratch."""
    live = {source: count(shape)}
    peak = live[source]
    for operation, dying in zip(operations, last_use, strict=True):
        size = count(operation.shape)
        peak = max(peak, sum(live.values()) + 2 * size)
        live[operation.output] = size
        for slot in dying:
            live.pop(slot, None)
    return peak
