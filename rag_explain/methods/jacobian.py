"""Integrated Jacobians (Moeller et al. 2023, 2024): attributions to pairs of tokens that follow the model itself.

For an encoder e, a text a, and a reference r in which nothing is said,

    e(a) - e(r) = J(a) (a - r),    J(a) = integral over [0, 1] of  de/dx at x = r + alpha (a - r)  d alpha

by the fundamental theorem along a straight line; a and r are the inputs of block `layer`. The part of (a - r) that
token t owns gives rows[t], and e(r) is the rest. For two texts a and b the product of the two sums is

    f(a, b) - f(a, r_b) - f(r_a, b) + f(r_a, r_b) = sum over pairs of  rows_a[i] . rows_b[j]

`ij` takes the normalised embedding for e, so f is the cosine itself. f(r_a, r_b) is large whatever the texts say, and
the pairs of unrelated texts would sum to it. So `ij` leaves what lies along a text's own reference to its rest:

    e'(x) = e(x) - <e(x), u> u,   u = e(r) / |e(r)|,   e'(r) = 0:   f'(a, b) = sum over pairs of rows'_a[i] . rows'_b[j]

`ij-exact` explains the shifted encoder e(x) - e(r), whose reference embedding is
zero, so that nothing is left over. It divides by the norms after the integral: a zero embedding has no direction.
"""

import copy
import logging
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, ClassVar, Literal, Self, get_args

import numpy as np
import torch
from torch import Tensor

from rag_explain import pairing
from rag_explain.devices import is_full, to_host
from rag_explain.encoder.batch import Batch
from rag_explain.encoder.reference import REFERENCES, Reference
from rag_explain.errors import InvalidInput, UnsupportedModel, UnsupportedOperation
from rag_explain.factors import Array, Factors
from rag_explain.linear import JACOBIAN
from rag_explain.methods.base import EncoderMethod, ExplainedPair, explained, to_numpy
from rag_explain.methods.frozen import freeze
from rag_explain.methods.integration_path import IntegrationPath
from rag_explain.results.notices import METHOD, OTHER_SCORE, Notice
from rag_explain.scorers.base import Scorer
from rag_explain.scorers.checks import PROBE, check_route
from rag_explain.texts.tokens import Role, Unit

_log = logging.getLogger("rag_explain.methods")

AlongReference = Literal["rest", "pairs"]
# Beyond this, on either side of zero, a text's cosine with an empty one is not negligible (section 4.3).
TRUSTED_REFERENCE = 0.1


