"""Where words and sentences begin and end, and which tokens belong to them: the one place that decides it.

Tokens are grouped by the characters they cover, never by the marks of one tokenizer ("##", "Ġ", "▁"), so that
WordPiece, BPE and SentencePiece give the same words.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise

import regex

Span = tuple[int, int]

# Scripts written without spaces between words. Only a dictionary knows where a word ends there, so a word is
# one character with its marks, or as many of them as one token of the encoder covers (see `group`).
_UNSPACED = r"(?!\p{M})[\p{Han}\p{Hiragana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}]"
# The joiners shape the letters around them (Persian, Hindi); they never end a word.
_LETTER = rf"(?:(?!{_UNSPACED})[\p{{L}}\p{{N}}\p{{M}}_\u200c\u200d])"
_WORD = regex.compile(
    rf"(?:[\p{{Katakana}}ー]\p{{M}}*)+"
    rf"|{_UNSPACED}\p{{M}}*"
    rf"|(?!\p{{Katakana}}){_LETTER}+(?:(?:['’\-.]|(?<=\p{{N}}),(?=\p{{N}})){_LETTER}+)*"
    rf"|(?=\p{{Extended_Pictographic}}|\p{{Regional_Indicator}})\X"
    rf"|(?:(?!\p{{Extended_Pictographic}}|\p{{Regional_Indicator}})[^\p{{L}}\p{{N}}\p{{M}}_\s]\p{{M}}*)+"
)

_END = regex.compile(
    r"[.!?…؟۔।॥]+[\"'”’»)\]]*(?=\s|$)"  # a mark that a blank follows
    r"|[。！？｡]+[」』”’）]*"  # a full-width mark needs none
    r"|\n[^\S\n]*(?=\n)"  # an empty line
    r"|\n(?=\s*(?:[-*•–#|>]|\d+[.)])\s)"  # the next item of a list, a heading, a row of a table
)
# A full stop after these, after a single capital or a list item's number, or before a small letter ends none.
_ABBREVIATIONS = regex.compile(
    r"(?i:mrs?|ms|dr|prof|st|sr|jr|vs|cf|al|figs?|eqs?|nos?|vol|pp|sec|approx|inc|ltd|co|corp|dept|est"
    r"|e\.g|i\.e|u\.s|u\.k|a\.m|p\.m|ph\.d|jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec)"
)
_LAST_WORD = regex.compile(r"[\p{L}\p{M}.]*$")
_ITEM_NUMBER = regex.compile(r"(?:^|\n)[^\S\n]*\d+$")
_SMALL_LETTER = regex.compile(r"\s*\p{Ll}")


def word_spans(text: str) -> list[Span]:
    """Character spans of the words of `text`, in order, not overlapping."""
    return [match.span() for match in _WORD.finditer(text)]


def sentence_spans(text: str) -> list[Span]:
    """Character spans of the sentences of `text`, in order, not overlapping, without blanks around them."""
    ends = [match.end() for match in _END.finditer(text) if not _is_abbreviation(text, *match.span())]
    trimmed = [_trim(text, start, end) for start, end in pairwise([0, *ends, len(text)])]
    return [(start, end) for start, end in trimmed if start < end]


def group(tokens: Sequence[Span], spans: Sequence[Span], *, join: bool, clip: bool) -> tuple[list[Span], list[int]]:
    """Which of `spans` each token belongs to. A token (a, a) belongs to none.

    A token belongs to the span it shares most characters with, the first of them on a tie. With `join`, spans that one
    token covers together become one span instead: half a token cannot be told from the other half. With `clip`, a span
    that the tokens cover only in part ends where they do: the encoder read no further.

    Returns the spans that hold at least one token, in order, and for each token the index of its span or -1.
    """
    starts, ends = [start for start, _ in spans], [end for _, end in spans]
    # Spans do not overlap: those that end after the token begins, and begin before it ends.
    touched = [range(bisect_right(ends, a), bisect_left(starts, b)) if a < b else range(0) for a, b in tokens]
    # With `join`, head[i] is the first of the spans that span i has grown together with.
    head = list(range(len(spans)))
    if join:
        for covered in touched:
            for i in covered[1:]:
                head[i] = min(head[i], i - 1)
        for i in range(len(spans)):
            head[i] = head[head[i]]
    best: list[int] = []
    for (start, end), covered in zip(tokens, touched, strict=True):
        shared = [min(end, spans[i][1]) - max(start, spans[i][0]) for i in covered]
        best.append(head[covered[shared.index(max(shared))]] if shared else -1)
    kept = sorted(set(best) - {-1})
    number = {span: k for k, span in enumerate(kept)}
    ends_of = dict(zip(head, ends, strict=True))  # the last of the spans that have grown together wins
    found = [(starts[i], ends_of[i]) for i in kept]
    if clip and found:
        first = min(start for start, end in tokens if start < end)
        last = max(end for start, end in tokens if start < end)
        found = [(max(start, first), min(end, last)) for start, end in found]
    return found, [number.get(i, -1) for i in best]


def _is_abbreviation(text: str, start: int, end: int) -> bool:
    if text[start:end] != ".":
        return False
    # No word is longer than this; looking back further would make long texts slow.
    before = text[max(0, start - 24) : start]
    if _SMALL_LETTER.match(text, end) or _ITEM_NUMBER.search(before):
        return True
    word = _LAST_WORD.search(before)[0]
    return _ABBREVIATIONS.fullmatch(word) is not None or (len(word) == 1 and word != "I" and word.isupper())


def _trim(text: str, start: int, end: int) -> Span:
    piece = text[start:end]
    start += len(piece) - len(piece.lstrip())
    return start, start + len(piece.strip())
