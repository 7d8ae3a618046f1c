"""From tokens to coarser units: the one place that says which token belongs to which word or sentence."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rag_explain.errors import InvalidInput
from rag_explain.texts.passage import Passage
from rag_explain.texts.segments import Span, group, sentence_spans, word_spans
from rag_explain.texts.tokens import Token, Unit

Index = NDArray[np.intp]
SPECIAL = Token("", 0, 0, "special", "special tokens")
WHOLE = Token("", 0, 0, "special", "the whole text")


def text_units(tokens: Sequence[Token], text: str, unit: Unit, *, truncated: bool) -> tuple[tuple[Token, ...], Index]:
    """The words or sentences that hold a token, and for each token the index of its own; -1 for a token in none.

    Special tokens, prompts and metadata are in none. With `truncated`, the last unit ends where the tokens do.
    """
    if unit not in ("word", "sentence"):
        raise InvalidInput(f"tokens are grouped by 'word' or 'sentence', not by {unit!r}")
    offsets = [(token.start, token.end) if token.part == "text" else (0, 0) for token in tokens]
    spans = word_spans(text) if unit == "word" else sentence_spans(text)
    found, index = group(offsets, spans, join=unit == "word", clip=truncated)
    unknown = {owner: token.piece for token, owner in zip(tokens, index, strict=True) if token.is_unknown}
    pieces = (unknown.get(at, "") if unit == "word" else "" for at in range(len(found)))
    units = (Token(text[start:end], start, end, piece=piece) for (start, end), piece in zip(found, pieces, strict=True))
    return tuple(units), np.array(index, dtype=np.intp)


def all_units(
    tokens: Sequence[Token], passage: Passage, unit: Unit, *, truncated: bool, spans: Sequence[Span] | None = None
) -> tuple[tuple[Token, ...], Index]:
    """As `text_units`, with a unit for every other token too: one for all special tokens, prompts and blanks together,
    and one for each line of metadata; without `spans`, where the tokens stand in the passage's string, for all of it.
    """
    units, index = text_units(tokens, passage.text, unit, truncated=truncated)
    found = list(units)
    # A token of the text that covers blanks alone is in no word either.
    special = [at for at, token in enumerate(tokens) if token.part != "metadata" and index[at] < 0]
    if special:
        index[special] = len(found)
        found.append(SPECIAL)
    lines: dict[int, int] = {}  # where a line of metadata begins -> its unit
    for at, token in enumerate(tokens):
        if token.part == "metadata":
            start, line = (0, "metadata") if spans is None else _line(passage, spans[at][0])
            if start not in lines:
                lines[start] = len(found)
                found.append(Token("", token.start, token.start, "metadata", line))
            index[at] = lines[start]
    return tuple(found), index


def _line(passage: Passage, at: int) -> tuple[int, str]:
    """Where the line of metadata around character `at` of the passage's string begins, and what it says."""
    low, high = (0, passage.start) if at < passage.start else (passage.end, len(passage.string))
    start = passage.string.rfind("\n", low, at) + 1 or low
    end = passage.string.find("\n", at, high)
    return start, passage.string[start : high if end < 0 else end].strip()
