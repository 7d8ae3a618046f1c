"""Texts, ways to cut them, and explanations of them, for property tests."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import strategies as st

from rag_explain.results.explanation import Explanation
from rag_explain.texts.segments import Span
from rag_explain.texts.tokens import Token
from tests.support.samples import truncation

CHARACTERS = "ab Z'’-.,!?\n\t\r\u0301\u200d\u200c\ufe0f東京。ーアไทยก็नमस्ते।👩👧🇫🇷5\u202e\u00a0<&_\x00"
TEXTS = st.one_of(st.text(alphabet=CHARACTERS, max_size=60), st.text(max_size=40))


def cut(text: str, seed: int, longest: int = 6) -> list[Span]:
    """Tokens as a tokenizer might cut: contiguous, any length, some with the blank before them."""
    chance = random.Random(seed)
    spans, position = [], 0
    while position < len(text):
        end = min(len(text), position + chance.randint(1, longest))
        spans.append((position, end))
        position = end
    return spans


def make(query: str, document: str, seed: int, truncated: bool = False) -> Explanation:
    generator = np.random.default_rng(seed)
    query_tokens = [Token(query[a:b], a, b) for a, b in cut(query, seed)]
    document_tokens = [
        Token("", 0, 0, "special", "[CLS]"),
        *(Token(document[a:b], a, b) for a, b in cut(document, seed)),
    ]
    if truncated:
        document_tokens = document_tokens[: len(document_tokens) // 2 + 1]
    shape = (len(query_tokens) + 1, len(document_tokens) + 1)
    return Explanation(
        query=query,
        document=document,
        query_tokens=tuple(query_tokens),
        document_tokens=tuple(document_tokens),
        matrix=generator.normal(size=shape).astype(np.float32),
        similarities=generator.normal(size=(shape[0] - 1, shape[1] - 1)).astype(np.float32) if seed % 2 else None,
        score=float(generator.normal()),
        method="bilrp",
        settings={"layer": 0, "rules": ("a", 1)},
        references={"query": 0.5} if seed % 3 else None,
        notices=(truncation("document"),) if truncated else (),
        provenance={"path": "cold", "timings": {"push": np.float32(0.5)}},
    )
