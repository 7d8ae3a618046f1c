"""The last layer's own decomposition: the pooled embedding is already a sum over token vectors.

    embedding = sum_t  share_t * h_t      (mean pooling: share_t = 1 / n)

so <embedding_q, embedding_d> is a sum over pairs of token vectors, exactly and at the cost of one forward pass. A Dense
layer behind the pooling is made linear as in BiLRP (activation ratios frozen), and its bias is the rest.

What it does not say: a token's last vector has read the whole text, so a pair of vectors is not a pair of words. Under
CLS or last-token pooling the sum has a single term, and the explanation is one cell.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from rag_explain.encoder import Batch, Encoder
from rag_explain.errors import InvalidInput
from rag_explain.linear import LRP
from rag_explain.methods.base import ColdDocument, Half
from rag_explain.methods.bilrp import FrozenMethod
from rag_explain.types import Array, Factors

_ONE_CELL = (
    "this encoder's embedding is the vector of a single token, so the decomposition is one cell and says nothing "
    "about words: use bilrp or ij"
)


class Pooled(FrozenMethod):
    """`pooled`: rows are what each token's last-layer vector gives to the pooled embedding."""

    name = "pooled"
    rules = LRP
    computes_rest = True

    def __init__(self, encoder: Encoder, layer: int | None = None, *, budget: int | None = None) -> None:
        if layer is not None:
            raise InvalidInput("pooled takes the output of the last block apart: it has no layer to choose")
        super().__init__(encoder, 0, budget=budget)
        self.layer = encoder.blocks  # the output of the last block

    @property
    def settings(self) -> dict[str, Any]:
        return {}

    def cold(self, query: Factors, batch: Batch) -> list[ColdDocument]:
        return [_noted(document) for document in super().cold(query, batch)]

    def finish(self, query: Factors, document: Half, matrix: Array, score: float) -> ColdDocument:
        return _noted(super().finish(query, document, matrix, score))


def _noted(document: ColdDocument) -> ColdDocument:
    """Says so where a single pair of tokens is all there is."""
    single = np.count_nonzero(document.matrix[:-1, :-1].any(axis=0)) <= 1 < len(document.tokens)
    return replace(document, note=_ONE_CELL) if single else document
