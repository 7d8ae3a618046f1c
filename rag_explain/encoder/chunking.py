"""Cutting a long text into pieces that the encoder reads whole: sentences packed together, counted in tokens."""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise

from rag_explain.encoder.reading import Reader
from rag_explain.errors import InvalidInput
from rag_explain.texts.segments import Span, sentence_spans

# Room for the special tokens of every tokenizer that is known to us.
_SPECIAL_TOKENS = 4


def chunk_spans(text: str, reader: Reader, size: int = 128) -> list[Span]:
    """Where the chunks of `text` begin and end: at most `size` tokens each, whole sentences where they fit.

    `text[start:end]` is a chunk, verbatim. What lies between chunks is blank.
    """
    if size < 1:
        raise InvalidInput(f"a chunk must have at least 1 token, not {size}")
    if reader.max_length is not None:
        prompt = reader.token_offsets(reader.prompt("document") or "")
        size = max(1, min(size, reader.max_length - _SPECIAL_TOKENS - len(prompt)))
    begins = [start for start, _ in reader.token_offsets(text)]
    chunks: list[Span] = []
    used = 0
    for start, end in _pieces(begins, sentence_spans(text), size):
        count = bisect_left(begins, end) - bisect_left(begins, start)
        if chunks and used + count <= size:
            chunks[-1], used = (chunks[-1][0], end), used + count
        else:
            chunks.append((start, end))
            used = count
    return chunks


def _pieces(begins: list[int], sentences: list[Span], size: int) -> Iterator[Span]:
    """Sentences, and pieces of `size` tokens of a sentence that is longer than that."""
    for start, end in sentences:
        first, last = bisect_left(begins, start), bisect_left(begins, end)
        if last - first <= size:
            yield start, end
        else:
            yield from pairwise([*begins[first:last:size], end])
