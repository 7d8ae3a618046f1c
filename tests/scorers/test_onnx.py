"""An ONNX model in onnxruntime is a callable like any other: explained by its own vectors."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rag_explain import Explainer
from rag_explain.errors import EmbeddingFailed
from tests.support.references_occlusion import score

onnxruntime = pytest.importorskip("onnxruntime")

WORDS, SIZE = 200, 16


def field(number: int, value: int | bytes | str) -> bytes:
    """One field of a protocol buffer: a whole number, or anything that has a length."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def varint(value: int) -> bytes:
    found = b""
    while value > 127:
        found, value = found + bytes([value & 127 | 128]), value >> 7
    return found + bytes([value])


def node(kind: str, inputs: list[str], output: str, attributes: bytes = b"") -> bytes:
    return field(1, b"".join(field(1, name) for name in inputs) + field(2, output) + field(4, kind) + attributes)


def constant(name: str, values: NDArray[Any]) -> bytes:
    kind = {"float32": 1, "int64": 7}[str(values.dtype)]
    shape = b"".join(field(1, size) for size in values.shape)
    return field(5, shape + field(2, kind) + field(8, name) + field(9, values.tobytes()))


def tensor(number: int, name: str, kind: int, *sizes: str) -> bytes:
    shape = b"".join(field(1, field(2, size)) for size in sizes)
    return field(number, field(1, name) + field(2, field(1, field(1, kind) + field(2, shape))))


def onnx_model() -> bytes:
    """tanh of the sum of word vectors, as the bytes of an .onnx file; word 0 is padding."""
    table = np.random.default_rng(0).normal(size=(WORDS, SIZE)).astype(np.float32)
    table[0] = 0
    graph = (
        node("Gather", ["table", "ids"], "words")
        + node("ReduceSum", ["words", "axis"], "sum", field(5, field(1, "keepdims") + field(3, 0) + field(20, 2)))
        + node("Tanh", ["sum"], "embeddings")
        + field(2, "words")
        + constant("table", table)
        + constant("axis", np.array([1]))
        + tensor(11, "ids", 7, "texts", "length")
        + tensor(12, "embeddings", 1, "texts", "size")
    )
    return field(1, 8) + field(7, graph) + field(8, field(2, 13))


def embedder() -> Callable[[list[str]], NDArray[np.float32]]:
    session = onnxruntime.InferenceSession(onnx_model(), providers=["CPUExecutionProvider"])

    def embed(texts: list[str]) -> NDArray[np.float32]:
        read = [[sum(map(ord, word)) % (WORDS - 1) + 1 for word in re.findall(r"\w+", text.lower())] for text in texts]
        ids = np.zeros((len(read), max(map(len, read))), np.int64)
        for row, words in zip(ids, read, strict=True):
            row[: len(words)] = words
        found: NDArray[np.float32] = session.run(["embeddings"], {"ids": ids})[0]
        return found

    return embed


def test_it_is_explained_by_the_losses_of_its_own_score() -> None:
    embed = embedder()
    query, document, less = "old moons", "Paris is old. The dog saw moons.", ["The dog saw moons.", "Paris is old."]
    explanation = Explainer(embed).explain(query, document)
    asked, whole, *left = embed([query, document, *less]).astype(float).tolist()
    wanted = [score(asked, whole, "cosine") - score(asked, one, "cosine") for one in left]
    np.testing.assert_allclose(explanation.document_saliency(), wanted, atol=1e-6)
    assert wanted[0] != pytest.approx(wanted[1], abs=0.01)


def test_what_onnxruntime_refuses_is_said_in_one_sentence() -> None:
    session = onnxruntime.InferenceSession(onnx_model(), providers=["CPUExecutionProvider"])
    with pytest.raises(EmbeddingFailed, match="failed"):
        Explainer(lambda texts: session.run(["embeddings"], {"ids": np.array([[WORDS + 9]])})[0])
