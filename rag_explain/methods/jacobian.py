"""Integrated Jacobians (Moeller et al. 2023, 2024): attributions to pairs of tokens that follow the model itself.

For an encoder e, a text a, and a reference r in which nothing is said,

    e(a) - e(r) = J(a) (a - r),    J(a) = integral over [0, 1] of  de/dx at x = r + alpha (a - r)  d alpha

by the fundamental theorem along a straight line; a and r are the inputs of block `layer`. The part of (a - r) that
token t owns gives rows[t], and e(r) is the rest. For two texts a and b the product of the two sums is

    f(a, b) - f(a, r_b) - f(r_a, b) + f(r_a, r_b) = sum over pairs of  rows_a[i] . rows_b[j]

`ij` takes the normalised embedding for e, so f is the cosine itself and the reference similarities on the left tell how
much of the score the pairs cannot be. `ij-exact` explains the shifted encoder e(x) - e(r), whose reference embedding is
zero, so that nothing is left over. It divides by the norms after the integral: a zero embedding has no direction.
"""

import copy
import logging
import sys
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from rag_explain import pairing
from rag_explain.encoder.batch import Batch
from rag_explain.errors import InvalidInput, UnsupportedModel, UnsupportedOperation
from rag_explain.factors import Array, Factors
from rag_explain.linear import JACOBIAN
from rag_explain.methods.base import EncoderMethod, ExplainedPair, explained, to_numpy
from rag_explain.methods.frozen import freeze
from rag_explain.methods.integration_path import IntegrationPath
from rag_explain.results.notices import METHOD, OTHER_SCORE, Notice
from rag_explain.scorers.base import Scorer
from rag_explain.scorers.checks import PROBE, check_route
from rag_explain.texts.tokens import Unit

_log = logging.getLogger("rag_explain.methods")

# Above this, a reference similarity is no longer small against the score it is subtracted from.
TRUSTED_REFERENCE = 0.1