class JacobianMethod(EncoderMethod):
    """What `ij` and `ij-exact` share: everything but the function whose Jacobian is integrated.

    Args:
        tolerance: |integral of the Jacobian times (a - r) - (e(a) - e(r))| / |e(a)| that ends the search for nodes.
        max_nodes: where the search ends in any case; the error that was reached is in the result.
    """

    options: ClassVar[tuple[str, ...]] = ("tolerance", "max_nodes")
    pushes_rows = True
    # Whether the embedding is divided by its norm inside the path.
    normalises_in_path: ClassVar[bool]
    # What the path starts at, and where what lies along its embedding counts.
    reference: Reference = "padding"
    along_reference: AlongReference = "pairs"

    def __init__(
        self, scorer: Scorer, layer: int | None = None, *, tolerance: float = 1e-3, max_nodes: int = 128
    ) -> None:
        super().__init__(scorer, layer)
        if not 0 < tolerance < 1:
            raise InvalidInput(f"tolerance must be between 0 and 1, not {tolerance}")
        if max_nodes < 1:
            raise InvalidInput(f"max_nodes must be at least 1, not {max_nodes}")
        self.tolerance, self.max_nodes = tolerance, max_nodes
        self._spreads = lru_cache(self._find_spreads)

    @property
    def default_layer(self) -> int:
        # As faithful under perturbation as the earlier blocks, and cheaper (benchmarks/layers.py, docs/methods.md).
        return self.encoder.n_blocks // 2

    def check(self) -> None:
        """Finds out once how nodes can be batched, and fails here rather than at the first text."""
        for role in self.encoder.roles:
            self._spreads(role)
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
        block = torch.as_tensor(query.block.copy()).to(self.encoder.device, self.encoder.dtype)
        return [self._cold(query, block, documents, index) for index in range(len(documents))]

    def path(self, batch: Batch, index: int) -> IntegrationPath:
        """The path of text `index` from its reference, with the nodes that its integral needs."""
        one = batch.select([index])
        normalises = self.normalises_in_path and self.encoder.is_cosine
        how = {"normalises": normalises, "across": self.along_reference == "rest", "spreads": self._spreads(batch.role)}
        path = IntegrationPath(self.encoder, one, self.layer, reference=self.reference, **how)
        path.choose_nodes(self.tolerance, self.max_nodes, self.endpoints(path)[1].norm())
        if path.error > self.tolerance:
            _log.warning(
                "%s reached a relative error of %.1e with %d nodes, not %.1e: raise max_nodes, or choose a later layer",
                *(self.name, path.error, path.nodes, self.tolerance),
            )
        return path

    def _find_spreads(self, role: Role) -> bool:
        """Whether one text's mask and positions serve a batch of nodes, so that blocks below `layer` run only once."""
        batch = self.encoder.read([PROBE], role)
        hidden, _ = self.encoder.hidden(batch, self.layer)
        at = torch.cat([hidden, hidden / 2])
        _, copied = freeze(self.encoder, batch.select([0, 0]), self.layer, JACOBIAN, at=at)
        try:
            _, spread = freeze(self.encoder, batch, self.layer, JACOBIAN, at=at)
        except (RuntimeError, ValueError, IndexError, UnsupportedOperation) as error:
            if is_full(error):
                raise
            return False
        return spread.shape == copied.shape and bool(torch.allclose(spread, copied, rtol=1e-3))

    def endpoints(self, path: IntegrationPath) -> tuple[Tensor, Tensor, Tensor]:
        """What belongs to a text beside its rows: rest (e,), embedding (e,) and the norm that divides them."""
        shifted = path.embedding - path.reference
        return torch.zeros_like(shifted), shifted, self.encoder.norms(shifted[None])[0]

    def similarities(
        self, query: Factors, embedding: Array, rest: Array, along: float
    ) -> tuple[dict[str, float], tuple[Notice, ...]]:
        """What is known of the references of a pair, and what has to be said about them.

        The document's `embedding` and `rest`; `along` is how many times its reference the rest is.
        """
        return {}, ()

    def _factor(self, batch: Batch, index: int, unit: Unit) -> Factors:
        path = self.path(batch, index)
        (tokens,), groups = path.batch.groups(unit)
        rows = path.rows(self.max_bytes, groups)
        rows, rest, embedding, norm, reference = to_host(rows, *self.endpoints(path), path.reference)
        more = {"tokens": tokens, "unit": unit, "references": {"nodes": path.nodes, "along": along(rest, reference)}}
        return self.build(batch, index, rows=rows, rest=rest, embedding=embedding, norm=norm, **more)

    def _cold(self, query: Factors, block: Tensor, documents: Batch, index: int) -> ExplainedPair:
        """Pull the query's rows and rest, `block`, through the document at each node."""
        path = self.path(documents, index)
        tokens, ends = path.relevance(block, self.max_bytes), self.endpoints(path)
        cells = torch.cat([tokens, pairing.product(block, ends[0][None])], dim=1)
        cells, rest, embedding, norm, reference = to_host(cells, *ends, path.reference)
        norms = norm * query.norm
        asked = torch.as_tensor(query.embedding.copy()).to(embedding)
        score = float(pairing.scores(asked, embedding[None], norms)[0])
        found = {"nodes": path.nodes, "along": along(rest, reference)}
        trust = self._trust(query, to_numpy(embedding), to_numpy(rest), found, path.error)
        return explained(query, documents.side(index), to_numpy(cells / norms), score, **trust)

    def finish(self, query: Factors, document: Factors, matrix: Array, score: float) -> ExplainedPair:
        trust = self._trust(query, document.embedding, document.rest, document.references or {}, document.error)
        return explained(query, document, matrix, score, **trust)

    def _trust(
        self, query: Factors, embedding: Array, rest: Array, found: Mapping[str, Any], error: float
    ) -> dict[str, Any]:
        """The quadrature's cost and error, and the similarities that say how much of the score the pairs can be."""
        similarities, notices = self.similarities(query, embedding, rest, found.get("along", 1.0))
        asked = int((query.references or {}).get("nodes", 0))
        references = {**quadrature(asked, int(found.get("nodes", 0)), query.error, error), **similarities}
        return {"references": references, "error": max(query.error, error), "notices": notices}


def along(rest: Tensor, reference: Tensor) -> float:
    """How many times the reference's embedding the rest is: it is a multiple of it."""
    return float(rest @ reference / (reference @ reference).clamp_min(torch.finfo(rest.dtype).tiny))


