"""The last layer's own decomposition: the pooled embedding is already a sum over token vectors.

    embedding = sum_t  share_t * h_t      (mean pooling: share_t = 1 / n)

so <embedding_q, embedding_d> is a sum over pairs of token vectors, exactly and at the cost of one forward pass. A Dense
layer after the pooling is made linear as in BiLRP (activation ratios frozen), and its bias is the rest. A token's last
vector has read the whole text: a pair of vectors is not a pair of words.
"""

import numpy as np

from rag_explain.encoder.batch import Side
from rag_explain.factors import Array, Factors
from rag_explain.linear import LRP
from rag_explain.methods.base import ExplainedPair, explained
from rag_explain.methods.frozen import FrozenMethod
from rag_explain.results.notices import METHOD, Notice

_ONE_CELL = Notice(
    METHOD,
    "an embedding of this encoder is the vector of a single token, so the decomposition is one cell, or one row or "
    "column of them, and says nothing about the words of that text: use bilrp or ij",
)


class Pooled(FrozenMethod):
    """`pooled`: rows are what each token's last-layer vector gives to the pooled embedding."""

    name = "pooled"
    rules = LRP
    computes_rest = True
    chooses_layer = False

    @property
    def default_layer(self) -> int:
        return self.encoder.n_blocks  # the output of the last block

    def finish(self, query: Factors, document: Factors | Side, matrix: Array, score: float) -> ExplainedPair:
        cells = matrix[:-1, :-1] != 0
        sides = ((cells.any(axis=1), query.tokens), (cells.any(axis=0), document.tokens))
        single = any(np.count_nonzero(carries) <= 1 < len(tokens) for carries, tokens in sides)
        return explained(query, document, matrix, score, notices=(_ONE_CELL,) if single else ())
