"""A cross-encoder (a reranker): it reads both texts at once, and gives logits for the pair."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rag_explain.devices import Device
from rag_explain.encoder.batch import Batch
from rag_explain.encoder.cross_encoder import PairEncoder
from rag_explain.encoder.pair_reading import SIDES, Pairs
from rag_explain.encoder.probing import PAIRS
from rag_explain.errors import InvalidInput
from rag_explain.scorers.base import EncoderScorer
from rag_explain.texts.passage import Passage, as_passage, as_passages
from rag_explain.texts.tokens import Role


class CrossEncoder(EncoderScorer):
    """A sentence-transformers CrossEncoder. What is split is a logit; what `predict` makes of it is `returned`.

    Of several labels one must be chosen: `labelled`.
    """

    measure = "logit"
    methods = ("lrp", "gradient-input")
    _encoder: PairEncoder

    def __init__(self, encoder: PairEncoder) -> None:
        super().__init__(encoder)
        self.label: int | None = 0 if len(encoder.labels) == 1 else None

    def labelled(self, label: int | str | None) -> Self:
        if label is None and self.label is not None:
            return self
        names = self._encoder.labels
        choice = f"choose one of its {len(names)} labels by label=: {', '.join(names)}"
        if label is None:
            raise InvalidInput(f"{self.name} gives a logit for each label: {choice}")
        numbers = {str(at): at for at in range(len(names))} | {name: at for at, name in enumerate(names)}
        if isinstance(label, bool) or not isinstance(label, int | str) or str(label) not in numbers:
            raise InvalidInput(f"{self.name} has no label {label!r}: {choice}")
        chosen = copy.copy(self)
        chosen.label = label if isinstance(label, int) else numbers[label]
        return chosen

    @property
    def label_name(self) -> str | None:
        """The name of the label whose logit is split; None where there is only one."""
        names = self._encoder.labels
        return None if self.label is None or len(names) == 1 else names[self.label]

    @property
    def pair_encoder(self) -> PairEncoder:
        return self._encoder

    def read_pairs(self, query: Passage, documents: Sequence[Passage]) -> Pairs:
        """The query with each document, as the model reads them."""
        return self._encoder.read_pairs(query, documents)

    def read_pair(self, query: Passage, document: Passage) -> Batch:
        pairs = self.read_pairs(query, [document])
        sides = [pairs.text(0, side)[0] for side in range(len(SIDES))]
        return Batch(
            passages=(query, document),
            role="document",
            tokens=tuple(side.tokens for side in sides),
            notices=tuple(side.notices for side in sides),
        )

    def embed(self, passages: Sequence[str | Passage], role: Role) -> NDArray[np.float32]:
        raise InvalidInput(
            f"{self.name} reads both texts at once and gives no vector per text, neither for an index nor for a method "
            f"that compares vectors: use {self._own_methods}"
        )

    def score(self, query: str, documents: Sequence[str | Passage]) -> NDArray[np.float64]:
        return self.chosen(self.logits(query, documents)).cpu().numpy().astype(np.float64)

    def returned(self, query: str, documents: Sequence[str | Passage]) -> NDArray[np.float64]:
        return self.chosen(self.shown(self.logits(query, documents))).cpu().numpy().astype(np.float64)

    def logits(self, query: str, documents: Sequence[str | Passage]) -> Tensor:
        """(D, labels): by the model's own modules."""
        passages = as_passages(documents)
        self._encoder.watch.state()
        if not passages:
            return torch.zeros(0, len(self._encoder.labels))

        def run(part: Pairs) -> list[Tensor]:
            return list(self._encoder.run(part))

        with self.computing():
            pairs, device = self.read_pairs(as_passage(query), passages), Device(lambda: self.device)
            found = pairs.in_buckets(device.size(self._encoder.embedded_tokens), device.sharing(run))
            return torch.stack([found[index] for index in range(len(pairs))]).float()

    def shown(self, logits: Tensor) -> Tensor:
        """(D, labels): what `predict` makes of logits."""
        return self._encoder.returned(logits)

    def chosen(self, values: Tensor) -> Tensor:
        """(D,): those of the label that is explained, of values for each label."""
        assert self.label is not None
        return values[:, self.label]

    def probe_vectors(self, role: Role) -> Iterable[NDArray[np.float32]]:
        """The logits of the probes: a pair has no roles, so that they are told once."""
        if role == "document":
            rows = [self.logits(query, [document]) for query, document in PAIRS]
            yield torch.cat(rows).cpu().numpy()
