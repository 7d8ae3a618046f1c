"""A text, and the same text without some of its parts: what methods that edit texts embed."""

from collections.abc import Iterable, Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from rag_explain.encoder.batch import Batch
from rag_explain.texts.edits import is_empty, without
from rag_explain.texts.passage import Passage
from rag_explain.texts.segments import Span
from rag_explain.texts.tokens import Token, Unit
from rag_explain.texts.units import text_units

Vectors = NDArray[np.float64]


class Parts:
    """A text as it was read, and the same text without some of its parts.

    What was cut off at the end of the encoder's window stays off: else leaving out a sentence would bring in another.

    Attributes:
        parts: the words or sentences that were read.
        strings: what is embedded: the whole text first.
    """

    def __init__(self, batch: Batch, index: int, unit: Unit) -> None:
        passage, tokens, is_cut = batch.passages[index], batch.tokens[index], batch.truncated[index]
        parts, _ = text_units(tokens, passage.text, unit, truncated=is_cut)
        self.parts = parts if passage.within is None else tuple(filter(partial(_is_within, passage.within), parts))
        self._read, self._shift = read_part(batch, index) if is_cut else (passage, 0)
        self.strings = [passage]

    def without(self, numbers: Iterable[int]) -> Passage | None:
        """The text without these parts; None where nothing is left."""
        before, after = self._read.around
        spans = [(self.parts[at].start - self._shift, self.parts[at].end - self._shift) for at in numbers]
        text = without(self._read.text, spans)
        string = before + text + after
        return None if is_empty(string) else Passage(string, len(before), len(before) + len(text))

    def rows(self, vectors: Vectors) -> tuple[Vectors, Mapping[str, float] | None]:
        """(n, e): what each part adds, from the embeddings of `strings`; and how far that can be trusted."""
        raise NotImplementedError


def _is_within(places: Iterable[Span], part: Token) -> bool:
    return any(start <= part.start and part.end <= end for start, end in places)


def read_part(batch: Batch, index: int) -> tuple[Passage, int]:
    """What the encoder read of a text and of its metadata, and where in the text that begins."""
    passage, tokens = batch.passages[index], batch.tokens[index]
    spans = [span for span, one in zip(batch.spans[index], tokens, strict=True) if one.part in ("text", "metadata")]
    first, last = min(start for start, _ in spans), max(end for _, end in spans)
    start, end = max(passage.start, first), min(passage.end, last)
    return Passage(passage.string[first:last], start - first, end - first), start - passage.start
