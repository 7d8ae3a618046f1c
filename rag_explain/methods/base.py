"""What a method is: a way to write an embedding as a sum over tokens, or to explain a pair."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from rag_explain.encoder import Batch, Encoder
from rag_explain.errors import InvalidInput
from rag_explain.store.memory import Resident
from rag_explain.store.product import pair_products
from rag_explain.types import Array, Factors, Token


@dataclass(frozen=True, eq=False)
class ColdDocument:
    """A document explained for one query without building its factors."""

    tokens: tuple[Token, ...]
    matrix: Array  # (n_q + 1, n_d + 1), in score units
    score: float
    truncated: bool
    references: Mapping[str, Any] | None = None


class Method(ABC):
    """One way to explain a similarity, bound to an encoder.

    `options` of a method are keyword arguments of its constructor; `settings` is what decides its numbers and therefore
    belongs to the key of a cached result.
    """

    name: ClassVar[str]
    additive: ClassVar[bool] = True

    def __init__(self, encoder: Encoder, layer: int | None = None, *, budget: int | None = None) -> None:
        self.encoder = encoder
        self.layer = self._default_layer() if layer is None else layer
        self.budget = budget
        if not 0 <= self.layer < encoder.blocks:
            raise InvalidInput(f"layer must be between 0 and {encoder.blocks - 1} for this encoder, not {self.layer}")

    def _default_layer(self) -> int:
        return 0

    @property
    def settings(self) -> dict[str, Any]:
        """What decides this method's numbers, besides the encoder."""
        return {"layer": self.layer}

    def check(self) -> None:
        """Refuse the encoder when the method would be wrong on it. Called once, when an Explainer is made."""

    @abstractmethod
    def factor(self, batch: Batch) -> list[Factors]:
        """The factors of each text of a batch."""

    @abstractmethod
    def cold(self, query: Factors, batch: Batch) -> list[ColdDocument]:
        """Explain each document of a batch for one query, without building their factors."""

    def warm(self, query: Factors, documents: Sequence[Resident]) -> list[ColdDocument]:
        """Explain documents whose factors are at hand: one product (n_q + 1, h) @ (h, sum of n_d + 1) for all."""
        matrices, scores = pair_products(query, documents)
        return [
            ColdDocument(document.tokens, matrix, float(score), document.truncated)
            for document, matrix, score in zip(documents, matrices, scores, strict=True)
        ]

    def build(
        self,
        batch: Batch,
        index: int,
        rows: Tensor,
        rest: Tensor,
        embedding: Tensor,
        norm: Tensor,
        **more: Any,
    ) -> Factors:
        """Factors of text `index` of a batch from (n, e) rows, (e,) rest and embedding; the error is measured here."""
        error = (rows.sum(dim=0) + rest - embedding).norm() / embedding.norm().clamp_min(1e-30)
        return Factors(
            tokens=batch.tokens[index],
            rows=to_numpy(rows),
            rest=to_numpy(rest),
            embedding=to_numpy(embedding),
            norm=float(norm),
            role=batch.role,
            method=self.name,
            settings=self.settings,
            fingerprint=self.encoder.fingerprint,
            truncated=batch.truncated[index],
            error=float(error),
            **more,
        )


def to_numpy(tensor: Tensor) -> Array:
    """A float32 copy in main memory."""
    result: Array = tensor.detach().to("cpu", torch.float32).numpy()
    return np.ascontiguousarray(result)
