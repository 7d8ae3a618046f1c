"""Things that embed strings, over a tiny model that is really computed, and what they were asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from tests.support.models import tiny

PROMPTS = {"query": "find: ", "document": "text: "}


class Asked:
    """A function of texts and role that remembers what it was asked for, and answers as the model does.

    `noise` is added to every vector, another each time; `shift` makes it another model.
    """

    def __init__(self, model: SentenceTransformer | None = None, *, noise: float = 0.0, shift: float = 0.0) -> None:
        self.model = tiny("bert", prompts=PROMPTS) if model is None else model
        self.noise, self.shift = noise, shift
        self.calls: list[tuple[str, list[str]]] = []
        self._random = np.random.default_rng(0)

    @property
    def texts(self) -> list[str]:
        return [text for _, texts in self.calls for text in texts]

    def __call__(self, texts: list[str], role: str) -> NDArray[Any]:
        self.calls.append((role, list(texts)))
        encode = self.model.encode_query if role == "query" else self.model.encode_document
        found = np.asarray(encode(texts, show_progress_bar=False), np.float64)
        found = found + self.shift * np.roll(found, 1, axis=1)
        lengths = np.linalg.norm(found, axis=1, keepdims=True) / np.sqrt(found.shape[1])
        noisy: NDArray[Any] = found + self.noise * lengths * self._random.normal(size=found.shape)
        return noisy
