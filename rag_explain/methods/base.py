"""What a method is: a way to write an embedding as a sum over tokens, or to explain a pair."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from rag_explain.encoder import Batch, Encoder
from rag_explain.errors import InvalidInput, UnsupportedModel
from rag_explain.store.memory import Resident
from rag_explain.store.product import pair_products
from rag_explain.types import Array, Factors, Token, Unit

_PROBE = "Why was this short text found?"


@dataclass(frozen=True, eq=False)
class ColdDocument:
    """A document explained for one query: what a method hands over for an Explanation.

    Attributes:
        matrix: (n_q + 1, n_d + 1) in score units.
        references: what tells how far the method can be trusted on this pair.
        similarities: (n_q, n_d) cosines of all token pairs, for alignment methods.
        note: one sentence that a reader of this explanation must know.
        query_tokens: the query's units where they are not its tokens (methods that work on words).
    """

    tokens: tuple[Token, ...]
    matrix: Array
    score: float
    truncated: bool
    references: Mapping[str, Any] | None = None
    similarities: Array | None = None
    note: str | None = None
    query_tokens: tuple[Token, ...] | None = None
    unit: Unit = "token"


class Half(Protocol):
    """A document's half of an explanation, beside its rows: `Factors`, or a store's own form of them."""

    @property
    def tokens(self) -> tuple[Token, ...]: ...

    @property
    def rest(self) -> Array: ...

    @property
    def embedding(self) -> Array: ...

    @property
    def error(self) -> float: ...

    @property
    def truncated(self) -> bool: ...

    @property
    def references(self) -> Mapping[str, Any] | None: ...


class Method(ABC):
    """One way to explain a similarity, bound to an encoder.

    `options` of a method are keyword arguments of its constructor; `settings` is what decides its numbers and therefore
    belongs to the key of a cached result.
    """

    name: ClassVar[str]
    additive: ClassVar[bool] = True
    # Whether the matrix is the product of the two texts' factors, and nothing is chosen from it afterwards.
    bilinear: ClassVar[bool] = True
    # Whether a text's factors serve every pair it is in, and are therefore worth keeping.
    cacheable: ClassVar[bool] = True
    # Whether the embedding in the factors is the encoder's own to the last bit, good enough to search with.
    embeds: ClassVar[bool] = False

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

    @property
    def surrogate(self) -> str | None:
        """Why what this method explains is not the encoder's own similarity, or None when it is."""
        return self.encoder.surrogate

    def check(self) -> None:
        """Refuse the encoder when the method would be wrong on it. Called once, when an Explainer is made."""

    def check_route(self) -> None:
        """Refuse an encoder in which a text reaches the embedding past the block that it is attributed to.

        What goes past would be counted as a constant, and no sum would show it. So the block is given the hidden state
        of one text while the model reads another: the embedding must not move. It must not depend on padding either,
        or factors would depend on which texts shared a batch.
        """
        batch = self.encoder.tokenize([_PROBE, f"{_PROBE} {_PROBE}"], "document")
        kept: list[Tensor] = []

        def keep(block: int, hidden: Tensor) -> Tensor:
            if block == self.layer:
                kept.append(hidden.clone())
            return hidden

        alone, together = batch.select([0]), self.encoder.run(batch)[:1]
        plain = self.encoder.run(alone, keep)
        if not kept or kept[0].shape[:2] != alone.features["input_ids"].shape:
            raise UnsupportedModel(
                "the blocks of this encoder do not take hidden states of (texts, tokens, dimensions)"
            )
        ids = alone.features["input_ids"].clone()
        words = [index for index, token in enumerate(alone.tokens[0]) if token.part == "text"]
        ids[0, alone.positions(0)[words]] = int(ids[0, alone.positions(0)[words[0]]])  # one word, again and again
        other = replace(alone, features={**alone.features, "input_ids": ids})
        moved = self.encoder.run(other, lambda block, hidden: kept[0] if block == self.layer else hidden)
        allowed = tolerance(self.encoder.dtype) * plain.norm()
        if not (moved - plain).norm() <= allowed:
            raise UnsupportedModel(
                f"in this model a text reaches the embedding past the input of block {self.layer}, so that it cannot "
                "be attributed there" + ("" if self.layer == 0 else ": try layer=0")
            )
        if not (together - plain).norm() <= allowed:
            raise UnsupportedModel(
                "the embeddings of this model depend on padding, so that a text has no embedding of its own: "
                "pad on the other side, or use another model"
            )

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
            self.finish(query, document, matrix, float(score))
            for document, matrix, score in zip(documents, matrices, scores, strict=True)
        ]

    def pair(self, query: Factors, document: Factors) -> ColdDocument:
        """A pair whose halves were both just computed: one product of (n_q + 1, h) and (h, n_d + 1)."""
        left = np.vstack([query.rows, query.rest])
        right = np.vstack([document.rows, document.rest])
        scale = query.norm * document.norm
        score = float(query.embedding.astype(np.float64) @ document.embedding.astype(np.float64)) / scale
        return self.finish(query, document, (left @ right.T) / np.float32(scale), score)

    def finish(self, query: Factors, document: Half, matrix: Array, score: float) -> ColdDocument:
        """From the product of the halves, (n_q + 1, n_d + 1) in score units, to what the method says of the pair."""
        return ColdDocument(document.tokens, matrix, score, document.truncated)

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


class PairMethod(Method):
    """A method that needs both texts at once: nothing of it can be kept for another pair."""

    additive = False
    bilinear = False
    cacheable = False

    @abstractmethod
    def explain(self, query: Batch, documents: Batch) -> list[ColdDocument]:
        """Explain each document of a batch for the one query."""

    def factor(self, batch: Batch) -> list[Factors]:
        raise InvalidInput(f"{self.name} explains pairs of texts: it has no factors to compute or to keep")

    def cold(self, query: Factors, batch: Batch) -> list[ColdDocument]:
        raise InvalidInput(f"{self.name} explains pairs of texts: call Explainer.explain")


def tolerance(dtype: torch.dtype) -> float:
    """What may be rounding in this precision, as a share of an embedding; a wrong rule misses by far more."""
    return 1e-4 if dtype in (torch.float32, torch.float64) else 5e-2


def to_numpy(tensor: Tensor) -> Array:
    """A float32 copy in main memory."""
    result: Array = tensor.detach().to("cpu", torch.float32).numpy()
    return np.ascontiguousarray(result)
