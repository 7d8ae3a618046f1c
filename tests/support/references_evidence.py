"""Evidence from its equation: value(s) = sum_t max_{j in s} <x_t, y_j>, token by token, by the model's own pass."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

Span = tuple[int, int]


def sentence_values(
    model: Any, query: str, document: str, sentences: list[Span], windows: list[Span] | None = None
) -> list[float]:
    """The value of each sentence; 0 for one without a token. `windows` are the parts of the document that are read."""
    tokens = []
    for start, end in windows or [(0, len(document))]:
        tokens += [(a + start, b + start, vector) for a, b, vector in _tokens(model, document[start:end])]
    values = []
    for sentence in sentences:
        inside = [vector for a, b, vector in tokens if _sentence_of((a, b), sentences) == sentence]
        found = [max((_cosine(asked, y) for y in inside), default=0.0) for _, _, asked in _tokens(model, query)]
        values.append(sum(found))
    return values


def _tokens(model: Any, text: str) -> list[tuple[int, int, Tensor]]:
    """The tokens of words: where they stand, and their vectors after the last block."""
    read = model.tokenizer(text, return_offsets_mapping=True, return_special_tokens_mask=True)
    vectors = model.encode([text], output_value="token_embeddings")[0].double()
    assert len(vectors) == len(read["input_ids"]), "the text must fit into the window"
    frames = zip(read["offset_mapping"], read["special_tokens_mask"], vectors, strict=True)
    return [(start, end, vector) for (start, end), is_special, vector in frames if not is_special]


def _sentence_of(token: Span, sentences: list[Span]) -> Span | None:
    """The sentence with which a token shares most characters, the first of them on a tie."""
    shared = [min(token[1], end) - max(token[0], start) for start, end in sentences]
    return sentences[shared.index(max(shared))] if max(shared) > 0 else None


def _cosine(left: Tensor, right: Tensor) -> float:
    return float((left * right).sum()) / math.sqrt(float((left * left).sum()) * float((right * right).sum()))
