"""Static word vectors, split: the embedding is the mean of its tokens' vectors, so each token's share is its row.

    e(x) = sum_t rows[t],   rows[t] = W[id_t] / n            score = sum over pairs <rows_q[i], rows_d[j]> / norms

Exact, with nothing left over, at the cost of a look into a table. A row is its word alone and nothing of its context.
"""

import torch

from rag_explain.devices import to_host
from rag_explain.encoder.batch import Batch
from rag_explain.errors import CheckFailed, UnsupportedModel
from rag_explain.factors import Factors
from rag_explain.methods.base import Method
from rag_explain.scorers.base import Scorer
from rag_explain.scorers.checks import PROBE
from rag_explain.scorers.static import Static
from rag_explain.texts.passage import Passage


class StaticRows(Method):
    """`static`: each token's own vector, as its share of the mean."""

    name = "static"

    def __init__(self, scorer: Scorer, layer: int | None = None) -> None:
        if not isinstance(scorer, Static):
            raise UnsupportedModel(
                f"static splits a mean of word vectors, which is not how {scorer.name} ranks: use {scorer.methods[0]}"
            )
        self._model = scorer.static
        super().__init__(scorer, layer)

    def check(self) -> None:
        (factors,) = self.token_factors(self.scorer.read([Passage(PROBE)], "document"))
        if not factors.error <= self.scorer.tolerance:
            raise CheckFailed(
                f"the embedding of {self.scorer.name} is not the mean of its word vectors (off by "
                f"{factors.error:.1%}): its EmbeddingBag must have the mode 'mean' and leave no token out"
            )
        super().check()

    def token_factors(self, batch: Batch) -> list[Factors]:
        embeddings, padded = to_host(self._model.run(batch), self._model.rows(batch))
        rows = batch.unpad(padded)
        norms, nothing = self._model.norms(embeddings), torch.zeros_like(embeddings[0])
        return [
            self.build(batch, index, rows=rows[index], rest=nothing, embedding=embedding, norm=norms[index])
            for index, embedding in enumerate(embeddings)
        ]
