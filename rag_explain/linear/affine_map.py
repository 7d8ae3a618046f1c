"""A frozen encoder: the affine map that an encoder is at one text, ready to be run on tangents in either direction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from rag_explain.linear.fusion.early_pooling import pool_early
from rag_explain.linear.fusion.heads import join_heads
from rag_explain.linear.fusion.token_local import Chunk, Tokens, find_prefix
from rag_explain.linear.operations import Operation, count
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
        self, operations: Sequence[Operation], source: int, output: int, hidden: Tensor, embedding: Tensor
    ) -> None:
        needed = _needed(pool_early(join_heads(_needed(operations, output)), hidden), output)
        self._prefix = find_prefix(needed, source, tuple(hidden.shape))
        self.operations = [*self._prefix.operations, *self._prefix.rest]
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
        live = {self._source: tangents}
        self._run(self.operations, live, Workspace(), bias, keep=tangents)
        return live[self._output]

    def _run(
        self,
        operations: Sequence[Operation],
        live: dict[int, Tensor],
        space: Workspace,
        bias: int | None,
        *,
        chunk: Chunk | None = None,
        keep: Tensor | None = None,
    ) -> None:
        """Run operations on the live tangents, by slot; what nobody reads any more is let go.

        `chunk` stands for tangents that are not spread out yet; `keep` is memory that must not be written to.
        """
        for operation in operations:
            inputs = [live[slot] for slot in operation.inputs if slot in live]
            if chunk is not None and len(inputs) < len(operation.inputs):
                chunk.prepare(operation, live)
                inputs = [live[slot] for slot in operation.inputs if slot in live]
            dead = [live.pop(slot) for slot in self._last_use[operation.output] if slot in live]
            free = _alone(dead, live.values(), keep) if dead else dead
            spent = [any(t is f for f in free) for t in inputs] if operation.overwrites else ()
            if len(inputs) < len(operation.inputs):
                assert chunk is not None
                out = chunk.run(operation, space, spent, inputs)
            else:
                out = operation.run(space, spent, *inputs)
            if bias is not None and operation.constant is not None:
                out[bias].add_(operation.constant)
            live[operation.output] = out
            if free:
                memory = _memory(out)
                for tangent in free:
                    if _memory(tangent) != memory:
                        space.give(tangent)

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
        """How many tangents can travel at once when their values may take `max_bytes` bytes."""
        return max(1, max_bytes // max(1, self._per_tangent))

    def rows(self, max_bytes: int = DEFAULT_MAX_BYTES, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """What each token of each document contributes, (D, n, e), and what the biases do, (D, e): n + 1 tangents.

        Token t's tangent is its own hidden value at position t and zero elsewhere, for all documents at once (they do
        not meet in the forward pass). `weights` (D, n, h) replaces the hidden values, for paths that do not start at 0.
        """
        if self.hidden.shape[1] + 1 > self.embedding.shape[-1]:  # more tokens than dimensions: the other way is shorter
            return self.pull_rows(max_bytes, weights)
        return self.push_rows(max_bytes, weights)

    def pull_rows(self, max_bytes: int = DEFAULT_MAX_BYTES, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`rows`, one cotangent per dimension of the embedding."""
        documents, width = self.embedding.shape
        every = torch.eye(width, dtype=self.hidden.dtype, device=self.hidden.device)[:, None, :]
        relevance, rest = self.relevance(every.expand(-1, documents, -1), max_bytes, weights)
        return relevance.permute(1, 2, 0), rest.transpose(0, 1)

    def push_rows(self, max_bytes: int = DEFAULT_MAX_BYTES, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`rows`, one tangent per token and one for the biases, in chunks; together up to where positions first mix."""
        values = self.hidden if weights is None else weights
        space = Workspace()
        documents, length, _ = values.shape
        together = {self._source: torch.stack([values, torch.zeros_like(values)])}
        self._run(self._prefix.operations, together, Workspace(), bias=1)
        tokens = {
            slot: Tokens(together[slot][0], together[slot][1], place, (documents, length))
            for slot, place in self._prefix.places.items()
        }
        result = values.new_empty(length + 1, documents, self.embedding.shape[-1])
        step = self.chunk(max_bytes)
        for start in range(0, length + 1, step):
            stop = min(start + step, length + 1)
            chunk = Chunk(tokens, start, min(stop, length), has_bias=stop > length)
            live: dict[int, Tensor] = {}
            with torch.inference_mode():  # many small operations: torch does less around each
                self._run(self._prefix.rest, live, space, -1 if chunk.has_bias else None, chunk=chunk)
                result[start:stop] = live[self._output]
        return result[:length].transpose(0, 1), result[length]

    def relevance(
        self, cotangents: Tensor, max_bytes: int = DEFAULT_MAX_BYTES, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """<cotangent, row of each token>, (C, D, n), and <cotangent, rest>, (C, D), without building rows: C pulls."""
        values = self.hidden if weights is None else weights
        step = self.chunk(max_bytes)
        tokens = [(self.pull(part) * values).sum(dim=-1) for part in cotangents.split(step)]
        return torch.cat(tokens), self.rest(cotangents)


def _alone(dead: Sequence[Tensor], others: Iterable[Tensor], keep: Tensor | None) -> list[Tensor]:
    """Those of the dead tangents whose memory nobody else reads, and every element of which is the tangent's own."""
    taken = [_memory(tangent) for tangent in (*dead, *others)]
    if keep is not None:
        taken.append(_memory(keep))
    return [
        tangent
        for tangent, memory in zip(dead, taken, strict=False)
        if taken.count(memory) == 1 and 0 not in tangent.stride()
    ]


def _memory(tangent: Tensor) -> int:
    return tangent.untyped_storage().data_ptr()


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
    live = {source: count(shape)}
    peak = live[source]
    for operation in operations:
        size = count(operation.shape)
        peak = max(peak, sum(live.values()) + operation.scratch * size)
        live[operation.output] = size
        for slot in dying[operation.output]:
            live.pop(slot, None)
    return peak
