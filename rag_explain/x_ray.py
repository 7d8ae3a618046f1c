"""The x-ray of a chunk: how much of its own vector each part of it makes up, from its factors alone.

share[i] = <rows[i], e> / |e|^2          e = sum of rows + rest, so the shares and the rest's sum to 1
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import regex
from numpy.typing import NDArray

from rag_explain.errors import InvalidInput
from rag_explain.factors import Factors
from rag_explain.results.spans import ValuedSpan
from rag_explain.results.x_ray import XRay
from rag_explain.texts.passage import Passage
from rag_explain.texts.segments import Span, sentence_spans
from rag_explain.texts.tokens import Token

# A heading of Markdown, or a line that is underlined.
_HEADER = regex.compile(r"^(?:\#{1,6}[ \t]+\S.*|\S.*(?=\n(?:={3,}|-{3,})[ \t]*$))", regex.MULTILINE)


def x_rayed(factors: Factors, passage: Passage, spans: Sequence[Span] | None, model: str) -> XRay:
    """What a text's factors say of its vector; `spans` are where its tokens stand in the passage's string."""
    if factors.unit == "token":
        factors = factors.grouped("word", passage, spans)
    embedding = factors.embedding.astype(np.float64)
    length = float(embedding @ embedding)
    if not length:
        raise InvalidInput("the text's embedding is zero: nothing is a share of it")
    shares = factors.rows.astype(np.float64) @ embedding / length
    rest = float(factors.rest.astype(np.float64) @ embedding) / length
    pieces = _of_text(factors.tokens, shares)
    is_by_word = factors.unit == "word"
    others = [(one, share) for one, share in zip(factors.tokens, shares.tolist(), strict=True) if one.part != "text"]
    return XRay(
        document=passage.text,
        words=pieces if is_by_word else (),
        sentences=_summed(pieces, passage.text, sentence_spans(passage.text)) if is_by_word else pieces,
        headers=_summed(pieces, passage.text, [found.span() for found in _HEADER.finditer(passage.text)]),
        metadata=tuple((one.label, share) for one, share in others if one.part == "metadata"),
        special=sum(share for one, share in others if one.part != "metadata"),
        rest=rest,
        error=abs(1 - float(shares.sum()) - rest),
        method=factors.method,
        model=model,
        fingerprint=factors.fingerprint,
        notices=factors.notices,
    )


def _of_text(tokens: Sequence[Token], shares: NDArray[np.float64]) -> tuple[ValuedSpan, ...]:
    both = zip(tokens, shares.tolist(), strict=True)
    return tuple(ValuedSpan(one.text, one.start, one.end, share) for one, share in both if one.part == "text")


def _summed(pieces: Sequence[ValuedSpan], text: str, spans: Sequence[Span]) -> tuple[ValuedSpan, ...]:
    """The pieces that begin inside each of these spans, summed; a span without one is left out."""
    found = []
    for start, end in spans:
        inside = [piece.value for piece in pieces if start <= piece.start < end]
        if inside:
            found.append(ValuedSpan(text[start:end], start, end, sum(inside)))
    return tuple(found)
