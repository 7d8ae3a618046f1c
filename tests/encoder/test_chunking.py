"""Chunks are verbatim pieces that the encoder reads whole."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rag_explain.encoder.chunking import chunk_spans
from rag_explain.encoder.model import Encoder
from rag_explain.errors import InvalidInput
from tests.support.models import tiny


@cache
def encoder() -> Encoder:
    return Encoder(tiny(dtype=torch.float32, prompts={"document": "passage: "}))


def test_sentences_are_kept_together_where_they_fit() -> None:
    text = "The cat sat. The dog ran.\n\nParis is the capital of France. The moon looked old."
    chunks = [text[start:end] for start, end in chunk_spans(text, encoder().reader, 12)]
    assert chunks[0] == "The cat sat. The dog ran."
    assert all(chunk.endswith(".") for chunk in chunks)
    assert chunk_spans(text, encoder().reader, 60) == [(0, len(text))]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.sampled_from(["the cat", "moon!", "Paris. ", "\n\n", "größe ", "🐈", "a.b", " "]), max_size=80),
    st.integers(1, 90),
)
def test_nothing_but_blanks_is_lost_and_nothing_is_truncated(words: list[str], size: int) -> None:
    text = " ".join(words)
    spans = chunk_spans(text, encoder().reader, size)
    cursor = 0
    for start, end in spans:
        assert cursor <= start < end
        assert not text[cursor:start].strip()
        cursor = end
        assert not encoder().read([text[start:end]], "document").truncated[0]
    assert not text[cursor:].strip()


def test_a_long_sentence_is_cut_between_tokens() -> None:
    text = "the cat " * 20
    spans = chunk_spans(text, encoder().reader, 10)
    assert len(spans) == 4
    assert all(len(encoder().reader.token_offsets(text[start:end])) == 10 for start, end in spans)


def test_a_chunk_needs_a_size() -> None:
    with pytest.raises(InvalidInput, match="at least 1 token"):
        chunk_spans("text", encoder().reader, 0)
