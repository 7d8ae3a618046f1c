"""SPLADE from its equations (Formal et al. 2021), in float64: one word of the vocabulary after the other."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SparseEncoder
from torch import Tensor, nn

Matrix = NDArray[np.float64]


def logits(model: SparseEncoder, text: str) -> Matrix:
    """(n, V): of the masked-language head, by transformers alone."""
    features = model[0].tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        found: Matrix = model[0].auto_model(**features).logits[0].numpy()
    return found


def active(logit: float, activation: str) -> float:
    once = math.log(1 + max(0.0, logit))
    return math.log(1 + once) if activation == "log1p_relu" else once


def parts(model: SparseEncoder, text: str) -> Matrix:
    """(n, V): what of each word's weight belongs to each token."""
    pooling: Any = model[1]
    table = logits(model, text)
    found = np.zeros_like(table)
    for word in range(table.shape[1]):
        said = [active(value, pooling.activation_function) for value in table[:, word]]
        if pooling.pooling_strategy == "sum":
            found[:, word] = said
        else:
            found[said.index(max(said)), word] = max(said)
    return found


def table_parts(model: SparseEncoder, text: str) -> Matrix:
    """(n, V) of a query that is read by a table: a word counts once, and its tokens share it."""
    table: Any = model[0].sub_modules["query"][0]
    ids = table.tokenizer(text, add_special_tokens=False)["input_ids"]
    weight = table.weight.detach().numpy()
    found = np.zeros((len(ids), len(weight)))
    for at, word in enumerate(ids):
        found[at, word] = weight[word] / ids.count(word)
    return found


def cells(query: Matrix, document: Matrix) -> Matrix:
    """(n_q, n_d): sum over words of what each pair of tokens has of both weights."""
    found = np.zeros((len(query), len(document)))
    for word in range(query.shape[1]):
        for i in range(len(query)):
            for j in range(len(document)):
                found[i, j] += query[i, word] * document[j, word]
    return found


class RuledPooling(nn.Module):
    """The pooling under the rules: x -> x [f(x) / x].detach(), and of the largest which one it is, detached."""

    def __init__(self, pooling: Any) -> None:
        super().__init__()
        self._pooling = pooling

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        found: Tensor = features["token_embeddings"]
        said = torch.log1p(found.relu())
        said = torch.log1p(said) if self._pooling.activation_function == "log1p_relu" else said
        ruled = found * (said / found).detach()
        if self._pooling.pooling_strategy == "sum":
            features["sentence_embedding"] = ruled.sum(dim=1)
        else:
            features["sentence_embedding"] = ruled.gather(1, said.argmax(dim=1, keepdim=True)).squeeze(1)
        return features
