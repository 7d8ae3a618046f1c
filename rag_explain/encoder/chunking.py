"""Cutting a long text into pieces that the encoder reads whole: sentences packed together, counted in tokens."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise

from rag_explain.encoder.reading import Reader
from rag_explain.errors import InvalidInput
from rag_explain.texts.segments import Span, sentence_spans

# Room for the special tokens of every tokenizer that is known to us.
_SPECIAL_TOKENS = 4
# What an encoder without a limit of its own, or with a very high one, reads at once.
LONGEST_WINDOW = 4096


def chunk_spans(text: str, reader: Reader, size: int = 128) -> list[Span]:
    """Where the chunks of `text` begin and end: at most `size` tokens each, whole sentences where they fit.

    `text[start:end]` is a chunk, verbatim. What lies between chunks is blank.
    """
    if size < 1:
        raise InvalidInput(f"a chunk must have at least 1 token, not {size}")
    begins, size = _begins(text, reader), _room(reader, size)
    chunks: list[Span] = []
    used = 0
    for start, end in _pieces(begins, sentence_spans(text), size):
        count = _count(begins, start, end)
        if chunks and used + count <= size:
            chunks[-1], used = (chunks[-1][0], end), used + count
        else:
            chunks.append((start, end))
            used = count
    return chunks


def window_spans(text: str, sentences: Sequence[Span], reader: Reader, size: int = LONGEST_WINDOW) -> list[Span]:
    """Windows over `text` of at most `size` tokens, of whole sentences where they fit: each overlaps the one before.

    Up to half of a window is repeated in the next one, so that a sentence has its neighbours around it in one of them.
    """
    begins, size = _begins(text, reader), _room(reader, size)
    pieces = list(_pieces(begins, sentences, size))
    windows: list[Span] = []
    first = last = 0
    while last < len(pieces):
        while last < len(pieces) and _count(begins, pieces[first][0], pieces[last][1]) <= size:
            last += 1
        if last == len(pieces):  # the last window is as full as the others
            first = _fitting(begins, pieces, last, size)
        windows.append((pieces[first][0], pieces[last - 1][1]))
        if last < len(pieces):
            first = max(_fitting(begins, pieces, last, size // 2), _fitting(begins, pieces, last + 1, size))
    return windows


def _fitting(begins: list[int], pieces: Sequence[Span], last: int, size: int) -> int:
    """The first of the pieces up to `last` that all fit together into `size` tokens."""
    first = last
    while first > 0 and _count(begins, pieces[first - 1][0], pieces[last - 1][1]) <= size:
        first -= 1
    return first


def _begins(text: str, reader: Reader) -> list[int]:
    """Where the tokens of the text begin."""
    return [start for start, _ in reader.token_offsets(text)]


def _room(reader: Reader, size: int) -> int:
    """How many tokens of a text the encoder reads at once, up to `size`."""
    if reader.max_length is None:
        return size
    prompt = reader.token_offsets(reader.prompt("document") or "")
    return max(1, min(size, reader.max_length - _SPECIAL_TOKENS - len(prompt)))


def _count(begins: list[int], start: int, end: int) -> int:
    return bisect_left(begins, end) - bisect_left(begins, start)


def _pieces(begins: list[int], sentences: Sequence[Span], size: int) -> Iterator[Span]:
    """Sentences, and pieces of `size` tokens of a sentence that is longer than that."""
    for start, end in sentences:
        first, last = bisect_left(begins, start), bisect_left(begins, end)
        if last - first <= size:
            yield start, end
        else:
            yield from pairwise([*begins[first:last:size], end])
