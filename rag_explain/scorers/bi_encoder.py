"""A bi-encoder: one embedding per text, compared by cosine or dot product."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rag_explain import pairing
from rag_explain.encoder.batch import Batch
from rag_explain.encoder.model import Encoder
from rag_explain.results.notices import OTHER_SCORE, Notice
from rag_explain.scorers.base import Scorer
from rag_explain.texts.passage import Passage
from rag_explain.texts.tokens import Role

_METHODS = (
    "bilrp",
    "hxp",
    "ij",
    "pooled",
    "alignment",
    "bti",
    "embeddings",
    "gradient",
    "integrated-gradients",
)


class BiEncoder(Scorer):
    """A sentence-transformers SentenceTransformer."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self.name = encoder.name
        self.measure = "dot" if encoder.similarity == "dot" else "cosine"
        # A shifted encoder's reference embedding is zero, which has no direction: `ij-exact` is made for it.
        self.methods = tuple("ij-exact" if name == "ij" and encoder.is_shifted else name for name in _METHODS)
        if encoder.similarity in ("euclidean", "manhattan"):
            reason = f"the model compares by {encoder.similarity} distance; the cosine is explained instead"
            self.notices = (Notice(OTHER_SCORE, reason),)

    @property
    def encoder(self) -> Encoder:
        return self._encoder

    @property
    def fingerprint(self) -> str:
        return self._encoder.fingerprint

    @property
    def device(self) -> str:
        return str(self._encoder.device)

    def describe(self) -> dict[str, str]:
        return {**super().describe(), **self._encoder.describe()}

    def computing(self) -> AbstractContextManager[None]:
        return self._encoder.computing()

    def read(self, passages: Sequence[Passage], role: Role) -> Batch:
        return self._encoder.read(passages, role)

    def score(self, query: str, documents: Sequence[str | Passage]) -> NDArray[np.float64]:
        asked, found = (self.embed(texts, role).astype(np.float64) for texts, role in _sides(query, documents))
        norms: NDArray[np.float64] = np.ones(len(found))
        if self.measure == "cosine":
            norms = np.linalg.norm(found, axis=1) * float(np.linalg.norm(asked[0]))
        return pairing.scores(asked[0], found, np.maximum(norms, np.finfo(np.float32).tiny))

    def embed(self, passages: Sequence[str | Passage], role: Role) -> NDArray[np.float32]:
        return self._encoder.embed(passages, role)

    def token_vectors(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The last block's vectors, scaled to length one; those of words are compared."""
        vectors, _ = self._encoder.hidden(batch, self._encoder.n_blocks)
        words = torch.zeros_like(batch.features["attention_mask"], dtype=torch.bool)
        for index, tokens in enumerate(batch.tokens):
            is_text = [token.part == "text" for token in tokens]
            words[index, batch.positions(index)] = torch.tensor(is_text, device=words.device)
        return torch.nn.functional.normalize(vectors, dim=-1), words


def _sides(query: str, documents: Sequence[str | Passage]) -> tuple[tuple[Sequence[str | Passage], Role], ...]:
    return ([query], "query"), (documents, "document")
