"""A model of static word vectors: an embedding is the mean of one row per token, whatever stands around it.

    e(x) = 1 / n  sum_t W[id_t]

`StaticEmbedding` of sentence-transformers, alone or with a normalisation behind it. There is no block, no position and
no special token; a text of any length is read whole unless the tokenizer itself cuts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rag_explain.encoder.batch import Batch
from rag_explain.encoder.reading import reader_of
from rag_explain.encoder.shared_model import SharedModel
from rag_explain.encoder.towers import Tower
from rag_explain.errors import UnsupportedModel
from rag_explain.texts.tokens import Role

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


class StaticEncoder(SharedModel):
    """A SentenceTransformer that begins with `StaticEmbedding`, or with a `Router` to one for each role."""

    def __init__(self, model: SentenceTransformer, *, name: str = "", device: str | torch.device | None = None) -> None:
        super().__init__(model, name=name, device=device)
        self.reader = reader_of(self.whole, self.towers)

    def _check(self, tower: Tower, what: str) -> None:
        after = [type(module).__name__ for _, module in tower.modules[1:]]
        if after not in ([], ["Normalize"]):
            raise UnsupportedModel(
                f"{what} has {' and '.join(after)} behind its StaticEmbedding: word vectors can be explained "
                "alone, or with Normalize behind them"
            )

    def rows(self, batch: Batch) -> Tensor:
        """(D, n, e): what each token gives to the embedding, its own vector as a share of the mean; 0 for padding."""
        batch = batch.to(self.device)
        tower, mask = self.towers[batch.role], batch.features["attention_mask"][..., None]
        weight: Tensor = tower.first.embedding.weight
        rows: Tensor = weight[batch.features["input_ids"]].to(torch.promote_types(weight.dtype, torch.float32))
        rows = rows * mask / mask.sum(dim=1, keepdim=True)
        if len(tower.modules) > 1:  # normalised, which is not left to the score
            rows = rows / rows.sum(dim=1, keepdim=True).norm(dim=-1, keepdim=True)
        return rows[..., : self._truncate_dim]

    def run(self, batch: Batch) -> Tensor:
        """By the model's own modules: that its rows sum to this is a check that can fail."""
        mask = batch.features["attention_mask"].bool()
        counts = mask.sum(dim=1)
        features = {"input_ids": batch.features["input_ids"][mask], "offsets": counts.cumsum(0) - counts}
        features = {name: value.to(self.device) for name, value in features.items()}
        for _, module in self.towers[batch.role].modules:
            features = module(features)
        embedding: Tensor = features["sentence_embedding"][:, : self._truncate_dim]
        return embedding

    def own(self, strings: Sequence[str], role: Role) -> NDArray[np.float32]:
        """(D, e): what the model's own `encode_query` or `encode_document` gives."""
        encode = self.whole.encode_query if role == "query" else self.whole.encode_document
        return np.asarray(encode(list(strings), show_progress_bar=False), np.float32)

    def _architecture(self, role: Role) -> str:
        count, width = self.towers[role].first.embedding.weight.shape
        return f"StaticEmbedding, {count:,} word vectors of {width} dimensions"
