"""A model of static word vectors: an embedding is the mean of one row per token, whatever stands around it.

    e(x) = 1 / n  sum_t W[id_t]

`StaticEmbedding` of sentence-transformers, alone or with a normalisation behind it. There is no block, no position and
no special token; a text of any length is read whole unless the tokenizer itself cuts it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rag_explain.encoder.batch import Batch
from rag_explain.encoder.model import SharedModel
from rag_explain.encoder.reading import Reader, own_tokens
from rag_explain.encoder.unread import reading_notices
from rag_explain.errors import InvalidInput, UnsupportedModel
from rag_explain.texts.passage import Passage, check_text
from rag_explain.texts.tokens import Role

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


class StaticEncoder(SharedModel):
    """A SentenceTransformer that begins with `StaticEmbedding`."""

    def __init__(self, model: SentenceTransformer, *, name: str = "", device: str | torch.device | None = None) -> None:
        super().__init__(model, name=name, device=device)
        self.reader = StaticReader(self.whole)

    def _first_module(self, copied: SentenceTransformer) -> Any:
        behind = [type(module).__name__ for module in list(copied.children())[1:]]
        if behind not in ([], ["Normalize"]):
            raise UnsupportedModel(
                f"the model has {' and '.join(behind)} behind its StaticEmbedding: word vectors can be explained "
                "alone, or with Normalize behind them"
            )
        return copied[0]

    def rows(self, batch: Batch) -> Tensor:
        """(D, n, e): what each token gives to the embedding, its own vector as a share of the mean; 0 for padding."""
        batch = batch.to(self.device)
        mask = batch.features["attention_mask"][..., None]
        weight: Tensor = self._first.embedding.weight
        rows: Tensor = weight[batch.features["input_ids"]].to(torch.promote_types(weight.dtype, torch.float32))
        rows = rows * mask / mask.sum(dim=1, keepdim=True)
        if len(self._modules) > 1:  # normalised before it is cut to fewer dimensions: not left to the score
            rows = rows / rows.sum(dim=1, keepdim=True).norm(dim=-1, keepdim=True)
        return rows[..., : self._truncate_dim]

    def run(self, batch: Batch) -> Tensor:
        """By the model's own modules: that its rows sum to this is a check that can fail."""
        mask = batch.features["attention_mask"].bool()
        counts = mask.sum(dim=1)
        features = {"input_ids": batch.features["input_ids"][mask], "offsets": counts.cumsum(0) - counts}
        features = {name: value.to(self.device) for name, value in features.items()}
        for _, module in self._modules:
            features = module(features)
        embedding: Tensor = features["sentence_embedding"][:, : self._truncate_dim]
        return embedding

    def own(self, strings: Sequence[str], role: Role) -> NDArray[np.float32]:
        """(D, e): what the model's own `encode_query` or `encode_document` gives."""
        encode = self.whole.encode_query if role == "query" else self.whole.encode_document
        return np.asarray(encode(list(strings), show_progress_bar=False), np.float32)

    def describe(self) -> dict[str, str]:
        count, width = self._first.embedding.weight.shape
        return {
            "architecture": f"StaticEmbedding, {count:,} word vectors of {width} dimensions",
            "prompts": f"query {self.reader.prompt('query')!r}, document {self.reader.prompt('document')!r}",
            "computes on": f"{self.device}, {str(self.dtype).removeprefix('torch.')}",
        }


class StaticReader(Reader):
    """Reads texts as the model does, and notes where its tokens stand."""

    def __init__(self, copy: Any) -> None:
        self._copy = copy
        self._tokenizer = copy[0].tokenizer
        self.max_length: int | None = (self._tokenizer.truncation or {}).get("max_length")
        self._unknown = {getattr(self._tokenizer.model, "unk_token", None)} - {None}
        self._noted = copy[0].tokenizer = _Noting(self._tokenizer)

    def read(self, passages: Sequence[Passage], role: Role) -> Batch:
        """The texts with the prompt in front; no special token, and cut off only where the tokenizer cuts."""
        prompt = self.prompt(role) or ""
        self._copy.preprocess([passage.string for passage in passages], prompt=prompt or None, task=role)
        tokens, places, notices = [], [], []
        cut = (self._tokenizer.truncation or {}).get("direction")
        for passage, found in zip(passages, self._noted.last, strict=True):
            if not found.ids:
                raise InvalidInput("the text has no tokens: give a text with words that the model knows")
            pieces = zip(found.tokens, found.offsets, [0] * len(found.ids), strict=True)
            tokens.append(own_tokens(passage, len(prompt), list(pieces)))
            is_cut = cut if found.overflowing else None
            notices.append(reading_notices(tokens[-1], passage, role, self._unknown, is_cut))
            places.append(tuple((start - len(prompt), end - len(prompt)) for start, end in found.offsets))
        ids = [torch.tensor(found.ids) for found in self._noted.last]
        mask = [torch.ones_like(one) for one in ids]
        features = {"input_ids": ids, "attention_mask": mask}
        return Batch(
            passages=tuple(passages),
            role=role,
            tokens=tuple(tokens),
            notices=tuple(notices),
            spans=tuple(places),
            features={name: pad_sequence(values, batch_first=True) for name, values in features.items()},
        )

    def token_offsets(self, text: str) -> list[tuple[int, int]]:
        """Where each token of the whole text stands."""
        check_text(text)
        found = self._tokenizer.encode(text, add_special_tokens=False)
        return [offset for part in (found, *found.overflowing) for offset in part.offsets]


class _Noting(threading.local):
    """Stands for a tokenizer that is asked for ids, and keeps what else it gave in this thread."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.last: Any = []

    def encode_batch(self, inputs: Sequence[str], **options: Any) -> Any:
        self.last = self._tokenizer.encode_batch(inputs, **options)
        return self.last