class JacobianMethod(EncoderMethod):
    """What `ij` and `ij-exact` share: everything but the function whose Jacobian is integrated.

    Args:
        tolerance: |integral of the Jacobian times (a - r) - (e(a) - e(r))| / |e(a)| that ends the search for nodes.
        max_nodes: where the search ends in any case; the error that was reached is in the result.
    """

    options = ("tolerance", "max_nodes")
    pushes_rows = True
    # Whether the embedding is divided by its norm inside the path.
    normalises_in_path: ClassVar[bool]

    def __init__(
        self, scorer: Scorer, layer: int | None = None, *, tolerance: float = 1e-3, max_nodes: int = 128
    ) -> None:
        super().__init__(scorer, layer)
        if not 0 < tolerance < 1:
            raise InvalidInput(f"tolerance must be between 0 and 1, not {tolerance}")
        if max_nodes < 1:
            raise InvalidInput(f"max_nodes must be at least 1, not {max_nodes}")
        self.tolerance, self.max_nodes = tolerance, max_nodes

    @property
    def default_layer(self) -> int:
        # As faithful under perturbation as the earlier blocks, and cheaper (benchmarks/layers.py, docs/methods.md).
        return self.encoder.n_blocks // 2

    def check(self) -> None:
        """Finds out once how nodes can be batched, and fails here rather than at the first text."""
        _ = self._spreads
        EncoderMethod.check(self.with_one_node())
        check_route(self.encoder, self.layer)

    def with_one_node(self) -> Self:
        """The same, as cheap as can be: whether a model can be explained does not depend on the nodes."""
        other = copy.copy(self)
        other.tolerance, other.max_nodes = sys.float_info.max, 1
        return other

    def factor(self, batch: Batch, unit: Unit) -> list[Factors]:
        return [self._factor(batch, index, unit) for index in range(len(batch))]

    def cold(self, query: Factors, documents: Batch) -> list[ExplainedPair]:
        return [self._cold(query, documents, index) for index in range(len(documents))]

    def path(self, batch: Batch, index: int) -> IntegrationPath:
        """The path of text `index` from its reference, with the nodes that its integral needs."""
        one = batch.select([index])
        normalises = self.normalises_in_path and self.encoder.is_cosine
        path = IntegrationPath(self.encoder, one, self.layer, normalises=normalises, spreads=self._spreads)
        path.choose_nodes(self.tolerance, self.max_nodes, float(self.endpoints(path)[1].norm()))
        if path.error > self.tolerance:
            _log.warning(
                "%s reached a relative error of %.1e with %d nodes, not %.1e: raise max_nodes, or choose a later layer",
                *(self.name, path.error, path.nodes, self.tolerance),
            )
        return path

    @cached_property
    def _spreads(self) -> bool:
        """Whether one text's mask and positions serve a batch of nodes, so that blocks below `layer` run only once."""
        batch = self.encoder.read([PROBE], "document")
        hidden, _ = self.encoder.hidden(batch, self.layer)
        at = torch.cat([hidden, hidden / 2])
        _, copied = freeze(self.encoder, batch.select([0, 0]), self.layer, JACOBIAN, at=at)
        try:
            _, spread = freeze(self.encoder, batch, self.layer, JACOBIAN, at=at)
        except (RuntimeError, ValueError, IndexError, UnsupportedOperation):
            return False
        return spread.shape == copied.shape and bool(torch.allclose(spread, copied, rtol=1e-3))

    def endpoints(self, path: IntegrationPath) -> tuple[Tensor, Tensor, Tensor]:
        """What belongs to a text beside its rows: rest (e,), embedding (e,) and the norm that divides them."""
        if self.normalises_in_path:
            return path.reference, path.embedding, path.embedding.new_ones(())
        shifted = path.embedding - path.reference
        return torch.zeros_like(shifted), shifted, self.encoder.norms(shifted[None])[0]

    def _factor(self, batch: Batch, index: int, unit: Unit) -> Factors:
        path = self.path(batch, index)
        rest, embedding, norm = self.endpoints(path)
        (tokens,), groups = path.batch.groups(unit)
        rows = path.rows(self.max_bytes, groups)
        more = {"tokens": tokens, "unit": unit, "references": {"nodes": path.nodes}}
        return self.build(batch, index, rows=rows, rest=rest, embedding=embedding, norm=norm, **more)

    def _cold(self, query: Factors, documents: Batch, index: int) -> ExplainedPair:
        """Pull the query's rows and rest through the document at each node."""
        path = self.path(documents, index)
        rest, embedding, norm = self.endpoints(path)
        block = torch.as_tensor(query.block.copy()).to(embedding)
        tokens, norms = path.relevance(block, self.max_bytes), norm * query.norm
        matrix = torch.cat([tokens / norms, pairing.product(block, rest[None], norms)], dim=1)
        asked = torch.as_tensor(query.embedding.copy()).to(embedding)
        score = float(pairing.scores(asked, embedding[None], norms)[0])
        trust = self._trust(query, to_numpy(embedding), to_numpy(rest), path.nodes, path.error)
        return explained(query, documents.side(index), to_numpy(matrix), score, **trust)

    def finish(self, query: Factors, document: Factors, matrix: Array, score: float) -> ExplainedPair:
        nodes = int((document.references or {}).get("nodes", 0))
        trust = self._trust(query, document.embedding, document.rest, nodes, document.error)
        return explained(query, document, matrix, score, **trust)

    def _trust(self, query: Factors, embedding: Array, rest: Array, nodes: int, error: float) -> dict[str, Any]:
        """The quadrature's cost and error, and the similarities that say how much of the score the pairs can be."""
        similarities: dict[str, float] = {}
        if self.normalises_in_path:
            similarities = {
                "f(a, r_b)": float(query.embedding @ rest),
                "f(r_a, b)": float(query.rest @ embedding),
                "f(r_a, r_b)": float(query.rest @ rest),
            }
        notices: tuple[Notice, ...] = ()
        large = max(similarities.get("f(a, r_b)", 0.0), similarities.get("f(r_a, b)", 0.0))
        if large > TRUSTED_REFERENCE:
            note = (
                f"a reference similarity is {large:.2f}: an empty text already scores that much, "
                "and the pairs cannot be trusted to that extent"
            )
            _log.info("%s: %s", self.name, note)  # not a warning: the notice travels with the result
            notices = (Notice(METHOD, note),)
        asked = int((query.references or {}).get("nodes", 0))
        references = {**quadrature(asked, nodes, query.error, error), **similarities}
        return {"references": references, "error": max(query.error, error), "notices": notices}


def quadrature(query_nodes: int, document_nodes: int, query_error: float, document_error: float) -> dict[str, float]:
    """What the integrals of both texts took, and the relative errors that are left, as `references` show them."""
    nodes = {"query_nodes": query_nodes, "document_nodes": document_nodes}
    return {**nodes, "query_error": query_error, "document_error": document_error}


class IntegratedJacobians(JacobianMethod):
    """`ij`: for any encoder; approximate, in that the reference similarities are left over."""

    name = "ij"
    normalises_in_path = True

    def check(self) -> None:
        if self.encoder.is_shifted and self.encoder.is_cosine:
            raise InvalidInput("a shifted encoder's reference embedding is zero and has no direction: use ij-exact")
        super().check()


class ExactJacobians(JacobianMethod):
    """`ij-exact`: the shifted encoder e(x) - e(r). Nothing is left over, and the score is the shifted encoder's own."""

    name = "ij-exact"
    normalises_in_path = False

    @property
    def notices(self) -> tuple[Notice, ...]:
        if self.encoder.is_shifted:
            return super().notices
        reason = (
            "the similarity of the shifted encoder e(x) - e(reference) is explained, not this encoder's own: "
            "fine-tune one with rag_explain.ShiftedEncoder"
        )
        return (*super().notices, Notice(OTHER_SCORE, reason))

    def check(self) -> None:
        """A shifted encoder's reference must be zero; elsewhere the method shifts the embedding itself."""
        super().check()
        if not self.encoder.is_shifted:
            return
        batch = self.encoder.read([PROBE], "document")
        reference = self.encoder.run(self.encoder.reference(batch))
        if float(reference.norm()) > 1e-6 * float(self.encoder.run(batch).norm()):
            raise UnsupportedModel(
                "the embedding of this shifted encoder's reference is not zero: a bias after its pooling adds to it; "
                "use modules without one"
            )