def quadrature(query_nodes: int, document_nodes: int, query_error: float, document_error: float) -> dict[str, float]:
    """What the integrals of both texts took, and the relative errors that are left, as `references` show them."""
    nodes = {"query_nodes": query_nodes, "document_nodes": document_nodes}
    return {**nodes, "query_error": query_error, "document_error": document_error}


class IntegratedJacobians(JacobianMethod):
    """`ij`: for any encoder; approximate, in that what an empty text says too is left over.

    Args:
        reference: what every token of the text is in the reference: "padding", "mask" (the tokens of these names),
            "zero" (a word vector of zeros) or "mean" (the mean of all word vectors).
        along_reference: where what lies along the reference's embedding counts: in the "rest", or in the "pairs", which
            is equation 2 of the papers as it stands.
    """

    name = "ij"
    normalises_in_path = True
    options = (*JacobianMethod.options, "reference", "along_reference")

    def __init__(
        self,
        scorer: Scorer,
        layer: int | None = None,
        *,
        tolerance: float = 1e-3,
        max_nodes: int = 128,
        reference: Reference = "padding",
        along_reference: AlongReference = "rest",
    ) -> None:
        super().__init__(scorer, layer, tolerance=tolerance, max_nodes=max_nodes)
        for option, value, known in (
            ("reference", reference, REFERENCES),
            ("along_reference", along_reference, get_args(AlongReference)),
        ):
            if value not in known:
                raise InvalidInput(f"{option} must be one of {', '.join(known)}, not {value!r}")
        self.reference, self.along_reference = reference, along_reference

    def check(self) -> None:
        if self.encoder.is_shifted and self.encoder.is_cosine:
            raise InvalidInput("a shifted encoder's reference embedding is zero and has no direction: use ij-exact")
        super().check()

    def endpoints(self, path: IntegrationPath) -> tuple[Tensor, Tensor, Tensor]:
        rest = path.embedding - path.counted(path.embedding) if path.across else path.reference
        return rest, path.embedding, path.embedding.new_ones(())

    def similarities(
        self, query: Factors, embedding: Array, rest: Array, along: float
    ) -> tuple[dict[str, float], tuple[Notice, ...]]:
        empty_query, empty = _reference(query.rest, (query.references or {}).get("along", 1.0)), _reference(rest, along)
        terms = {
            "f(a, r_b)": float(query.embedding @ empty),
            "f(r_a, b)": float(empty_query @ embedding),
            "f(r_a, r_b)": float(empty_query @ empty),
        }
        ends = {"f(a, r_b)": (query.embedding, empty), "f(r_a, b)": (empty_query, embedding)}
        cosines = {term: abs(terms[term]) / max(_lengths(*both), 1e-30) for term, both in ends.items()}
        name = max(cosines, key=lambda term: cosines[term])
        notices = self._said(name, terms) if cosines[name] > TRUSTED_REFERENCE else ()
        if self.along_reference == "rest":
            before = float((query.embedding - empty_query) @ (embedding - empty))
            terms["along references"] = before - float((query.embedding - query.rest) @ (embedding - rest))
        return terms, notices

    def _said(self, name: str, terms: Mapping[str, float]) -> tuple[Notice, ...]:
        filling = max(terms, key=lambda term: abs(terms[term]))
        fills = "would fill the pairs and is left out of them" if self.along_reference == "rest" else "fills the pairs"
        note = (
            f"{name} is {terms[name]:.2f}: an empty text is not neutral here, and the pairs cannot be trusted to that "
            f"extent; {filling} = {terms[filling]:.2f} {fills}, whatever the texts say"
        )
        _log.info("%s: %s", self.name, note)  # not a warning: the notice travels with the result
        return (Notice(METHOD, note),)


def _lengths(one: Array, other: Array) -> float:
    """The product of two vectors' lengths: 1 for a cosine, whose norm is inside the path."""
    return float(np.linalg.norm(one) * np.linalg.norm(other))


def _reference(rest: Array, along: float) -> Array:
    """A reference's embedding, of the multiple of it that is a rest; a text all across it does not tell it."""
    return rest / np.float32(along) if along else rest


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
        for role in self.encoder.roles:
            batch = self.encoder.read([PROBE], role)
            reference = self.encoder.run(self.encoder.reference(batch))
            if float(reference.norm()) > 1e-6 * float(self.encoder.run(batch).norm()):
                raise UnsupportedModel(
                    "the embedding of this shifted encoder's reference is not zero: a bias after its pooling adds to "
                    "it; use modules without one"
                )
