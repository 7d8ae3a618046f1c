"""A frozen encoder: the affine map that an encoder is at one text, ready to be run on tangents in either direction."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from rag_explain.devices import in_parts, room_for_tangents
from rag_explain.linear.early_pooling import EarlyPooling
from rag_explain.linear.entering import Entering, collect, enters_at_positions, find_owners
from rag_explain.linear.identity import storage_of
from rag_explain.linear.operations import Operation
from rag_explain.linear.workspace import Workspace


class AffineMap:
    """embedding = linear(hidden) + what biases contribute, with coefficients frozen at one batch of texts.

    Attributes:
        hidden: (D, n, h) the values at the input of the block where the map begins.
        embedding: (D, e) the encoder's own output, before it is normalised.

    Args:
        biases_by_position: whether a bias is counted for the token at whose position it enters. What enters after
            pooling is still the rest. Otherwise all biases are.
    """

    def __init__(
        self,
        operations: Sequence[Operation],
        source: int,
        output: int,
        hidden: Tensor,
        embedding: Tensor,
        *,
        early_pooling: bool = True,
        biases_by_position: bool = False,
    ) -> None:
        self.operations = _needed(operations, output)
        if biases_by_position:
            find_owners(self.operations, source, *hidden.shape[:2])
        if early_pooling:
            self.operations = _needed(EarlyPooling(self.operations, hidden).operations, output)
        self.hidden, self.embedding = hidden, embedding
        self._source, self._output = source, output
        self._biases: Tensor | None = None
        apart = [one for one in self.operations if one.constant is not None and not enters_at_positions(one)]
        self._has_rest = bool(apart)
        for operation in self.operations:
            operation.cast(hidden.dtype)
        self._last_use = _last_use(self.operations, output)
        self._per_tangent = _peak(self.operations, self._last_use, source, hidden.shape) * hidden.element_size()

    def like(self, operations: list[Operation], hidden: Tensor, embedding: Tensor) -> AffineMap:
        """A map of the same structure with these coefficients."""
        other = copy.copy(self)
        other.operations, other.hidden, other.embedding, other._biases = operations, hidden, embedding, None
        return other

    def to(self, dtype: torch.dtype) -> AffineMap:
        """The same map with coefficients and tangents in another precision; its embedding stays as it was."""
        operations = list(map(copy.copy, self.operations))
        for operation in operations:
            operation.cast(dtype)
        other = self.like(operations, self.hidden.to(dtype), self.embedding)
        other._per_tangent = self._per_tangent * other.hidden.element_size() // self.hidden.element_size()
        return other

    def push(self, tangents: Tensor, *, bias: int | None = None) -> Tensor:
        """Send tangents (B, D, n, h) forward: (B, D, e). Tangent `bias` also collects the biases of the rest."""
        return self._run(tangents, Workspace(), bias, keep=tangents)

    def _run(
        self,
        tangents: Tensor,
        space: Workspace,
        bias: int | None,
        keep: Tensor | None = None,
        entering: Entering | None = None,
    ) -> Tensor:
        """`push` with the memory of a workspace; tangents may be overwritten unless their memory is to be kept."""
        live, places = {self._source: tangents}, {self._source: storage_of(tangents)}
        kept = None if keep is None else storage_of(keep)
        for operation in self.operations:
            inputs = [live[slot] for slot in operation.inputs]
            dead = [(live.pop(slot), places.pop(slot)) for slot in self._last_use[operation.output] if slot in live]
            taken = [kept, *places.values(), *(place for _, place in dead)] if dead else []
            free = [(one, place) for one, place in dead if taken.count(place) == 1 and 0 not in one.stride()]
            spent = [any(tangent is one for one, _ in free) for tangent in inputs] if operation.overwrites else ()
            out = operation.run(space, spent, *inputs)
            if operation.constant is not None:
                if enters_at_positions(operation):
                    if entering is not None:
                        out = entering.add(operation, out)
                elif bias is not None:
                    out[bias].add_(operation.constant)
            live[operation.output], places[operation.output] = out, storage_of(out)
            for tangent, place in free:
                if place != places[operation.output]:
                    space.give(tangent)
        return live[self._output]

    def pull(self, cotangents: Tensor, space: Workspace | None = None, entered: Tensor | None = None) -> Tensor:
        """Send cotangents (C, D, e) back to the input: (C, D, n, h).

        To `entered` (C, D, n) is added what they make of the biases that enter at each position.
        """
        space = space or Workspace()
        gathered: dict[int, Tensor] = {self._output: cotangents}
        for operation in reversed(self.operations):
            cotangent = gathered.pop(operation.output, None)
            if cotangent is None:
                continue
            if entered is not None and operation.constant is not None and enters_at_positions(operation):
                collect(operation, cotangent, entered)
            spent = bool(_overwritable([cotangent], (*gathered.values(), cotangents)))
            parts = operation.run_back(space, spent, cotangent)
            if spent and storage_of(cotangent) not in map(storage_of, parts):
                space.give(cotangent)
            for slot, part in zip(operation.inputs, parts, strict=True):
                there = gathered.pop(slot, None)
                if there is not None:
                    is_free = _overwritable([there], (*gathered.values(), *parts, cotangents))
                    part = there.add_(part) if is_free else there + part
                gathered[slot] = part
        source = gathered.get(self._source)
        return cotangents.new_zeros(cotangents.shape[0], *self.hidden.shape) if source is None else source

    def rest(self, cotangents: Tensor) -> Tensor:
        """<cotangent, the rest>, (C, D): one tangent, pushed once, for any number of cotangents."""
        if not self._has_rest:
            return cotangents.new_zeros(cotangents.shape[:2])
        if self._biases is None:
            self._biases = self.push(torch.zeros_like(self.hidden)[None], bias=0)[0]
        return torch.einsum("cde,de->cd", cotangents, self._biases)

    def chunk(self, max_bytes: int | None, count: int) -> int:
        """How many of `count` tangents travel at once when their values may take `max_bytes`: chunks of one size."""
        max_bytes = room_for_tangents(self.hidden.device) if max_bytes is None else max_bytes
        most = max(1, max_bytes // max(1, self._per_tangent))
        return math.ceil(count / max(1, math.ceil(count / most)))

    def rows(
        self, max_bytes: int | None = None, weights: Tensor | None = None, groups: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """What each token of each text contributes, (D, n, e), and the rest, (D, e): n + 1 tangents, or n without rest.

        Token t's tangent is its own hidden value at position t and zero elsewhere, for all texts at once (they do not
        meet in the forward pass).

        Args:
            max_bytes: that tangents on their way may take; None: what suits the device.
            weights: (D, n, h) replaces the hidden values, for paths that do not start at 0.
            groups: (D, n), in main memory, makes one row of all tokens with the same number, in 0..G-1, and none of
                those with -1. Rows are then (D, G, e), the sums of the tokens' rows, at the cost of G + 1 tangents.
        """
        count = self.hidden.shape[1] if groups is None else _count(groups)
        if count + 1 > self.embedding.shape[-1]:  # more rows than dimensions: the other way is shorter
            return self.pull_rows(max_bytes, weights, groups)
        return self.push_rows(max_bytes, weights, groups)

    def pull_rows(
        self, max_bytes: int | None = None, weights: Tensor | None = None, groups: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`rows`, one cotangent per dimension of the embedding."""
        texts, width = self.embedding.shape
        every = torch.eye(width, dtype=self.hidden.dtype, device=self.hidden.device)[:, None, :]
        relevance, rest = self.relevance(every.expand(-1, texts, -1), max_bytes, weights)
        rows = relevance.permute(1, 2, 0)
        return rows if groups is None else _sum_groups(rows, groups), rest.transpose(0, 1)

    def push_rows(
        self, max_bytes: int | None = None, weights: Tensor | None = None, groups: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`rows`, one tangent per token or group and one for the rest, in chunks."""
        values = self.hidden if weights is None else weights
        if groups is None:
            groups = torch.arange(values.shape[1]).expand(values.shape[:2])
        count = _count(groups)
        result = values.new_zeros(count + 1, *self.embedding.shape)

        def take(start: int, images: Tensor) -> None:
            result[start : start + len(images)] = images

        self.push_groups(groups, take, max_bytes, values)
        return result[:count].transpose(0, 1), result[count]

    def push_groups(
        self,
        groups: Tensor,
        take: Callable[[int, Tensor], None],
        max_bytes: int | None = None,
        weights: Tensor | None = None,
    ) -> None:
        """Gives `take` what each group of tokens makes of the output, (B, D, ...), chunk by chunk, after the number of
        the chunk's first group. The rest, where there is any, is the last.
        """
        values = self.hidden if weights is None else weights
        count, entering = _count(groups), Entering(groups, values.device)
        tangents_in_all = count + self._has_rest
        step, space = self.chunk(max_bytes, tangents_in_all), Workspace()

        def push(start: int, stop: int) -> None:
            with torch.inference_mode():  # many small operations: torch does less around each
                # The last one, the rest's, is zero: there is no such group.
                tangents = values * entering.choose(start, stop).unsqueeze(-1)
                bias = -1 if stop > count else None
                take(start, self._run(tangents, space, bias, entering=entering))
            space.take_back()

        in_parts(tangents_in_all, step, values.device, push, space.clear)

    def relevance(
        self, cotangents: Tensor, max_bytes: int | None = None, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """<cotangent, row of each token>, (C, D, n), and <cotangent, rest>, (C, D), without building rows: C pulls."""
        return self.by_token(cotangents, max_bytes, weights), self.rest(cotangents)

    def by_token(self, cotangents: Tensor, max_bytes: int | None = None, weights: Tensor | None = None) -> Tensor:
        """<cotangent, row of each token>, (C, D, n): C pulls."""
        values = self.hidden if weights is None else weights
        step, space = self.chunk(max_bytes, len(cotangents)), Workspace()
        tokens = cotangents.new_zeros(len(cotangents), *values.shape[:2])

        def pull(start: int, stop: int) -> None:
            entered = tokens[start:stop].zero_()
            entered += (self.pull(cotangents[start:stop], space, entered) * values).sum(dim=-1)
            space.take_back()

        in_parts(len(cotangents), step, values.device, pull, space.clear)
        return tokens


def _overwritable(dead: Sequence[Tensor], others: Iterable[Tensor]) -> list[Tensor]:
    """Dead tangents that may be overwritten: no other tangent shares their storage, and no two elements a place."""
    taken = [storage_of(tangent) for tangent in (*dead, *others)]
    return [t for t, place in zip(dead, taken, strict=False) if taken.count(place) == 1 and 0 not in t.stride()]


def _count(groups: Tensor) -> int:
    return int(groups.max()) + 1


def _sum_groups(rows: Tensor, groups: Tensor) -> Tensor:
    """Rows (D, n, e) summed by group, (D, G, e)."""
    count = _count(groups)
    index = torch.where(groups < 0, count, groups).to(rows.device).unsqueeze(-1).expand_as(rows)
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
