"""Integrated Jacobians (Moeller et al. 2023, 2024): attributions to pairs of tokens that follow the model itself.

For an encoder e, a text a, and a reference r in which nothing is said,

    e(a) - e(r) = J(a) (a - r),    J(a) = integral over [0, 1] of  de/dx at x = r + alpha (a - r)  d alpha

by the fundamental theorem along a straight line; a and r are the inputs of block `layer`. The part of (a - r) that
token t owns gives rows[t], and e(r) is the rest. For two texts a and b the product of the two sums is

    f(a, b) - f(a, r_b) - f(r_a, b) + f(r_a, r_b) = sum over pairs of  rows_a[i] . rows_b[j]

`ij` takes the normalised embedding for e, so f is the cosine itself and the reference similarities on the left tell how
much of the score the pairs cannot be: they are reported with every explanation. `ij-exact` explains the shifted encoder
e(x) - e(r), whose reference embedding is zero: there nothing is left over. It integrates the embedding before
normalisation and divides by the final norms afterwards. With the norm inside its path the pairs would not sum to the
score: the direction of a zero embedding is not defined where the path begins.

The integral is a Gauss-Legendre sum. The number of nodes is chosen per text with one tangent, a - r itself, whose
integral must be e(a) - e(r): nodes are added until it is, to the tolerance. Then the tokens' tangents are pushed at
those nodes. That the sum is right to the tolerance does not bound the error of every single row.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from rag_explain.encoder import Batch, Encoder
from rag_explain.errors import InvalidInput, UnsupportedModel
from rag_explain.linear import DEFAULT_MAX_BYTES, JACOBIAN, AffineMap
from rag_explain.methods.base import ColdDocument, Half, Method, to_numpy
from rag_explain.methods.bilrp import freeze
from rag_explain.types import Array, Factors

_log = logging.getLogger(__name__)

# Above this, a reference similarity is no longer small against the score it is subtracted from.
TRUSTED_REFERENCE = 0.1
# Nodes are run side by side in batches of at most this many positions.
_POSITIONS = 2048
_PROBE = "Why was this short text found?"


class JacobianMethod(Method):
    """What `ij` and `ij-exact` share: everything but the function whose Jacobian is integrated.

    Args:
        tolerance: |integral of the Jacobian times (a - r) - (e(a) - e(r))| / |e(a)| that ends the search for nodes.
        max_nodes: where the search ends in any case; the error that was reached is in the result.
    """

    # Whether the embedding is divided by its norm inside the path.
    inside: ClassVar[bool]

    def __init__(
        self,
        encoder: Encoder,
        layer: int | None = None,
        *,
        tolerance: float = 1e-3,
        max_nodes: int = 128,
        budget: int | None = None,
    ) -> None:
        super().__init__(encoder, layer, budget=budget)
        if not 0 < tolerance < 1:
            raise InvalidInput(f"tolerance must be between 0 and 1, not {tolerance}")
        if max_nodes < 1:
            raise InvalidInput(f"max_nodes must be at least 1, not {max_nodes}")
        self.tolerance = tolerance
        self.max_nodes = max_nodes

    def _default_layer(self) -> int:
        # As faithful under perturbation as the earlier blocks, and cheaper (benchmarks/layers.py, docs/methods.md).
        return self.encoder.blocks // 2

    @property
    def settings(self) -> dict[str, Any]:
        return {"layer": self.layer, "tolerance": self.tolerance, "max_nodes": self.max_nodes}

    def check(self) -> None:
        """Finds out once how nodes can be batched, and fails here rather than at the first text."""
        self.check_route()
        _ = self._spreads

    def factor(self, batch: Batch) -> list[Factors]:
        return [self._factor(batch, index) for index in range(len(batch))]

    def cold(self, query: Factors, batch: Batch) -> list[ColdDocument]:
        return [self._cold(query, batch, index) for index in range(len(batch))]

    def path(self, batch: Batch, index: int) -> Path:
        """The way of text `index` from its reference, with the nodes that its integral needs."""
        one = batch.select([index])
        inside = self.inside and self.encoder.is_cosine
        path = Path.between(self.encoder, one, self.layer, inside=inside, spreads=self._spreads)
        path = path.with_nodes(self.tolerance, self.max_nodes, float(self.halves(path)[1].norm()))
        if path.error > self.tolerance:
            _log.warning(
                "%s reached a relative error of %.1e with %d nodes, not %.1e: raise max_nodes, or choose a later layer",
                self.name, path.error, path.nodes, self.tolerance,
            )  # fmt: skip
        return path

    @cached_property
    def _spreads(self) -> bool:
        """Whether one text's mask and positions serve a batch of nodes, so that blocks below `layer` run only once."""
        batch = self.encoder.tokenize([_PROBE], "document")
        hidden, _ = _hidden(self.encoder, batch, self.layer)
        at = torch.cat([hidden, hidden / 2])
        copied = freeze(self.encoder, _copies(batch, 2), self.layer, JACOBIAN, at).embedding
        try:
            spread = freeze(self.encoder, batch, self.layer, JACOBIAN, at).embedding
        except (RuntimeError, ValueError, IndexError):
            return False
        return spread.shape == copied.shape and bool(torch.allclose(spread, copied, rtol=1e-3))

    def halves(self, path: Path) -> tuple[Tensor, Tensor, Tensor]:
        """What stands for a text beside its rows: rest (e,), embedding (e,) and the norm that divides them."""
        raise NotImplementedError

    def _factor(self, batch: Batch, index: int) -> Factors:
        path = self.path(batch, index)
        rest, embedding, norm = self.halves(path)
        rows = path.rows(self.budget or DEFAULT_MAX_BYTES)[path.positions]
        return self.build(batch, index, rows, rest, embedding, norm, references={"nodes": path.nodes})

    def _cold(self, query: Factors, batch: Batch, index: int) -> ColdDocument:
        """Pull the query's rows and rest through the document at each node."""
        path = self.path(batch, index)
        rest, embedding, norm = self.halves(path)
        half = torch.as_tensor(np.vstack([query.rows, query.rest])).to(embedding)
        tokens = path.relevance(half, self.budget or DEFAULT_MAX_BYTES)[:, path.positions]
        matrix = torch.cat([tokens, (half @ rest)[:, None]], dim=1) / (norm * query.norm)
        asked = torch.as_tensor(query.embedding.copy()).to(embedding)
        document = ColdDocument(
            batch.tokens[index],
            to_numpy(matrix),
            float(asked @ embedding / (norm * query.norm)),
            batch.truncated[index],
        )
        return self._with_references(document, query, to_numpy(embedding), to_numpy(rest), path.nodes, path.error)

    def finish(self, query: Factors, document: Half, matrix: Array, score: float) -> ColdDocument:
        nodes = int((document.references or {}).get("nodes", 0))
        found = super().finish(query, document, matrix, score)
        return self._with_references(found, query, document.embedding, document.rest, nodes, document.error)

    def _with_references(
        self,
        document: ColdDocument,
        query: Factors,
        embedding: Array,
        rest: Array,
        nodes: int,
        error: float,
    ) -> ColdDocument:
        """The quadrature's cost and error, and the similarities that say how much of the score the pairs can be."""
        references = {
            "query_nodes": int((query.references or {}).get("nodes", 0)),
            "document_nodes": nodes,
            "query_error": query.error,
            "document_error": error,
            **self._similarities(query, embedding, rest),
        }
        note = None
        large = max(references.get("f(a, r_b)", 0.0), references.get("f(r_a, b)", 0.0))
        if large > TRUSTED_REFERENCE:
            note = (
                f"a reference similarity is {large:.2f}: an empty text already scores that much, "
                "and the pairs cannot be trusted to that extent"
            )
            _log.info("%s: %s", self.name, note)  # it travels with the result: no need to fill the host's log
        return replace(document, references=references, note=note)

    def _similarities(self, query: Factors, embedding: Array, rest: Array) -> dict[str, float]:
        return {}


