"""What an encoder could not read of a text: words that it does not know or only spells, and what was cut off.

The sentences count and never quote, so that a log without texts can keep them.
"""

from collections.abc import Collection, Iterable, Sequence
from itertools import compress
from operator import not_
from typing import Literal

import regex

from rag_explain.results.notices import SPELLED, TRUNCATED, UNKNOWN, Notice
from rag_explain.texts.passage import Passage
from rag_explain.texts.segments import Span, group, word_spans
from rag_explain.texts.tokens import Role, Token

End = Literal["left", "right"]  # of a string

# A single name or abbreviation is often spelled; from this share of the words on, the text as a whole is not known.
_MANY = 1 / 5
# Fewer tokens are no spelling: many letters are two bytes.
_TOKENS = 3
# Letters that make words together. Encoders that know Chinese and Japanese well may read them one by one, too.
_LETTERS = regex.compile(r"(?V1)[[\p{L}\p{M}\u200c\u200d]--[\p{Han}\p{Hiragana}]]+")
_ONE_LETTER = regex.compile(r"\s*(?![\p{P}\p{N}])\X\s*")
_SIGN = regex.compile(r"[\p{L}\p{So}]")
_BYTE = regex.compile(r"<0x[0-9A-F]{2}>")
# Something to see: blanks, lone marks and controls are not missed where no token covers them.
_SEEN = regex.compile(r"[\p{L}\p{N}\p{P}\p{S}\p{Extended_Pictographic}]")


def reading_notices(
    tokens: Sequence[Token], passage: Passage, side: Role, unknown: Collection[str | None], cut: End | None
) -> tuple[Notice, ...]:
    """What must be said about a text that was read as `tokens`.

    `unknown` are the pieces that stand for whatever the vocabulary does not have; `cut` is the end that was cut off.
    """
    text = passage.text
    own = [token for token in tokens if token.part == "text" and token.start < token.end and not _is_blank(token)]
    first = min((token.start for token in own), default=len(text)) if cut == "left" else 0
    last = max((token.end for token in own), default=0) if cut == "right" else len(text)
    found = _words(own, text[:last], first, unknown, f"{'read ' if cut else ''}of the {side}")
    found[TRUNCATED] = "" if cut is None else _cut_off(passage, side, cut, first, last)
    return tuple(Notice(code, sentence, side=side) for code, sentence in found.items() if sentence)


def _is_blank(token: Token) -> bool:
    """Whether this is only the blank that some tokenizers put before a text; its span is then the first letter's."""
    return token.piece in ("▁", "Ġ") and token.text != token.piece


def _words(tokens: Sequence[Token], text: str, first: int, unknown: Collection[str | None], of: str) -> dict[str, str]:
    """What to say about the words of a text, from its character `first` on, that are unknown or spelled."""
    # A piece that the text itself spells out stands for itself.
    unread = [token.piece in unknown and token.text.strip() != token.piece for token in tokens]
    letters = bytes(bool(_ONE_LETTER.fullmatch(token.text) or _BYTE.fullmatch(token.piece)) for token in tokens)
    touched = _marked(text, ((token.start, token.end) for token in tokens))
    dropped = "".join(compress(text[first:], map(not_, touched[first:])))
    if not (any(unread) or b"\1" * _TOKENS in letters or _SEEN.search(dropped)):
        return {}  # as nearly every text, which need not be split into words
    spans = [span for span in word_spans(text) if span[1] > first]
    words, parts = _parted(tokens, spans, join=True)
    lost = sum(not any(touched[start:end]) and _SEEN.search(text, start, end) is not None for start, end in spans)
    spelled = _spelled(tokens, text, letters)
    counts = {UNKNOWN: lost, SPELLED: 0}
    for (start, end), part in zip(words, parts, strict=True):
        if any(unread[at] for at in part):
            counts[UNKNOWN] += 1
        elif all(spelled[start:end]) or (_SIGN.search(text, start, end) and _are_bytes(part, letters, end - start)):
            counts[SPELLED] += 1
    total = len(words) + lost
    return {code: sentence(counts[code], total, of) for code, sentence in ((UNKNOWN, _unknown), (SPELLED, _by_letters))}


def _spelled(tokens: Sequence[Token], text: str, letters: bytes) -> bytearray:
    """A byte for each character: whether it is in a stretch of letters that was read letter by letter.

    Where no blank parts words, all letters up to the next blank are judged together.
    """
    stretches, parts = _parted(tokens, [match.span() for match in _LETTERS.finditer(text)], join=False)
    are_spelled = (len(part) >= _TOKENS and all(letters[at] for at in part) for part in parts)
    return _marked(text, compress(stretches, are_spelled))


def _are_bytes(part: Sequence[int], letters: bytes, characters: int) -> bool:
    """Whether these tokens are parts of single characters."""
    return len(part) > characters and len(part) >= _TOKENS and all(letters[at] for at in part)


def _parted(tokens: Sequence[Token], spans: Sequence[Span], *, join: bool) -> tuple[list[Span], list[list[int]]]:
    """The spans that hold a token, as `group` finds them, and the indices of their tokens."""
    found, owners = group([(token.start, token.end) for token in tokens], spans, join=join, clip=False)
    parts: list[list[int]] = [[] for _ in found]
    for index, owner in enumerate(owners):
        if owner >= 0:
            parts[owner].append(index)
    return found, parts


def _marked(text: str, spans: Iterable[Span]) -> bytearray:
    """A byte for each character: 1 in the spans, 0 elsewhere."""
    marks = bytearray(len(text))
    for start, end in spans:
        marks[start:end] = b"\1" * (end - start)
    return marks


def _unknown(count: int, total: int, of: str) -> str:
    told, them = ("them apart", "them") if count > 1 else ("it from other unknown words", "it")
    advice = f": a multilingual model may know {them}" if count >= _MANY * total else ""
    words = f"{_some(count, total)} {of} {'are' if count > 1 else 'is'}"
    return f"{words} unknown to this encoder, which cannot tell {told}{advice}." if count else ""


def _by_letters(count: int, total: int, of: str) -> str:
    was, them = ("were", "them") if count > 1 else ("was", "it")
    words = f"{_some(count, total)} {of} {was}"
    is_told = count and count >= _MANY * total
    return f"{words} read letter by letter, so the encoder hardly knows {them}." if is_told else ""


def _some(count: int, total: int) -> str:
    if count < total:
        return f"{count:,} of {total:,} words"
    return "The only word" if total == 1 else f"All {total:,} words"


def _cut_off(passage: Passage, side: Role, cut: End, first: int, last: int) -> str:
    """Which part was read of a text whose end was cut off; nothing where only blanks were lost."""
    text, is_left = passage.text, cut == "left"
    unread, around = (text[:first], passage.around[0]) if is_left else (text[last:], passage.around[1])
    metadata = f"metadata {'before' if is_left else 'after'} it"
    if not unread.strip():
        return f"The encoder read the whole {side}, but not all of the {metadata}." if around.strip() else ""
    if first >= last:
        return f"The encoder read nothing of the {side}: what stands around it filled all that the encoder reads."
    which, count = ("last", len(text) - first) if is_left else ("first", last)
    more = f" and none of the {metadata}" if around.strip() else ""
    words = f"The encoder read only the {which} {count:,} of {len(text):,} characters of the {side}{more}"
    return f"{words}; the rest has no influence on the score."
