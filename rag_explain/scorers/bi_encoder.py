"""A bi-encoder: one embedding per text, compared by cosine or dot product."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rag_explain import pairing
from rag_explain.encoder.batch import Batch
from rag_explain.encoder.model import Encoder
from rag_explain.encoder.shared_model import SharedModel
from rag_explain.probes import TEXTS
from rag_explain.results.notices import METHOD, OTHER_SCORE, Notice
from rag_explain.scorers.base import EncoderScorer
from rag_explain.texts.passage import Passage
from rag_explain.texts.tokens import Role

_METHODS = (
    *("bilrp", "hxp", "ij", "pooled", "occlusion", "alignment", "bti"),
    *("embeddings", "gradient", "integrated-gradients"),
)
_TOWERS = Notice(
    METHOD,
    "queries and documents are read by different modules, whose vectors of tokens are compared here: the model itself "
    "compares embeddings only",
)


class BiEncoder(EncoderScorer):
    """A sentence-transformers SentenceTransformer."""

    _encoder: Encoder

    def __init__(self, encoder: SharedModel) -> None:
        super().__init__(encoder)
        self.measure = "dot" if encoder.similarity == "dot" else "cosine"
        # A shifted encoder's reference embedding is zero, which has no direction: `ij-exact` is made for it.
        self.methods = tuple("ij-exact" if name == "ij" and encoder.is_shifted else name for name in _METHODS)
        if encoder.similarity in ("euclidean", "manhattan"):
            reason = f"the model compares by {encoder.similarity} distance; the cosine is explained instead"
            self.notices = (Notice(OTHER_SCORE, reason),)
        if encoder.has_two_towers:
            self.token_notices = (_TOWERS,)

    @property
    def encoder(self) -> Encoder:
        return self._encoder

    def score(self, query: str, documents: Sequence[str | Passage]) -> NDArray[np.float64]:
        found: NDArray[np.float64] = self.scores([query], documents)[0]
        return found

    def scores(self, queries: Sequence[str], documents: Sequence[str | Passage]) -> NDArray[np.float64]:
        found = self.embed(documents, "document")
        return np.stack([self.compare(asked, found) for asked in self.embed(queries, "query")])

    def compare(self, query: NDArray[Any], documents: NDArray[Any]) -> NDArray[np.float64]:
        """(D,): the score of a query's vector (e,) and the documents' (D, e)."""
        asked, found = query.astype(np.float64), documents.astype(np.float64)
        is_cosine = self.measure == "cosine"
        norms = np.linalg.norm(found, axis=1) * float(np.linalg.norm(asked)) if is_cosine else np.ones(len(found))
        return pairing.scores(asked, found, np.maximum(norms, np.finfo(np.float32).tiny))

    def embed(self, passages: Sequence[str | Passage], role: Role) -> NDArray[np.float32]:
        return self._encoder.embed(passages, role)

    def probe_vectors(self, role: Role) -> Iterable[NDArray[np.float32]]:
        return [self.embed([text], role)[0] for text in TEXTS]

    def token_vectors(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The last block's vectors, scaled to length one; those of words are compared."""
        self._encoder.check_comparable()
        vectors, _ = self._encoder.hidden(batch, self._encoder.n_blocks)
        return torch.nn.functional.normalize(vectors, dim=-1), batch.words()
