"""The straight line from a reference to a text, and the integral of the encoder's Jacobian along it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rag_explain.encoder.batch import Batch
from rag_explain.encoder.model import Encoder
from rag_explain.linear import JACOBIAN, AffineMap
from rag_explain.methods.frozen import freeze

# Nodes are run side by side in batches of at most this many positions.
_POSITIONS = 2048


@dataclass(frozen=True, eq=False, kw_only=True)
class IntegrationPath:
    """The straight line from a reference to a text at one block's input, and the encoder along it.

    Attributes:
        start, change: (n, h) the reference's hidden state r, and a - r.
        embedding, reference: (e,) e(a) and e(r), normalised when `normalises`.
        spreads: whether one text's mask and positions serve a batch of nodes.
        nodes, error: how many nodes the integral takes, and the relative error that is left.
    """

    encoder: Encoder
    batch: Batch
    layer: int
    normalises: bool
    start: Tensor
    change: Tensor
    embedding: Tensor
    reference: Tensor
    spreads: bool
    nodes: int = 0
    error: float = 0.0
    kept: tuple[tuple[AffineMap, Tensor], ...] = ()

    @classmethod
    def between(cls, encoder: Encoder, batch: Batch, layer: int, *, normalises: bool, spreads: bool) -> IntegrationPath:
        """From the reference of the one text in `batch` to the text."""
        (text, start), (embedding, reference) = encoder.hidden(_with_reference(encoder, batch), layer)
        if normalises:
            embedding, reference = _unit(embedding), _unit(reference)
        return cls(
            encoder=encoder,
            batch=batch,
            layer=layer,
            normalises=normalises,
            start=start,
            change=text - start,
            embedding=embedding,
            reference=reference,
            spreads=spreads,
        )

    def with_nodes(self, tolerance: float, largest: int, size: float) -> IntegrationPath:
        """The same path with as many nodes as it takes for the integral along a - r to give e(a) - e(r).

        `size` is what errors are relative to.
        """
        wanted = self.embedding - self.reference
        tried: list[tuple[int, float]] = []
        while True:
            nodes = min(_next_nodes(tried, tolerance, self.encoder.n_blocks - self.layer), largest)
            total = torch.zeros_like(wanted)
            kept = []
            for frozen, weights in self._freeze(nodes):
                tangents = self.change.expand(1, *frozen.hidden.shape)
                total += weights @ self._project(frozen, frozen.push(tangents))[0]
                kept = [(frozen, weights)]
            error = float((total - wanted).norm()) / max(size, 1e-30)
            tried.append((nodes, error))
            if error <= tolerance or nodes == largest:
                # Frozen encoders are large: only those of a short text, which are all in one batch, are kept.
                return replace(self, nodes=nodes, error=error, kept=tuple(kept) if nodes <= self._step else ())

    def maps(self) -> Iterable[tuple[AffineMap, Tensor]]:
        """The encoder's Jacobian at some of the nodes at a time (a batch of k), and their weights (k,)."""
        return self.kept or self._freeze(self.nodes)

    @property
    def _step(self) -> int:
        return max(1, _POSITIONS // len(self.change))

    def _freeze(self, nodes: int) -> Iterator[tuple[AffineMap, Tensor]]:
        points, weights = np.polynomial.legendre.leggauss(nodes)
        alphas = torch.as_tensor((points + 1) / 2).to(self.change)
        shares = torch.as_tensor(weights / 2).to(self.change)
        for alpha, share in zip(alphas.split(self._step), shares.split(self._step), strict=True):
            at = self.start + alpha[:, None, None] * self.change
            batch = self.batch if self.spreads else copies(self.batch, len(alpha))
            yield freeze(self.encoder, batch, self.layer, JACOBIAN, at=at)[0], share

    def rows(self, max_bytes: int, groups: Tensor | None = None) -> Tensor:
        """(n, e): the integral of the Jacobian times what each position owns of a - r.

        With `groups` (1, n), the index of each position's group, one row for each group.
        """
        count = len(self.change) if groups is None else int(groups.max()) + 1
        total = self.change.new_zeros(count, len(self.embedding))
        for frozen, weights in self.maps():
            many = None if groups is None else groups.expand(len(frozen.hidden), -1)
            rows, _ = frozen.rows(max_bytes, self.change.expand(frozen.hidden.shape), groups=many)
            rows = self._project(frozen, rows.transpose(0, 1))
            total += torch.einsum("k,nke->ne", weights, rows)
        return total

    def relevance(self, block: Tensor, max_bytes: int) -> Tensor:
        """(c, n): <block (c, e), rows> without building the rows, by pulling `block` back at each node."""
        total = block.new_zeros(len(block), len(self.change))
        for frozen, weights in self.maps():
            cotangents = self._project(frozen, block[:, None].expand(-1, len(weights), -1))
            parts = []
            for part in cotangents.split(frozen.chunk(max_bytes)):
                source = frozen.pull(part)
                parts.append(torch.einsum("cknh,nh,k->cn", source, self.change, weights))
            total += torch.cat(parts)
        return total

    def _project(self, frozen: AffineMap, vectors: Tensor) -> Tensor:
        """Tangents or cotangents (B, k, e) through the Jacobian of x / |x|, (I - u u^T) / |x|, which is symmetric."""
        if not self.normalises:
            return vectors
        length = frozen.embedding.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(vectors.dtype).tiny)
        direction = frozen.embedding / length
        projected: Tensor = (vectors - direction * (vectors * direction).sum(dim=-1, keepdim=True)) / length
        return projected


def _next_nodes(tried: Sequence[tuple[int, float]], tolerance: float, depth: int) -> int:
    """How many nodes to try next. Gauss sums converge geometrically, so two errors tell about where the third falls.

    The first guess is what paths through `depth` blocks usually need.
    """
    if not tried:
        return 4 + 4 * depth
    nodes, error = tried[-1]
    missing = nodes / 2
    if len(tried) > 1:
        fewer, before = tried[-2]
        rate = math.log(before / error) / (nodes - fewer) if 0 < error < before else 0.0
        missing = 1.1 * math.log(error / tolerance) / rate if rate > 0 else float(nodes)
    return nodes + max(2, math.ceil(min(missing, nodes)))


def _with_reference(encoder: Encoder, batch: Batch) -> Batch:
    """The one text of `batch`, and its reference, as a batch of two."""
    reference = encoder.reference(batch).features
    features = {
        # Position ids that only the reference needs to be told are the text's own.
        name: torch.cat([batch.features.get(name, value), value]) if _is_row(value) else value
        for name, value in reference.items()
    }
    return _repeated(batch, 2, features)


def copies(batch: Batch, count: int) -> Batch:
    """The one text of `batch`, `count` times."""
    features = {
        name: value.expand(count, *value.shape[1:]) if _is_row(value) else value
        for name, value in batch.features.items()
    }
    return _repeated(batch, count, features)


def _repeated(batch: Batch, count: int, features: dict[str, Any]) -> Batch:
    return Batch(
        passages=batch.passages * count,
        role=batch.role,
        tokens=batch.tokens * count,
        truncated=batch.truncated * count,
        features=features,
    )


def _is_row(value: Any) -> bool:
    """Whether a feature is one text's row of a batch."""
    return isinstance(value, Tensor) and value.ndim > 1 and value.shape[0] == 1


def _unit(vector: Tensor) -> Tensor:
    return torch.nn.functional.normalize(vector, dim=0, eps=torch.finfo(vector.dtype).tiny)