class IntegratedJacobians(JacobianMethod):
    """`ij`: for any encoder; approximate, in that the reference similarities are left over."""

    name = "ij"
    inside = True

    def check(self) -> None:
        if self.encoder.is_shifted and self.encoder.is_cosine:
            raise InvalidInput("a shifted encoder's reference embedding is zero and has no direction: use ij-exact")
        super().check()

    def halves(self, path: Path) -> tuple[Tensor, Tensor, Tensor]:
        return path.reference, path.embedding, path.embedding.new_ones(())

    def _similarities(self, query: Factors, embedding: Array, rest: Array) -> dict[str, float]:
        return {
            "f(a, r_b)": float(query.embedding @ rest),
            "f(r_a, b)": float(query.rest @ embedding),
            "f(r_a, r_b)": float(query.rest @ rest),
        }


class ExactJacobians(JacobianMethod):
    """`ij-exact`: the shifted encoder e(x) - e(r). Nothing is left over, and the score is the shifted encoder's own."""

    name = "ij-exact"
    inside = False

    @property
    def surrogate(self) -> str | None:
        if self.encoder.is_shifted:
            return super().surrogate
        return (
            "the similarity of the shifted encoder e(x) - e(reference) is explained, not this encoder's own: "
            "fine-tune one with rag_explain.ShiftedEncoder"
        )

    def check(self) -> None:
        """A shifted encoder's reference must be zero; elsewhere the method shifts the embedding itself."""
        super().check()
        if not self.encoder.is_shifted:
            return
        batch = self.encoder.tokenize([_PROBE], "document")
        reference = self.encoder.run(self.encoder.reference(batch))
        if float(reference.norm()) > 1e-6 * float(self.encoder.run(batch).norm()):
            raise UnsupportedModel(
                "the embedding of this shifted encoder's reference is not zero: a bias behind its pooling adds to it; "
                "use modules without one"
            )

    def halves(self, path: Path) -> tuple[Tensor, Tensor, Tensor]:
        shifted = path.embedding - path.reference
        norm = self.encoder.norms(shifted[None])[0]
        return torch.zeros_like(shifted), shifted, norm


