"""The straight line from a reference to a text, and the Gauss-Legendre sum of the encoder's Jacobian along it."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from rag_explain.encoder.batch import Batch
from rag_explain.encoder.model import Encoder
from rag_explain.encoder.reference import WORD_VECTORS, Reference, setting
from rag_explain.linear import JACOBIAN, AffineMap
from rag_explain.methods.frozen import freeze

# Nodes are run side by side in batches of at most this many positions.
_POSITIONS = 2048


class IntegrationPath:
    """The straight line from the reference of the one text in `batch` to the text, at the input of block `layer`.

    Attributes:
        start, change: (n, h) the reference's hidden state r, and a - r.
        embedding, reference: (e,) e(a) and e(r), normalised when `normalises`.
        across: whether what is integrated is e without what lies along e(r).
        spreads: whether one text's mask and positions serve a batch of nodes.
        nodes, error: how many nodes the integral takes, and the relative error that is left.
        kept: the encoder's Jacobian at all nodes, where that is small enough to keep.
    """

    def __init__(
        self,
        encoder: Encoder,
        batch: Batch,
        layer: int,
        *,
        reference: Reference = "padding",
        normalises: bool,
        across: bool,
        spreads: bool,
    ) -> None:
        self.encoder, self.batch, self.layer = encoder, batch, layer
        self.normalises, self.across, self.spreads = normalises, across, spreads
        self._there = batch.to(encoder.device)
        (text, self.start), (embedding, empty) = _beside_reference(encoder, batch, layer, reference)
        self.change: Tensor = text - self.start
        self._step = max(1, _POSITIONS // len(self.change))
        self.embedding: Tensor = _unit(embedding) if normalises else embedding
        self.reference: Tensor = _unit(empty) if normalises else empty
        self.nodes, self.error = 0, 0.0
        self.kept: tuple[tuple[AffineMap, Tensor], ...] = ()

    def choose_nodes(self, tolerance: float, largest: int, size: Tensor) -> None:
        """Take as many nodes as it takes for the integral along a - r to give e(a) - e(r): one tangent tells.

        `size` is what errors are relative to. The tolerance bounds the error of the sum, not of every single row.
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
            error = float(self.counted(total - wanted).norm() / size.clamp_min(1e-30))
            tried.append((nodes, error))
            if error <= tolerance or nodes == largest:
                self.nodes, self.error = nodes, error
                # Frozen encoders are large: only those of a short text, which are all in one batch, are kept.
                self.kept = tuple(kept) if nodes <= self._step else ()
                return

    def maps(self) -> Iterable[tuple[AffineMap, Tensor]]:
        """The encoder's Jacobian at some of the nodes at a time (a batch of k), and their weights (k,)."""
        return self.kept or self._freeze(self.nodes)

    def _freeze(self, nodes: int) -> Iterator[tuple[AffineMap, Tensor]]:
        points, weights = np.polynomial.legendre.leggauss(nodes)
        alphas, shares = torch.as_tensor(np.stack([points + 1, weights]) / 2).to(self.change)
        for alpha, share in zip(alphas.split(self._step), shares.split(self._step), strict=True):
            at = self.start + alpha[:, None, None] * self.change
            batch = self._there if self.spreads else self.batch.select([0] * len(alpha))
            yield freeze(self.encoder, batch, self.layer, JACOBIAN, at=at)[0], share

    def rows(self, max_bytes: int | None, groups: Tensor | None = None) -> Tensor:
        """(n_tokens, e): the integral of the Jacobian times what each token owns of a - r.

        With `groups` (1, n), the index of each position's group, one row for each group.
        """
        count = len(self.change) if groups is None else int(groups.max()) + 1
        total = self.change.new_zeros(count, len(self.embedding))
        for frozen, weights in self.maps():
            many = None if groups is None else groups.expand(len(frozen.hidden), -1)
            rows, _ = frozen.rows(max_bytes, self.change.expand(frozen.hidden.shape), groups=many)
            rows = self._project(frozen, rows.transpose(0, 1))
            total += torch.einsum("k,nke->ne", weights, rows)
        return self.counted(self.batch.unpad(total[None])[0] if groups is None else total)

    def relevance(self, block: Tensor, max_bytes: int | None) -> Tensor:
        """(c, n_tokens): <block (c, e), rows> without building the rows, by pulling `block` back at each node."""
        total = block.new_zeros(len(block), len(self.change))
        for frozen, weights in self.maps():
            cotangents = self._project(frozen, self.counted(block)[:, None].expand(-1, len(weights), -1))
            parts = cotangents.split(frozen.chunk(max_bytes, len(cotangents)))
            total += torch.cat([torch.einsum("cknh,nh,k->cn", frozen.pull(p), self.change, weights) for p in parts])
        return self.batch.unpad(total.T[None])[0].T

    def counted(self, vectors: Tensor) -> Tensor:
        """Vectors (..., e), of embeddings or of cotangents, without what lies along the reference if `across`."""
        if not self.across:
            return vectors
        along = _unit(self.reference)
        return vectors - (vectors @ along)[..., None] * along

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


def _beside_reference(encoder: Encoder, batch: Batch, layer: int, reference: Reference) -> tuple[Tensor, Tensor]:
    """(2, n, h) the block's input and (2, e) the embedding, of the one text of `batch` and of its reference."""
    features = encoder.reference(batch, reference).features
    for name, value in features.items():
        if isinstance(value, Tensor) and value.ndim > 1 and len(value) == 1:  # one text's row of a batch
            # Position ids that only the reference needs to be told are the text's own.
            features[name] = torch.cat([batch.features.get(name, value), value])
    words = encoder.empty_words(batch, reference)
    if words is not None:
        words = words._replace(places=torch.cat([torch.zeros_like(words.places), words.places]))
    with setting(WORD_VECTORS, words):
        return encoder.hidden(replace(batch.select([0, 0]), features=features), layer)


def _unit(vector: Tensor) -> Tensor:
    return torch.nn.functional.normalize(vector, dim=0, eps=torch.finfo(vector.dtype).tiny)
