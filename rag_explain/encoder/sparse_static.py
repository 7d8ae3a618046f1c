"""The query's side of an inference-free sparse encoder: a weight for each word of the vocabulary, and no model.

e[v] = weight[v] if v is a token of the text, else 0                         SparseStaticEmbedding
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rag_explain.encoder.batch import Batch
from rag_explain.encoder.reading import own_tokens, role_prompt
from rag_explain.encoder.unread import reading_notices
from rag_explain.errors import UnsupportedModel
from rag_explain.texts.passage import Passage
from rag_explain.texts.tokens import Role


class StaticWeights:
    """A SparseStaticEmbedding as a model reads texts with it; its weights are the user's own."""

    def __init__(self, model: Any, module: Any) -> None:
        if not getattr(module.tokenizer, "is_fast", False):
            raise UnsupportedModel("the tokenizer of SparseStaticEmbedding does not report where tokens stand")
        self._model, self._module, self._tokenizing = model, module, threading.Lock()

    @property
    def tokenizer(self) -> Any:
        return self._module.tokenizer

    @property
    def digest(self) -> str:
        values = self._module.weight.detach().cpu().contiguous().to(torch.float64).numpy().tobytes()
        return hashlib.blake2b(values + self._description, digest_size=16).hexdigest()

    @cached_property
    def _description(self) -> bytes:
        return repr((self._model.prompts, self.tokenizer.backend_tokenizer.to_str())).encode(errors="replace")

    def read(self, passages: Sequence[Passage], role: Role) -> Batch:
        """The texts without special tokens; one without tokens has no weight."""
        prompt = role_prompt(self._model, role) or ""
        with self._tokenizing:
            output = self.tokenizer(
                [prompt + passage.string for passage in passages],
                add_special_tokens=False,
                truncation=True,
                return_offsets_mapping=True,
            )
        tokens, notices, ids = [], [], []
        for index, passage in enumerate(passages):
            found, spans = output["input_ids"][index], output["offset_mapping"][index]
            pieces = self.tokenizer.convert_ids_to_tokens(found)
            tokens.append(own_tokens(passage, len(prompt), list(zip(pieces, spans, [0] * len(found), strict=True))))
            cut = self.tokenizer.truncation_side if output.encodings[index].overflowing else None
            notices.append(reading_notices(tokens[-1], passage, role, {self.tokenizer.unk_token}, cut))
            ids.append(torch.tensor(found, dtype=torch.long))
        features = {"input_ids": ids, "attention_mask": [torch.ones_like(one) for one in ids]}
        return Batch(
            passages=tuple(passages),
            role=role,
            tokens=tuple(tokens),
            notices=tuple(notices),
            features={name: pad_sequence(values, batch_first=True) for name, values in features.items()},
        )

    def active(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(D, n, V) the weight of each token's word, shared by the tokens that are the same, and (D, V) the weights."""
        weight = self._module.weight.detach().cpu()
        ids, mask = batch.features["input_ids"], batch.features["attention_mask"]
        is_word = torch.nn.functional.one_hot(ids, len(weight)) * mask[..., None]
        times = is_word.sum(dim=1)
        return is_word * (weight / times.clamp_min(1)[:, None]), (times > 0) * weight
