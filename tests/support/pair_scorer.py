"""A scorer of one file that reads the pair: both texts are cut together, and there is no vector.

What the user sees is a sigmoid of what is split.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rag_explain.encoder.batch import Batch
from rag_explain.methods import ExplainedPair, Method, explained
from rag_explain.results.notices import TRUNCATED, Notice
from rag_explain.scorers import Scorer
from rag_explain.texts.passage import Passage, as_passage, as_passages
from rag_explain.texts.segments import word_spans
from rag_explain.texts.tokens import Role, Token

LIMIT = 12  # words of both texts together
BIAS = -1.5
CUT = Notice(TRUNCATED, "The words that do not fit have no influence on the score.", side="document")


def weight(query: str, document: str) -> float:
    """What a pair of words adds to the logit."""
    return 2.0 if query.lower() == document.lower() else 0.1 * (len(set(query) & set(document)) - 2)


def logit(batch: Batch) -> float:
    query, document = batch.tokens
    return BIAS + sum(weight(left.text, right.text) for left in query for right in document)


class Terms(Method):
    """Each pair of words and its weight; the bias is the rest."""

    name = "terms"
    has_factors = False
    linear = False

    def cold(self, query: Batch, documents: Batch) -> list[ExplainedPair]:
        result = []
        for passage in documents.passages:
            both = self.scorer.read_pair(query.passages[0], passage)
            left, right = both.tokens
            matrix = np.zeros((len(left) + 1, len(right) + 1), np.float32)
            matrix[:-1, :-1] = [[weight(one.text, other.text) for other in right] for one in left]
            matrix[-1, -1] = BIAS
            returned = float(self.scorer.returned(query.passages[0].string, [passage])[0])
            result.append(explained(both.side(0), both.side(1), matrix, logit(both), returned=returned))
        return result


class PairReader(Scorer):
    """Counts pairs of words, of as many words as fit."""

    name = "pair reader"
    measure = "logit"
    methods = (Terms,)
    fingerprint = "pairs-1"

    def read(self, passages: Sequence[Passage], role: Role) -> Batch:
        words = tuple(tuple(Token(p.text[a:b], a, b) for a, b in word_spans(p.text)) for p in passages)
        return Batch(passages=tuple(passages), role=role, tokens=words, notices=((),) * len(passages))

    def read_pair(self, query: Passage, document: Passage) -> Batch:
        left, right = self.read([query, document], "document").tokens
        room = max(1, LIMIT - len(left))
        return Batch(
            passages=(query, document),
            role="document",
            tokens=(left, right[:room]),
            notices=((), (CUT,) if len(right) > room else ()),
        )

    def score(self, query: str, documents: Sequence[str | Passage]) -> NDArray[np.float64]:
        asked = as_passage(query)
        return np.array([logit(self.read_pair(asked, document)) for document in as_passages(documents)])

    def returned(self, query: str, documents: Sequence[str | Passage]) -> NDArray[np.float64]:
        return 1 / (1 + np.exp(-self.score(query, documents)))
