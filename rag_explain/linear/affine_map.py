"""A frozen encoder: the affine map that an encoder is at one text, ready to be run on tangents in either direction."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rag_explain.linear.fusion import FUSED, Fusion
from rag_explain.linear.fusion.early_pooling import pool_early
from rag_explain.linear.fusion.heads import join_heads
from rag_explain.linear.fusion.token_local import Chunk, LocalValue, TokenLocalPrefix, find_prefix
from rag_explain.linear.identity import storage_of
from rag_explain.linear.operations import Operation
from rag_explain.linear.workspace import Workspace

# Tangents are cut into chunks whose intermediate values fit in this many bytes: large enough that every product is a
# big one, small enough to stay near the processor and never to be the reason a machine runs out of memory.
DEFAULT_MAX_BYTES = 64 * 2**20


class AffineMap:
    """embedding = linear(hidden) + rest, with coefficients frozen at one batch of texts.

    Attributes:
        hidden: (D, n, h) the values at the input of the block where the map begins.
        embedding: (D, e) the encoder's own output, before it is normalised.
    """

    def __init__(
        self,
        operations: Sequence[Operation],
        source: int,
        output: int,
        hidden: Tensor,
        embedding: Tensor,
        fusion: Fusion = FUSED,
    ) -> None:
        needed = _needed(operations, output)
        if fusion.heads:
            needed = join_heads(needed)
        if fusion.early_pooling:
            needed = _needed(pool_early(needed, hidden), output)
        self._prefix = find_prefix(needed, source, tuple(hidden.shape)) if fusion.token_local else None
        self.operations = [*self._prefix.operations, *self._prefix.suffix] if self._prefix else needed
        self.hidden = hidden
        self.embedding = embedding
        self._source = source
        self._output = output
        self._biases: Tensor | None = None
        for operation in self.operations:
            operation.cast(hidden.dtype)
        self._last_use = _last_use(self.operations, output)
        self._per_tangent = _peak(self.operations, self._last_use, source, hidden.shape) * hidden.element_size()

    def push(self, tangents: Tensor, *, bias: int | None = None) -> Tensor:
        """Send tangents (B, D, n, h) forward: (B, D, e). Tangent `bias` also collects every bias on the way."""
        push = _Push({self._source: tangents}, self._last_use, Workspace(), bias, keep=tangents)
        push.run(self.operations)
        return push.live[self._output]

    def pull(self, cotangents: Tensor) -> Tensor:
        """Send cotangents (C, D, e) back to the input: (C, D, n, h)."""
        gathered: dict[int, Tensor] = {self._output: cotangents}
        for operation in reversed(self.operations):
            cotangent = gathered.pop(operation.output, None)
            if cotangent is None:
                continue
            for slot, part in zip(operation.inputs, operation.pull(cotangent), strict=True):
                gathered[slot] = gathered[slot] + part if slot in gathered else part
        source = gathered.get(self._source)
        return cotangents.new_zeros(cotangents.shape[0], *self.hidden.shape) if source is None else source

    def rest(self, cotangents: Tensor) -> Tensor:
        """<cotangent, what the biases contribute>, (C, D): one tangent, pushed once, for any number of cotangents."""
        if self._biases is None:
            self._biases = self.push(torch.zeros_like(self.hidden)[None], bias=0)[0]
        return torch.einsum("cde,de->cd", cotangents, self._biases)

    def chunk(self, max_bytes: int) -> int:
        """How many tangents can travel at once when their values may take `max_bytes`."""
        return max(1, max_bytes // max(1, self._per_tangent))

    def rows(
        self, max_bytes: int = DEFAULT_MAX_BYTES, weights: Tensor | None = None, groups: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """What each token of each text contributes, (D, n, e), and what the biases do, (D, e): n + 1 tangents.

        Token t's tangent is its own hidden value at position t and zero elsewhere, for all texts at once (they do not
        meet in the forward pass).

        Args:
            max_bytes: that tangents on their way may take.
            weights: (D, n, h) replaces the hidden values, for paths that do not start at 0.
            groups: (D, n) makes one row of all tokens with the same number, in 0..G-1, and none of those with -1. Rows
                are then (D, G, e), the sums of the tokens' rows, at the cost of G + 1 tangents.
        """
        count = self.hidden.shape[1] if groups is None else _count(groups)
        if count + 1 > self.embedding.shape[-1]:  # more rows than dimensions: the other way is shorter
            return self.pull_rows(max_bytes, weights, groups)
        return self.push_rows(max_bytes, weights, groups)

    def pull_rows(
        self, max_bytes: int = DEFAULT_MAX_BYTES, weights: Tensor | None = None, groups: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`rows`, one cotangent per dimension of the embedding."""
        texts, width = self.embedding.shape
        every = torch.eye(width, dtype=self.hidden.dtype, device=self.hidden.device)[:, None, :]
        relevance, rest = self.relevance(every.expand(-1, texts, -1), max_bytes, weights)
        rows = relevance.permute(1, 2, 0)
        return rows if groups is None else _sum_groups(rows, groups), rest.transpose(0, 1)

    def push_rows(
        self, max_bytes: int = DEFAULT_MAX_BYTES, weights: Tensor | None = None, groups: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`rows`, one tangent per token or group and one for the biases, in chunks."""
        values = self.hidden if weights is None else weights
        if groups is None and self._prefix is not None:
            return self._push_tokens(max_bytes, values, self._prefix)
        if groups is None:
            groups = torch.arange(values.shape[1], device=values.device).expand(values.shape[:2])
        return self._push_groups(max_bytes, values, groups)

    def _push_tokens(self, max_bytes: int, values: Tensor, prefix: TokenLocalPrefix) -> tuple[Tensor, Tensor]:
        """One tangent per token; together up to where positions first mix."""
        together = {self._source: torch.stack([values, torch.zeros_like(values)])}
        first = _Push(together, self._last_use, Workspace(), bias=1)
        first.run(prefix.operations)
        local = {slot: LocalValue(first.live[slot][0], first.live[slot][1], axis) for slot, axis in prefix.axes.items()}

        def push(start: int, stop: int, space: Workspace, bias: int | None) -> Tensor:
            chunk = Chunk(local, start, stop - (bias is not None), has_bias=bias is not None)
            part = _Push({}, self._last_use, space, bias, chunk=chunk)
            part.run(prefix.suffix)
            return part.live[self._output]

        return self._in_chunks(max_bytes, values.shape[1], push)

    def _push_groups(self, max_bytes: int, values: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
        """One tangent per group of tokens: their values, and zero elsewhere. groups (D, n), -1 for tokens in none."""

        def push(start: int, stop: int, space: Workspace, bias: int | None) -> Tensor:
            index = torch.arange(start, stop, device=groups.device)[:, None, None]
            tangents = values * (groups == index).unsqueeze(-1)  # all zero for the biases: there is no such group
            part = _Push({self._source: tangents}, self._last_use, space, bias)
            part.run(self.operations)
            return part.live[self._output]

        return self._in_chunks(max_bytes, _count(groups), push)

    def _in_chunks(
        self, max_bytes: int, count: int, push: Callable[[int, int, Workspace, int | None], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Push `count` tangents and, as the last one, that of the biases: (D, count, e) and (D, e)."""
        result = self.hidden.new_empty(count + 1, *self.embedding.shape)
        step, space = self.chunk(max_bytes), Workspace()
        for start in range(0, count + 1, step):
            stop = min(start + step, count + 1)
            with torch.inference_mode():  # many small operations: torch does less around each
                result[start:stop] = push(start, stop, space, -1 if stop > count else None)
        return result[:count].transpose(0, 1), result[count]

    def relevance(
        self, cotangents: Tensor, max_bytes: int = DEFAULT_MAX_BYTES, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """<cotangent, row of each token>, (C, D, n), and <cotangent, rest>, (C, D), without building rows: C pulls."""
        values = self.hidden if weights is None else weights
        step = self.chunk(max_bytes)
        tokens = [(self.pull(part) * values).sum(dim=-1) for part in cotangents.split(step)]
        return torch.cat(tokens), self.rest(cotangents)


class _Push:
    """Tangents on their way forward, by slot; those that no later operation reads are let go.

    Args:
        live: the tangents that are there at the beginning.
        last_use: for each operation, by its output, the slots that are not read after it.
        bias: the tangent that collects the operations' constants.
        chunk: tangents that are not spread out yet.
        keep: memory that must not be written to.
    """

    def __init__(
        self,
        live: dict[int, Tensor],
        last_use: dict[int, list[int]],
        space: Workspace,
        bias: int | None,
        *,
        chunk: Chunk | None = None,
        keep: Tensor | None = None,
    ) -> None:
        self.live = live
        self._last_use = last_use
        self._space = space
        self._bias = bias
        self._chunk = chunk
        self._keep = keep

    def run(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            missing = self._spread(operation)
            inputs = [self.live[slot] for slot in operation.inputs if slot not in missing]
            free = self._release(operation)
            spent = [any(tangent is one for one in free) for tangent in inputs] if operation.overwrites else ()
            if missing:
                assert self._chunk is not None
                out = self._chunk.run(operation, self._space, spent, inputs)
            else:
                out = operation.run(self._space, spent, *inputs)
            if self._bias is not None and operation.constant is not None:
                out[self._bias].add_(operation.constant)
            self.live[operation.output] = out
            for tangent in free:
                if storage_of(tangent) != storage_of(out):
                    self._space.give(tangent)

    def _spread(self, operation: Operation) -> list[int]:
        """Spread out what the operation reads, unless there is a shortcut; returns what is still missing."""
        missing = [slot for slot in operation.inputs if slot not in self.live]
        if missing and self._chunk is not None and not self._chunk.has_shortcut(operation, missing):
            for slot in missing:
                self.live[slot] = self._chunk.spread(slot)
            return []
        return missing

    def _release(self, operation: Operation) -> list[Tensor]:
        """Let go of tangents after their last use; returns those that may be overwritten.

        They may if no live tangent shares their storage, and if each of their elements has its own place in it.
        """
        dead = [self.live.pop(slot) for slot in self._last_use[operation.output] if slot in self.live]
        if not dead:
            return []
        others = self.live.values() if self._keep is None else (*self.live.values(), self._keep)
        taken = [storage_of(tangent) for tangent in (*dead, *others)]
        return [t for t, place in zip(dead, taken, strict=False) if taken.count(place) == 1 and 0 not in t.stride()]


def _count(groups: Tensor) -> int:
    return int(groups.max()) + 1


def _sum_groups(rows: Tensor, groups: Tensor) -> Tensor:
    """Rows (D, n, e) summed by group, (D, G, e)."""
    count = _count(groups)
    index = torch.where(groups < 0, count, groups).unsqueeze(-1).expand_as(rows)
    return rows.new_zeros(len(rows), count + 1, rows.shape[-1]).scatter_add_(1, index, rows)[:, :count]


def _needed(operations: Sequence[Operation], output: int) -> list[Operation]:
    """The operations that the output depends on: under frozen attention, queries and keys fall away here."""
    wanted = {output}
    kept: list[Operation] = []
    for operation in reversed(operations):
        if operation.output in wanted:
            kept.append(operation)
            wanted.update(operation.inputs)
    return kept[::-1]


def _last_use(operations: Sequence[Operation], output: int) -> dict[int, list[int]]:
    """For each operation, by its output, the slots that nothing reads after it."""
    seen = {output}
    dying: dict[int, list[int]] = {}
    for operation in reversed(operations):
        last = [slot for slot in dict.fromkeys((*operation.inputs, operation.output)) if slot not in seen]
        seen.update(last)
        dying[operation.output] = last
    return dying


def _peak(operations: Sequence[Operation], dying: dict[int, list[int]], source: int, shape: Sequence[int]) -> int:
    """The largest number of elements alive at once for one tangent, with what each step needs for itself."""
    live = {source: math.prod(shape)}
    peak = live[source]
    for operation in operations:
        size = math.prod(operation.shape)
        peak = max(peak, sum(live.values()) + operation.scratch * size)
        live[operation.output] = size
        for slot in dying[operation.output]:
            live.pop(slot, None)
    return peak
