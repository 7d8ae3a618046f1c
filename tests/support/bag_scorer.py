"""A scorer of one file: a bag of word vectors, whose pairs are known exactly. No model, no torch module."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from rag_explain.encoder.batch import Batch
from rag_explain.factors import Factors
from rag_explain.methods import Method
from rag_explain.scorers import Scorer
from rag_explain.texts.passage import Passage, as_passages
from rag_explain.texts.segments import word_spans
from rag_explain.texts.tokens import Role, Token

WIDTH = 8


def vector(word: str) -> NDArray[np.float64]:
    """A word's vector, the same in every process."""
    seed = int.from_bytes(hashlib.sha256(word.lower().encode()).digest()[:8], "little")
    return np.random.default_rng(seed).normal(size=WIDTH)


class Words(Method):
    """A word's row is its vector, and nothing is left over."""

    name = "words"

    def token_factors(self, batch: Batch) -> list[Factors]:
        result = []
        for index, tokens in enumerate(batch.tokens):
            rows = torch.as_tensor(np.array([vector(token.text) for token in tokens]).reshape(-1, WIDTH))
            whole, nothing, one = rows.sum(dim=0), torch.zeros(WIDTH), torch.ones(())
            result.append(self.build(batch, index, rows=rows, rest=nothing, embedding=whole, norm=one))
        return result


class BagOfVectors(Scorer):
    """The dot product of two sums of word vectors."""

    name = "bag of vectors"
    measure = "dot"
    methods = (Words,)
    fingerprint = "bag-1"

    def read(self, passages: Sequence[Passage], role: Role) -> Batch:
        tokens = tuple(
            tuple(Token(passage.text[a:b], a, b) for a, b in word_spans(passage.text)) for passage in passages
        )
        return Batch(passages=tuple(passages), role=role, tokens=tokens, notices=((),) * len(passages))

    def embed(self, passages: Sequence[str | Passage], role: Role) -> NDArray[np.float32]:
        batch = self.read(as_passages(passages), role)
        rows = [sum((vector(token.text) for token in tokens), np.zeros(WIDTH)) for tokens in batch.tokens]
        return np.array(rows, np.float32).reshape(-1, WIDTH)

    def score(self, query: str, documents: Sequence[str | Passage]) -> NDArray[np.float64]:
        return self.embed(documents, "document").astype(np.float64) @ self.embed([query], "query")[0]
