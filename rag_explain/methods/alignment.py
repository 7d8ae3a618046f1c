"""Alignment of token vectors: late interaction (ColBERT), BERTScore, optimal transport.

With unit token vectors x_i of the query and y_j of the document, c_ij = <x_i, y_j>:

    maxsim      sum_i max_j c_ij                                       Khattab & Zaharia 2020; Chan & Ng 2008
    recall      (1 / n_q) sum_i max_j c_ij      how much of the query is in the document     Zhang et al. 2020
    precision   (1 / n_d) sum_j max_i c_ij      how much of the document is in the query
    f1          2 P R / (P + R)
    transport   sum_ij T_ij c_ij,  T the optimal transport plan between uniform weights at cost 1 - c

Each score is written as a matrix that sums to it: the best matches, scaled; for f1 the two matrices weighted by
R / (P + R) and P / (P + R), which add up to f1 exactly. All cosines are beside it, in `similarities`.

For a multi-vector encoder this is the model's own score and the explanation is exact. For any other encoder it is not
how the encoder scores, and the explanation says so (`surrogate`).
"""

from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from rag_explain.devices import to_host
from rag_explain.encoder.batch import Batch
from rag_explain.errors import InvalidInput, import_extra
from rag_explain.factors import Array, Factors
from rag_explain.methods.base import ExplainedPair, Method, explained
from rag_explain.results.notices import OTHER_SCORE, Notice
from rag_explain.scorers.base import Scorer

Score = Literal["maxsim", "recall", "precision", "f1", "transport"]
Matrix = NDArray[np.float64]
_TRANSPORT = ("ot", "POT", "ot")
_MEASURES: dict[Score, str] = {
    "maxsim": "MaxSim",
    "recall": "mean MaxSim",
    "precision": "precision of MaxSim",
    "f1": "F1 of MaxSim",
    "transport": "optimal transport",
}


class Alignment(Method):
    """`alignment`: which token of the document each token of the query met, and what the match is worth.

    `score` says which score to explain; None: the model's own where it compares vectors of tokens, else "maxsim".
    """

    name = "alignment"
    linear = False
    options = ("score",)

    def __init__(self, scorer: Scorer, layer: int | None = None, *, score: Score | None = None) -> None:
        super().__init__(scorer, layer)
        if score is not None and score not in get_args(Score):
            raise InvalidInput(f"score must be one of {', '.join(get_args(Score))}, not {score!r}")
        own: Score = next((kind for kind, name in _MEASURES.items() if name == scorer.measure), "maxsim")
        self.score: Score = own if score is None else score
        if self.score == "transport":
            import_extra(*_TRANSPORT)

    @property
    def measure(self) -> str:
        return _MEASURES[self.score]

    @property
    def notices(self) -> tuple[Notice, ...]:
        if self.measure == self.scorer.measure:
            return (*super().notices, *self.scorer.token_notices)
        reason = f"{self.score} of last-layer token vectors is explained, which is not how this encoder scores"
        return (Notice(OTHER_SCORE, reason), *self.scorer.token_notices)

    def check(self) -> None:
        if self.name not in self.scorer.methods:
            raise InvalidInput(
                f"{self.scorer.name} has no vectors of tokens in context to align: use {self.scorer.methods[0]}"
            )
        super().check()

    def token_factors(self, batch: Batch) -> list[Factors]:
        vectors, mask = self.scorer.token_vectors(batch)
        (vectors,), result = to_host(vectors), []
        for index, rows in enumerate(batch.unpad(vectors * mask[..., None])):
            if not rows.any():
                raise InvalidInput("no token of the text is scored: it is empty, or all of it is masked")
            # Nothing is summed here: the embedding of the factors is only what their rows add up to.
            total = rows.sum(dim=0)
            rest, norm = torch.zeros_like(total), total.new_ones(())
            result.append(self.build(batch, index, rows=rows, rest=rest, embedding=total, norm=norm))
        return result

    def finish(self, query: Factors, document: Factors, matrix: Array, score: float) -> ExplainedPair:
        cosines = matrix[:-1, :-1].astype(np.float64)
        # Tokens that are not scored have zero vectors; no other vector is orthogonal to a whole text.
        rows, columns = cosines.any(axis=1), cosines.any(axis=0)
        compared = cosines[np.ix_(rows, columns)]
        table = align(compared, self.score)
        pairs = np.zeros_like(matrix)
        pairs[np.ix_(np.append(rows, False), np.append(columns, False))] = table
        more = {"references": scores(compared), "similarities": matrix[:-1, :-1]}
        return explained(query, document, pairs, float(table.sum()), **more)


def align(cosines: Matrix, score: Score) -> Matrix:
    """(n_q, n_d): a matrix that sums to `score` and says which pairs of tokens it comes from."""
    if not cosines.size:
        return cosines
    if score == "transport":
        n_q, n_d = cosines.shape
        plan: Matrix = import_extra(*_TRANSPORT).emd(np.full(n_q, 1 / n_q), np.full(n_d, 1 / n_d), 1 - cosines)
        return plan * cosines
    by_query = np.where(np.arange(cosines.shape[1]) == cosines.argmax(axis=1)[:, None], cosines, 0.0)
    by_document = np.where(np.arange(cosines.shape[0])[:, None] == cosines.argmax(axis=0), cosines, 0.0)
    recall, precision = by_query / cosines.shape[0], by_document / cosines.shape[1]
    if score == "f1":
        total = float(precision.sum() + recall.sum())
        share = float(recall.sum()) / total if total else 0.0
        balanced: Matrix = share * precision + (1 - share) * recall
        return balanced
    tables: dict[Score, Matrix] = {"maxsim": by_query, "recall": recall, "precision": precision}
    return tables[score]


def scores(cosines: Matrix) -> dict[str, float]:
    """The scores of the same vectors that cost nothing, for comparison."""
    return {kind: float(align(cosines, kind).sum()) for kind in get_args(Score) if kind != "transport"}
