"""What an explanation has to beat: the simplest answers to the same question.

| method | a pair of tokens (i, j) gets |
|---|---|
| `embeddings` | the dot product of their vectors at the input of block `layer` (0: the embedding output) |
| `gradient` | the product of the lengths of the similarity's gradients by both tokens |
| `integrated-gradients` | the product of both tokens' integrated gradients of the similarity |
| `random` | a number drawn from the seed and the two texts |

Gradients and integrated gradients (Sundararajan et al. 2017) are first-order: they say how much a token matters, given
the whole other text. The product for a pair only keeps their order in rows and columns.
"""

import copy
import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rag_explain import pairing
from rag_explain.encoder.batch import Batch
from rag_explain.encoder.model import Encoder
from rag_explain.encoder.reference import Reference
from rag_explain.linear import JACOBIAN
from rag_explain.methods.base import ExplainedPair, PairMethod
from rag_explain.methods.frozen import freeze
from rag_explain.methods.jacobian import IntegratedJacobians, quadrature
from rag_explain.scorers.base import Scorer


class TokenEmbeddings(PairMethod):
    """`embeddings`: products of the tokens' input vectors. The encoder's blocks and the context play no part."""

    name = "embeddings"
    compares_tokens = True

    def cold(self, query: Batch, documents: Batch) -> list[ExplainedPair]:
        hidden, own = self.encoder.hidden(query, self.layer)
        others, embeddings = self.encoder.hidden(documents, self.layer)
        scores = similarities(self.encoder, own[0], embeddings)
        (left,) = query.unpad(hidden)
        tables = [pairing.product(left, right) for right in documents.unpad(others)]
        return self.ranked(query, documents, tables, scores)


class Gradient(PairMethod):
    """`gradient`: |d similarity / d token|, the vanilla gradient; a pair is the product of its tokens'."""

    name = "gradient"

    def cold(self, query: Batch, documents: Batch) -> list[ExplainedPair]:
        left, own = freeze(self.encoder, query, self.layer, JACOBIAN)
        right, embeddings = freeze(self.encoder, documents, self.layer, JACOBIAN)
        scores = similarities(self.encoder, own[0], embeddings)
        by_query, by_document = similarity_gradients(self.encoder, own[0], embeddings)
        step = left.chunk(self.max_bytes, len(by_query))
        slopes = torch.cat([left.pull(part) for part in by_query[:, None].split(step)])[:, 0].norm(dim=-1)
        columns = documents.unpad(right.pull(by_document[None])[0].norm(dim=-1))
        rows = slopes[:, query.positions(0)]
        return self.ranked(query, documents, map(torch.outer, rows, columns), scores)


class IntegratedGradients(PairMethod):
    """`integrated-gradients` of the similarity, one text at a time with the other held; a pair is their product.

    The quadrature, its tolerance and its references are those of `ij`.
    """

    name = "integrated-gradients"

    def __init__(
        self,
        scorer: Scorer,
        layer: int | None = None,
        *,
        tolerance: float = 1e-3,
        max_nodes: int = 128,
        reference: Reference = "padding",
    ) -> None:
        super().__init__(scorer, layer)
        options: dict[str, Any] = {"tolerance": tolerance, "max_nodes": max_nodes, "reference": reference}
        self._integral = IntegratedJacobians(scorer, self.layer, along_reference="pairs", **options)

    @property
    def settings(self) -> dict[str, Any]:
        return {name: value for name, value in self._integral.settings.items() if name != "along_reference"}

    def check(self) -> None:
        quick = copy.copy(self)
        quick._integral = self._integral.with_one_node()
        PairMethod.check(quick)

    def cold(self, query: Batch, documents: Batch) -> list[ExplainedPair]:
        asked = self._integral.path(query, 0)
        paths = [self._integral.path(documents, index) for index in range(len(documents))]
        embeddings = torch.stack([path.embedding for path in paths])
        scores = pairing.scores(asked.embedding, embeddings, 1)
        rows = asked.relevance(embeddings, self.max_bytes)
        columns = [path.relevance(asked.embedding[None], self.max_bytes)[0] for path in paths]
        ranked = self.ranked(query, documents, map(torch.outer, rows, columns), scores)
        result = []
        for pair, path, row, column in zip(ranked, paths, rows, columns, strict=True):
            references = {
                "query_sum": float(row.sum()),
                "document_sum": float(column.sum()),
                "f(a, r_b)": float(pairing.scores(asked.embedding, path.reference[None], 1)[0]),
                "f(r_a, b)": float(pairing.scores(asked.reference, path.embedding[None], 1)[0]),
                **quadrature(asked.nodes, path.nodes, asked.error, path.error),
            }
            result.append(replace(pair, references=references, error=max(asked.error, path.error)))
        return result


class Random(PairMethod):
    """`random`: numbers from a normal distribution, the same for the same seed and texts."""

    name = "random"
    options = ("seed",)
    chooses_layer = False

    def __init__(self, scorer: Scorer, layer: int | None = None, *, seed: int = 0) -> None:
        super().__init__(scorer, layer)
        self.seed = seed

    def cold(self, query: Batch, documents: Batch) -> list[ExplainedPair]:
        scores = similarities(self.encoder, self.encoder.run(query)[0], self.encoder.run(documents))
        tables = []
        for passage, tokens in zip(documents.passages, documents.tokens, strict=True):
            texts = f"{self.seed}\0{query.passages[0].string}\0{passage.string}"
            digest = hashlib.blake2b(texts.encode(), digest_size=8).digest()
            generator = np.random.default_rng(int.from_bytes(digest, "big"))
            tables.append(torch.as_tensor(generator.standard_normal((len(query.tokens[0]), len(tokens)))))
        return self.ranked(query, documents, tables, scores)


def similarities(encoder: Encoder, query: Tensor, documents: Tensor) -> Tensor:
    """(D,): the encoder's own similarity of an embedding (e,) with each of (D, e)."""
    return pairing.scores(query, documents, encoder.norms(documents) * encoder.norms(query[None]))


def similarity_gradients(encoder: Encoder, query: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
    """(D, e) twice: the similarity's gradients by the query's and by the document's embedding."""
    if not encoder.is_cosine:
        return documents, query.expand_as(documents)
    return cosine_gradients(query, documents)[1:]


def cosine_gradients(query: Tensor, documents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(D,) the cosines of a vector (e,) with each of (D, e), and (D, e) twice their gradients by the two.

    d cos(a, b) / d a = (b / |b| - cos(a, b) a / |a|) / |a|.
    """
    tiny = torch.finfo(documents.dtype).tiny
    one, other = query.norm().clamp_min(tiny), documents.norm(dim=-1, keepdim=True).clamp_min(tiny)
    a, b = query / one, documents / other
    cosine = (a * b).sum(dim=-1, keepdim=True)
    return cosine[:, 0], (b - cosine * a) / one, (a - cosine * b) / other
