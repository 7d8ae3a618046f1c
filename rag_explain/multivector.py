"""A late-interaction encoder (ColBERT): one vector per token, and no embedding of the whole text."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from rag_explain.encoder import Batch, Encoder, Visitor
from rag_explain.errors import UnsupportedModel

if TYPE_CHECKING:
    from sentence_transformers import MultiVectorEncoder, SentenceTransformer


class MultiVector(Encoder):
    """A sentence-transformers MultiVectorEncoder, with its own markers, query expansion, masks and projection.

    Attributes:
        score: "maxsim" or "meanmaxsim", how the model itself compares two texts.
    """

    is_multivector = True

    def __init__(self, model: MultiVectorEncoder, *, name: str = "", device: str | torch.device | None = None) -> None:
        # It has all of a SentenceTransformer that an Encoder reads, but for the embedding that `run` would give.
        super().__init__(cast("SentenceTransformer", model), name=name, device=device)
        self.score: str = model.similarity_fn_name

    def run(self, batch: Batch, visit: Visitor | None = None, enter: Callable[[str], None] | None = None) -> Tensor:
        raise UnsupportedModel("a multi-vector encoder gives one vector per token and no embedding: use alignment")

    def token_vectors(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(D, n, h) the model's own token vectors, and (D, n) which of them it scores."""
        self._follow_device()
        twin: Any = self._twin
        output = twin(dict(batch.features), task=batch.role)
        vectors, mask = output["token_embeddings"], output["attention_mask"].bool()
        if vectors.shape[1] != batch.features["input_ids"].shape[1]:
            raise UnsupportedModel(
                "the model merges the vectors of several tokens (token pooling), so a vector is no token's: "
                "load it without its token pooling module"
            )
        return vectors, mask
