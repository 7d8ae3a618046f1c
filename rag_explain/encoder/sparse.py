"""A learned sparse encoder (SPLADE): one weight per word of the vocabulary, of which most are zero.

    active[t, v] = log(1 + relu(logit[t, v]))                 of the masked-language head at token t, for word v
    e[v] = max_t active[t, v], or sum_t active[t, v]

With "log1p_relu" the logarithm is taken twice. The pooling is written here once more, without the chunks and the memory
that is written over: that it gives what the model's own gives is checked when it is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rag_explain.encoder.batch import Batch
from rag_explain.encoder.model import Encoder
from rag_explain.encoder.shared_model import Towers
from rag_explain.encoder.towers import Tower
from rag_explain.errors import UnsupportedModel

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


class Pooling(nn.Module):
    """What SpladePooling computes of padded texts."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self._module = module

    def active(self, logits: Tensor, mask: Tensor) -> Tensor:
        """(D, n, V) what each token says of each word of the vocabulary."""
        found = (logits * mask.unsqueeze(-1).to(logits.dtype)).relu().log1p()
        return found.log1p() if self._module.activation_function == "log1p_relu" else found

    @property
    def is_max(self) -> bool:
        return bool(self._module.pooling_strategy == "max")

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        active = self.active(features["token_embeddings"], features["attention_mask"])
        features["sentence_embedding"] = active.amax(dim=1) if self.is_max else active.sum(dim=1)
        return features


class SparseTextEncoder(Encoder):
    """A SparseEncoder of a masked language model and SpladePooling."""

    embedded_tokens = 512  # a position takes a number for each word of the vocabulary

    def __init__(self, model: SentenceTransformer, *, name: str = "", device: str | torch.device | None = None) -> None:
        super().__init__(model, name=name, device=device)
        first, (at, pooling) = self.towers["document"].modules
        self.pooling = Pooling(pooling)
        self.towers = dict.fromkeys(self.towers, Tower((first, (at, self.pooling))))

    def _check_all(self, towers: Towers) -> None:
        for tower in towers.values():
            check_sparse([module for _, module in tower.modules])
        super()._check_all(towers)

    def active(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(D, n, V) what each token says of each word of the vocabulary, and (D, V) the weights of the texts."""
        there = batch.to(self.device)
        logits, weights = self.hidden(there, self.n_blocks)
        return self.pooling.active(logits, there.features["attention_mask"]), weights


def check_sparse(modules: Iterable[nn.Module]) -> None:
    """Refuse a sparse encoder whose dimensions are no words."""
    kinds = [type(module).__name__ for module in modules]
    if kinds[1:] != ["SpladePooling"]:
        raise UnsupportedModel(
            f"the model is made of {' and '.join(kinds)}: a sparse encoder is explained where its dimensions are words "
            "of a vocabulary, by a masked language model with SpladePooling behind it"
        )
