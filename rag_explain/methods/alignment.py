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
how the encoder scores, and the explanation says so (`surrogate`). In both cases the vectors are contextual: each has
read its whole text, so a pair of vectors is not a pair of input tokens.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from rag_explain.encoder import Batch, Encoder
from rag_explain.errors import InvalidInput, MissingExtra
from rag_explain.methods.base import ColdDocument, Half, Method
from rag_explain.types import Array, Factors

Score = Literal["maxsim", "recall", "precision", "f1", "transport"]
_OWN: dict[str, Score] = {"maxsim": "maxsim", "meanmaxsim": "recall"}
Matrix = NDArray[np.float64]


class Alignment(Method):
    """`alignment`: which token of the document each token of the query met, and what the match is worth.

    Args:
        score: which score to explain; None: the model's own for a multi-vector encoder, else "maxsim".
    """

    name = "alignment"
    bilinear = False

    def __init__(
        self,
        encoder: Encoder,
        layer: int | None = None,
        *,
        score: Score | None = None,
        budget: int | None = None,
    ) -> None:
        if layer is not None:
            raise InvalidInput("alignment compares the vectors of the last layer: it has no layer to choose")
        super().__init__(encoder, 0, budget=budget)
        self.layer = encoder.blocks
        own = _OWN[getattr(encoder, "score", "maxsim")]
        if score is not None and score not in get_args(Score):
            raise InvalidInput(f"score must be one of {', '.join(get_args(Score))}, not {score!r}")
        self.score: Score = own if score is None else score
        self._is_own = encoder.is_multivector and self.score == own
        if self.score == "transport":
            _transport_solver()

    @property
    def settings(self) -> dict[str, Any]:
        return {"score": self.score}

    @property
    def surrogate(self) -> str | None:
        if self._is_own:
            return None
        return f"{self.score} of last-layer token vectors is explained, which is not how this encoder scores"

    def factor(self, batch: Batch) -> list[Factors]:
        vectors, mask = self.encoder.token_vectors(batch)
        if not self.encoder.is_multivector:
            vectors = torch.nn.functional.normalize(vectors, dim=-1)
        vectors = vectors * mask[..., None]
        result = []
        for index in range(len(batch)):
            rows = vectors[index, batch.positions(index)]
            if not rows.any():
                raise InvalidInput("no token of the text is scored: it is empty, or all of it is masked")
            # Nothing is summed here: the embedding of the factors is only what their rows add up to.
            total = rows.sum(dim=0)
            result.append(self.build(batch, index, rows, torch.zeros_like(total), total, total.new_ones(())))
        return result

    def cold(self, query: Factors, batch: Batch) -> list[ColdDocument]:
        """One forward pass gives the factors: there is nothing cheaper."""
        return [self.pair(query, factors) for factors in self.factor(batch)]

    def finish(self, query: Factors, document: Half, matrix: Array, score: float) -> ColdDocument:
        cosines = matrix[:-1, :-1].astype(np.float64)
        # Tokens that are not scored have zero vectors; no other vector is orthogonal to a whole text.
        rows, columns = cosines.any(axis=1), cosines.any(axis=0)
        table = align(cosines[np.ix_(rows, columns)], self.score)
        pairs = np.zeros_like(matrix)
        pairs[np.ix_(np.append(rows, False), np.append(columns, False))] = table
        return ColdDocument(
            document.tokens,
            pairs,
            float(table.sum()),
            document.truncated,
            references=scores(cosines[np.ix_(rows, columns)]),
            similarities=matrix[:-1, :-1],
        )


def align(cosines: Matrix, score: Score) -> Matrix:
    """(n_q, n_d): a matrix that sums to `score` and says which pairs of tokens it comes from."""
    if not cosines.size:
        return cosines
    if score == "transport":
        n_q, n_d = cosines.shape
        plan: Matrix = _transport_solver()(np.full(n_q, 1 / n_q), np.full(n_d, 1 / n_d), 1 - cosines)
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
    kinds: tuple[Score, ...] = ("maxsim", "recall", "precision", "f1")
    return {kind: float(align(cosines, kind).sum()) for kind in kinds}


def _transport_solver() -> Any:
    try:
        from ot import emd
    except ImportError as error:
        raise MissingExtra("POT", "ot") from error
    return emd
