"""What an explanation has to beat: the simplest answers to the same question.

| method | a pair of tokens (i, j) gets | additive |
|---|---|---|
| `embeddings` | the dot product of their vectors at the input of block `layer` (0: the embedding output) | no |
| `gradient` | the product of the lengths of the similarity's gradients by both tokens | no |
| `integrated-gradients` | the product of both tokens' integrated gradients of the similarity | no |
| `random` | a number drawn from the seed and the two texts | no |

Gradients and integrated gradients (Sundararajan et al. 2017) are first-order: they say how much a token matters, given
the whole other text, and know no pairs. Shown as a matrix, a pair is the product of its two tokens' saliencies: rows
and columns then keep the order of the saliencies, and that is all that the product adds.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rag_explain.encoder import Batch, Encoder
from rag_explain.errors import InvalidInput
from rag_explain.linear import DEFAULT_MAX_BYTES, JACOBIAN
from rag_explain.methods.base import ColdDocument, PairMethod, to_numpy
from rag_explain.methods.bilrp import freeze
from rag_explain.methods.jacobian import IntegratedJacobians
from rag_explain.types import Array


class TokenEmbeddings(PairMethod):
    """`embeddings`: products of the tokens' input vectors. The encoder's blocks and the context play no part."""

    name = "embeddings"

    def explain(self, query: Batch, documents: Batch) -> list[ColdDocument]:
        (asked,), own = self._hidden(query)
        found, embeddings = self._hidden(documents)
        scores = similarities(self.encoder, own[0], embeddings)
        left = asked[query.positions(0)]
        return [
            _document(documents, index, left @ found[index, documents.positions(index)].T, float(scores[index]))
            for index in range(len(documents))
        ]

    def _hidden(self, batch: Batch) -> tuple[Tensor, Tensor]:
        caught: list[Tensor] = []

        def visit(block: int, hidden: Tensor) -> Tensor:
            if block == self.layer:
                caught.append(hidden.clone())
            return hidden

        embeddings = self.encoder.run(batch, visit)
        return caught[0], embeddings


class Gradient(PairMethod):
    """`gradient`: |d similarity / d token|, the vanilla gradient; a pair is the product of its tokens'."""

    name = "gradient"

    def explain(self, query: Batch, documents: Batch) -> list[ColdDocument]:
        left = freeze(self.encoder, query, self.layer, JACOBIAN)
        right = freeze(self.encoder, documents, self.layer, JACOBIAN)
        scores = similarities(self.encoder, left.embedding[0], right.embedding)
        by_query, by_document = similarity_gradients(self.encoder, left.embedding[0], right.embedding)
        step = left.chunk(self.budget or DEFAULT_MAX_BYTES)
        asked = torch.cat([left.pull(part) for part in by_query[:, None].split(step)])[:, 0].norm(dim=-1)
        found = right.pull(by_document[None])[0].norm(dim=-1)
        here = query.positions(0)
        return [
            _document(
                documents,
                index,
                torch.outer(asked[index, here], found[index, documents.positions(index)]),
                float(scores[index]),
            )
            for index in range(len(documents))
        ]


class IntegratedGradients(PairMethod):
    """`integrated-gradients` of the similarity, one text at a time with the other held; a pair is their product.

    The quadrature, its tolerance and its reference are those of `ij`.
    """

    name = "integrated-gradients"

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
        self._integral = IntegratedJacobians(
            encoder, self.layer, tolerance=tolerance, max_nodes=max_nodes, budget=budget
        )

    @property
    def settings(self) -> dict[str, Any]:
        return self._integral.settings

    def explain(self, query: Batch, documents: Batch) -> list[ColdDocument]:
        budget = self.budget or DEFAULT_MAX_BYTES
        asked = self._integral.path(query, 0)
        paths = [self._integral.path(documents, index) for index in range(len(documents))]
        rows = asked.relevance(torch.stack([path.embedding for path in paths]), budget)[:, asked.positions]
        result = []
        for index, path in enumerate(paths):
            columns = path.relevance(asked.embedding[None], budget)[0, path.positions]
            references = {
                "query_sum": float(rows[index].sum()),
                "document_sum": float(columns.sum()),
                "f(a, r_b)": float(asked.embedding @ path.reference),
                "f(r_a, b)": float(asked.reference @ path.embedding),
                "query_nodes": asked.nodes,
                "document_nodes": path.nodes,
                "query_error": asked.error,
                "document_error": path.error,
            }
            score = float(asked.embedding @ path.embedding)
            result.append(_document(documents, index, torch.outer(rows[index], columns), score, references))
        return result


class Random(PairMethod):
    """`random`: numbers from a normal distribution, the same for the same seed and texts."""

    name = "random"

    def __init__(self, encoder: Encoder, layer: int | None = None, *, seed: int = 0, budget: int | None = None) -> None:
        if layer is not None:
            raise InvalidInput("random has no layer to choose")
        super().__init__(encoder, budget=budget)
        self.seed = seed

    @property
    def settings(self) -> dict[str, Any]:
        return {"seed": self.seed}

    def explain(self, query: Batch, documents: Batch) -> list[ColdDocument]:
        scores = similarities(self.encoder, self.encoder.run(query)[0], self.encoder.run(documents))
        result = []
        for index in range(len(documents)):
            texts = f"{self.seed}\0{query.texts[0].string}\0{documents.texts[index].string}"
            digest = hashlib.blake2b(texts.encode(), digest_size=8).digest()
            generator = np.random.default_rng(int.from_bytes(digest, "big"))
            pairs = torch.as_tensor(generator.standard_normal((len(query.tokens[0]), len(documents.tokens[index]))))
            result.append(_document(documents, index, pairs, float(scores[index])))
        return result


def similarities(encoder: Encoder, query: Tensor, documents: Tensor) -> Tensor:
    """(D,): the encoder's own similarity of an embedding (e,) with each of (D, e)."""
    return documents @ query / (encoder.norms(documents) * encoder.norms(query[None]))


def similarity_gradients(encoder: Encoder, query: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
    """(D, e) twice: the similarity's gradients by the query's and by the document's embedding.

    d cos(a, b) / d a = (b / |b| - cos(a, b) a / |a|) / |a|, and b / |b| alone where a is not normalised.
    """
    if not encoder.is_cosine:
        return documents, query.expand_as(documents)
    one, other = encoder.norms(query[None])[:, None], encoder.norms(documents)[:, None]
    a, b = query / one, documents / other
    cosine = (a * b).sum(dim=-1, keepdim=True)
    return (b - cosine * a) / one, (a - cosine * b) / other


def _document(
    batch: Batch, index: int, pairs: Tensor, score: float, references: dict[str, Any] | None = None
) -> ColdDocument:
    matrix: Array = np.pad(to_numpy(pairs), ((0, 1), (0, 1)))
    return ColdDocument(batch.tokens[index], matrix, score, batch.truncated[index], references)
