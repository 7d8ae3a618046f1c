"""Where words and sentences begin and end in a text: the one place that decides it.

Tokens are grouped by the characters they cover, never by the marks of one tokenizer ("##", "Ġ", "▁"), so that
WordPiece, BPE and SentencePiece give the same words.
"""

from __future__ import annotations

import re

Span = tuple[int, int]

# Scripts written without spaces: every character is a word of its own, as in BERT's own tokenizer.
_UNSPACED = (
    "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"
)
_WORD = re.compile(rf"[{_UNSPACED}]|(?:(?![{_UNSPACED}])\w)+(?:['’\-.](?:(?![{_UNSPACED}])\w)+)*|[^\w\s]+")


def word_spans(text: str) -> list[Span]:
    """Character spans of the words of `text`, in order, not overlapping."""
    return [match.span() for match in _WORD.finditer(text)]


def sentence_spans(text: str) -> list[Span]:
    """Character spans of the sentences of `text`, in order, without the blanks around them."""
    spans: list[Span] = []
    start = 0
    for match in re.finditer(r"[.!?]+[\"'”’)\]]*(?=\s|$)|[。！？]+[」』”’]*|\n\s*", text):
        spans.append((start, match.end()))
        start = match.end()
    spans.append((start, len(text)))
    return [trimmed for span in spans if (trimmed := _trim(text, span))]


def _trim(text: str, span: Span) -> Span | None:
    piece = text[span[0] : span[1]]
    if not piece.strip():
        return None
    start = span[0] + len(piece) - len(piece.lstrip())
    return start, start + len(piece.strip())
