"""A late-interaction encoder (ColBERT): one vector per token, and no embedding of the whole text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rag_explain.encoder.batch import Batch
from rag_explain.encoder.model import Encoder
from rag_explain.errors import InvalidInput, UnsupportedModel
from rag_explain.probes import TEXTS
from rag_explain.scorers.base import EncoderScorer
from rag_explain.texts.passage import Passage, as_passages
from rag_explain.texts.tokens import Role

if TYPE_CHECKING:
    from sentence_transformers import MultiVectorEncoder

# How sentence-transformers calls what such a model computes, and what people call it.
_MEASURES = {"maxsim": "MaxSim", "meanmaxsim": "mean MaxSim"}


class MultiVector(EncoderScorer):
    """A sentence-transformers MultiVectorEncoder, with its own markers, query expansion, masks and projection."""

    methods = ("alignment",)

    def __init__(self, encoder: Encoder, model: MultiVectorEncoder) -> None:
        super().__init__(encoder)
        self._model = model
        self.measure = _MEASURES[encoder.similarity]

    @property
    def encoder(self) -> Encoder:
        raise InvalidInput(
            f"{self.name} gives one vector per token and no embedding of the whole text: use {self._own_methods}"
        )

    def score(self, query: str, documents: Sequence[str | Passage]) -> NDArray[np.float64]:
        """MaxSim by the model's own `encode_query`, `encode_document` and `similarity`."""
        strings = [passage.string for passage in as_passages(documents)]
        asked, found = self._model.encode_query([query]), self._model.encode_document(strings)
        similarity = torch.as_tensor(self._model.similarity(asked, found))
        return similarity[0].cpu().numpy().astype(np.float64)

    def embed(self, passages: Sequence[str | Passage], role: Role) -> NDArray[np.float32]:
        raise InvalidInput(f"{self.name} gives one vector per token: an index of one vector per text cannot hold them")

    def probe_vectors(self, role: Role) -> Iterable[NDArray[np.float32]]:
        found = (self.token_vectors(self.read([passage], role)) for passage in as_passages(TEXTS))
        return [vectors[is_scored].float().cpu().numpy() for vectors, is_scored in found]

    def token_vectors(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The model's own token vectors; those that it scores are compared."""
        self._encoder.follow_device()
        output = self._encoder.whole(dict(batch.to(self._encoder.device).features), task=batch.role)
        vectors, mask = output["token_embeddings"], output["attention_mask"].bool()
        if vectors.shape[1] != batch.features["input_ids"].shape[1]:
            raise UnsupportedModel(
                "the model merges the vectors of several tokens (token pooling), so a vector is no token's: "
                "load it without its token pooling module"
            )
        return vectors, mask.cpu()
