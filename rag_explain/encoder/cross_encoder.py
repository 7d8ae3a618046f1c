"""A cross-encoder, seen as blocks and the logits of a pair: a copy that shares the user's weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from rag_explain.encoder.batch import Batch
from rag_explain.encoder.model import Encoder
from rag_explain.encoder.pair_reading import PairReader, Pairs
from rag_explain.errors import UnsupportedModel
from rag_explain.texts.passage import Passage
from rag_explain.texts.tokens import Role

if TYPE_CHECKING:
    from sentence_transformers import CrossEncoder, SentenceTransformer


class PairEncoder(Encoder):
    """A torch model that reads both texts at once, whose logits can be taken as a function of any block's input.

    Attributes:
        labels: the names of its logits.
    """

    output = "scores"
    reader: PairReader

    def __init__(self, model: CrossEncoder, *, name: str = "", device: str | torch.device | None = None) -> None:
        # It has all of a SentenceTransformer that is read here, but for an embedding and what compares it.
        super().__init__(cast("SentenceTransformer", model), name=name, device=device)
        whole = cast("CrossEncoder", self.whole)
        named = getattr(self.towers["document"].first.auto_model.config, "id2label", None) or {}
        names = tuple(str(named.get(number, number)) for number in range(whole.num_labels))
        self.labels = names if len(set(names)) == len(names) else tuple(map(str, range(len(names))))

    def _make_reader(self) -> PairReader:
        return PairReader(self.whole)

    def read_pairs(self, query: Passage, documents: Sequence[Passage]) -> Pairs:
        """The query with each document, as `predict` reads them."""
        return self.reader.read_pairs(query, documents)

    def _shortest(self, role: Role) -> Batch:
        return self.read_pairs(Passage("a"), [Passage("a")])

    def returned(self, logits: Tensor) -> Tensor:
        """(D, labels): what `predict` makes of the logits of each pair."""
        activation: Callable[[Tensor], Any] | None = getattr(self.whole, "activation_fn", None)
        scores = logits.float() if logits.element_size() < 4 else logits
        found: Tensor = scores if activation is None else activation(scores)
        if found.shape != logits.shape:
            raise UnsupportedModel(
                f"the activation {type(activation).__name__} does not give one number for each label, as a reranker's "
                "should: use another activation_fn"
            )
        return found

    def describe(self) -> dict[str, str]:
        found = super().describe()
        found["prompts"] = f"in front of the pair {self.reader.prompt('query')!r}"
        activation = getattr(self.whole, "activation_fn", None)
        return {**found, "labels": ", ".join(self.labels), "returns": type(activation).__name__}
