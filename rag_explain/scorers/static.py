"""Static word vectors: one embedding per text, the mean of its tokens' own vectors."""

from collections.abc import Iterable, Sequence
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rag_explain.encoder.batch import Batch
from rag_explain.encoder.static import StaticEncoder
from rag_explain.errors import InvalidInput
from rag_explain.probes import TEXTS
from rag_explain.scorers.bi_encoder import BiEncoder
from rag_explain.texts.passage import Passage, as_passages
from rag_explain.texts.tokens import Role


class Static(BiEncoder):
    """A SentenceTransformer without blocks: nothing in it reads a word's surroundings."""

    def __init__(self, encoder: StaticEncoder) -> None:
        super().__init__(encoder)
        self.static = encoder
        self.methods = ("static",)

    @property
    def encoder(self) -> NoReturn:
        raise InvalidInput(f"{self.name} has word vectors and no blocks to look into: use {self._own_methods}")

    def embed(self, passages: Sequence[str | Passage], role: Role) -> NDArray[np.float32]:
        """By the model's own `encode_query` or `encode_document`."""
        self.static.watch.state()
        strings = [passage.string for passage in as_passages(passages)]
        return self.static.own(strings, role) if strings else np.zeros((0, 0), np.float32)

    def probe_vectors(self, role: Role) -> Iterable[NDArray[np.float32]]:
        batch = self.static.read(TEXTS, role)
        return list(self.static.vectors(self.static.run(batch), role))

    def token_vectors(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The word vectors, scaled to length one; those of words are compared."""
        return torch.nn.functional.normalize(self.static.rows(batch), dim=-1), batch.words()
