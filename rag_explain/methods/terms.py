"""Terms: the split of a score that is a sum over the terms of a vocabulary.

    score = sum over terms v of value_v + rest                      value_v = sum of the cells in which v was met

The scorer says what each term adds, and which tokens of both texts it was read from; nothing is computed here.
"""

import numpy as np

from rag_explain.encoder.batch import Batch
from rag_explain.errors import InvalidInput
from rag_explain.methods.base import ExplainedPair, Method, explained


class Terms(Method):
    """`terms`: which words both texts have in common, and what each of them adds."""

    name = "terms"
    has_factors = False
    linear = False

    def check(self) -> None:
        if self.name not in self.scorer.methods:
            raise InvalidInput(f"{self.scorer.name} is no sum over terms: use {self.scorer.methods[0]}")

    def cold(self, query: Batch, documents: Batch) -> list[ExplainedPair]:
        pairs = []
        for index, split in enumerate(self.scorer.by_terms(query, documents)):
            cells = split.matrix.astype(np.float32)
            cells[-1, -1] += (split.matrix - cells).sum()  # what single precision cannot hold of all cells together
            more = {"terms": split.terms, "notices": split.notices}
            pairs.append(explained(query.side(0), documents.side(index), cells, split.score, **more))
        return pairs