@dataclass(frozen=True, eq=False)
class Path:
    """The straight line from a reference to a text at one block's input, and the encoder along it.

    Attributes:
        start, change: (n, h) the reference's hidden state r, and a - r.
        embedding, reference: (e,) e(a) and e(r), normalised when `inside`.
        positions: (n_tokens,) the positions that are not padding.
    """

    encoder: Encoder
    batch: Batch
    layer: int
    inside: bool
    start: Tensor
    change: Tensor
    embedding: Tensor
    reference: Tensor
    positions: Tensor
    spreads: bool
    nodes: int = 0
    error: float = 0.0
    kept: tuple[tuple[AffineMap, Tensor], ...] = ()

    @classmethod
    def between(cls, encoder: Encoder, batch: Batch, layer: int, *, inside: bool, spreads: bool) -> Path:
        """From the reference of the one text in `batch` to the text."""
        (text, start), (embedding, reference) = _hidden(encoder, _with_reference(encoder, batch), layer)
        if inside:
            embedding, reference = _unit(embedding), _unit(reference)
        change = text - start
        return cls(
            encoder, batch, layer, inside, start, change, embedding, reference, batch.positions(0), spreads
        )  # fmt: skip

    def with_nodes(self, tolerance: float, largest: int, size: float) -> Path:
        """The same path with as many nodes as it takes for the integral along a - r to give e(a) - e(r).

        `size` is what errors are relative to.
        """
        wanted = self.embedding - self.reference
        tried: list[tuple[int, float]] = []
        while True:
            nodes = min(_next_nodes(tried, tolerance, self.encoder.blocks - self.layer), largest)
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
            batch = self.batch if self.spreads else _copies(self.batch, len(alpha))
            yield freeze(self.encoder, batch, self.layer, JACOBIAN, at), share

    def rows(self, budget: int) -> Tensor:
        """(n, e): the integral of the Jacobian times what each position owns of a - r."""
        total = self.change.new_zeros(len(self.change), len(self.embedding))
        for frozen, weights in self.maps():
            rows, _ = frozen.rows(budget, self.change.expand(frozen.hidden.shape))
            rows = self._project(frozen, rows.transpose(0, 1))
            total += torch.einsum("k,nke->ne", weights, rows)
        return total

    def relevance(self, half: Tensor, budget: int) -> Tensor:
        """(c, n): <half (c, e), rows> without building the rows, by pulling `half` back at each node."""
        total = half.new_zeros(len(half), len(self.change))
        for frozen, weights in self.maps():
            cotangents = self._project(frozen, half[:, None].expand(-1, len(weights), -1))
            parts = []
            for part in cotangents.split(frozen.chunk(budget)):
                source = frozen.pull(part)
                parts.append(torch.einsum("cknh,nh,k->cn", source, self.change, weights))
            total += torch.cat(parts)
        return total

    def _project(self, frozen: AffineMap, vectors: Tensor) -> Tensor:
        """Tangents or cotangents (B, k, e) through the Jacobian of x / |x|, (I - u u^T) / |x|, which is symmetric."""
        if not self.inside:
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
    return Batch(batch.texts * 2, batch.role, features, batch.tokens * 2, batch.truncated * 2)


def _hidden(encoder: Encoder, batch: Batch, layer: int) -> tuple[Tensor, Tensor]:
    """(D, n, h) the input of block `layer`, and (D, e) the embeddings."""
    caught: list[Tensor] = []

    def visit(block: int, hidden: Tensor) -> Tensor:
        if block == layer:
            caught.append(hidden.clone())
        return hidden

    embedding = encoder.run(batch, visit)
    return caught[0], embedding


def _copies(batch: Batch, count: int) -> Batch:
    """The one text of `batch`, `count` times."""
    features = {
        name: value.expand(count, *value.shape[1:]) if _is_row(value) else value
        for name, value in batch.features.items()
    }
    return Batch(batch.texts * count, batch.role, features, batch.tokens * count, batch.truncated * count)


def _is_row(value: Any) -> bool:
    """Whether a feature is one text's row of a batch."""
    return isinstance(value, Tensor) and value.ndim > 1 and value.shape[0] == 1


def _unit(vector: Tensor) -> Tensor:
    return torch.nn.functional.normalize(vector, dim=0, eps=torch.finfo(vector.dtype).tiny)
