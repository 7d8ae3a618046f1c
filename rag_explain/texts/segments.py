"""Where words and sentences begin and end, and which tokens belong to them: the one place that decides it.

Tokens are grouped by the characters they cover, never by the marks of one tokenizer ("##", "Ġ", "▁"), so that
WordPiece, BPE and SentencePiece give the same words.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import ceil

import regex

Span = tuple[int, int]

_NEAR = 64  # characters on each side of a seam that are looked at

# Scripts written without spaces between words. Only a dictionary knows where a word ends there, so a word is
# one character with its marks, or as many of them as one token of the encoder covers (see `group`).
_UNSPACED = r"(?!\p{M})[\p{Han}\p{Hiragana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}]"
_IS_UNSPACED = regex.compile(_UNSPACED)
_TOGETHER = 3  # characters that are one part of a text there: few words are longer
# The joiners shape the letters around them (Persian, Hindi); they never end a word.
_LETTER = rf"(?:(?!{_UNSPACED})[\p{{L}}\p{{N}}\p{{M}}_\u200c\u200d])"
_WORD = regex.compile(
    rf"(?:[\p{{Katakana}}ー]\p{{M}}*)+"
    rf"|{_UNSPACED}\p{{M}}*"
    rf"|(?!\p{{Katakana}}){_LETTER}+(?:(?:['’\-.]|(?<=\p{{N}}),(?=\p{{N}})){_LETTER}+)*"
    rf"|(?=\p{{Extended_Pictographic}}|\p{{Regional_Indicator}})\X"
    rf"|(?P<mark>(?:(?!\p{{Extended_Pictographic}}|\p{{Regional_Indicator}})[^\p{{L}}\p{{N}}\p{{M}}_\s]\p{{M}}*)+)"
)

_END = regex.compile(
    r"[.!?…؟۔।॥]+[\"'”’»)\]]*(?:\[\w{1,4}\]|[¹²³⁰⁴-⁹])*(?=\s|$)"  # a mark, with notes, that a blank follows
    r"|[。！？｡]+[」』”’）]*"  # a full-width mark needs none
    r"|\n[^\S\n]*(?=\n)"  # an empty line
    r"|\n(?=\s*(?:[-*+•–#|>]|\d+[.)])\s)"  # the next item of a list, a heading, a row of a table
)
# A full stop after these ends no sentence; nor does one after an initial or a list item's number.
_ABBREVIATIONS = regex.compile(
    r"(?i:mrs?|mme|ms|dr|prof|st|vs|cf|figs?|eqs?|nos|vol|pp|sec|approx|est|e\.g|i\.e"
    r"|nr|abb|bzw|vgl|ggf|sog)"
)
# Nor after these, unless the next word mostly begins one.
_LAST_ABBREVIATIONS = regex.compile(
    r"(?i:sr|jr|al|inc|ltd|co|corp|dept|u\.s|u\.k|a\.m|p\.m|ph\.d|mio|mrd"
    r"|jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec)"
)
_BEGINNING = regex.compile(
    r"\s+(?:The|An|This|That|These|Those|They|There|Then|It|He|She|We|You|I|In|On|At|For|From|If|As|But|However|When"
    r"|While|His|Her|Its|Their|Our|After|Before|Since|Although|Der|Die|Das|Er|Sie|Es|Wir|Im|Am)\b"
)
# Abbreviations of two words, and numbers that German writes with a full stop.
_PAIR = regex.compile(r"\b(?:z\.\s?B|d\.\s?h|u\.\s?a|[nv]\.\s?Chr|p\.\s?ex)\.")
_ORDINAL = regex.compile(
    r"(?<=\b\d{1,2})\.\s(?:Januar|Februar|März|April|Mai|Juni|Juli|August|September|Oktober|November|Dezember"
    r"|Jahrhundert|Jahrtausend)"
)
_BEFORE_NUMBERS = regex.compile(r"(?i:no|refs?|chap|sect|tab|art|p|ca)")
# Without capitals there is less to tell by: initials are small, and what may end a sentence mostly does not.
_SMALL_ABBREVIATIONS = regex.compile(r"\p{L}(?:\.\p{L}+)*|etc|viz|resp|refs?|ca|spp?|ssp|subsp|var")
_LAST_WORD = regex.compile(r"[\p{L}\p{M}.]*$")
_ITEM_NUMBER = regex.compile(r"(?:^|\n)[^\S\n]*\d+$")
_SMALL_LETTER = regex.compile(r"\s*\p{Ll}")
_NUMBER = regex.compile(r"\s*\p{N}")
# A sentence that begins with a small letter, or whose one capital there is "I".
_SMALL_BEGINNING = regex.compile(r"[^\p{L}]*(?:I(?:['’]\p{L}+)?[^\p{L}'’]+)*\p{Ll}")

# A sentence of more words than this is cut where a clause ends; no clause that is cut off is shorter than a quarter.
_LONGEST, _SHORTEST = 48, 12
_CLAUSE_END = regex.compile(r"[;:–—]|,$|^[.-]+$")
_WIDE_CLAUSE_END = regex.compile(r"[，；：、،؛—]$")  # no blank follows
_CONJUNCTION = regex.compile(
    r"(?i:and|but|or|nor|yet|so|which|who|whose|that|because|since|while|whereas|when|where|although|though|if|as|with"
    r"|und|oder|aber|denn|sondern|weil|dass|wenn|während|wobei|et|ou|mais|car|que|qui|dont|y|o|pero|porque|e|ma|che)"
)


def word_spans(text: str) -> list[Span]:
    """Character spans of the words of `text`, in order, not overlapping."""
    return [match.span() for match in _WORD.finditer(text)]


def part_spans(text: str) -> list[Span]:
    """The words that are no marks; of a script without spaces between words, three characters together."""
    found: list[Span] = []
    length = 0  # of the last span, in words
    for match in _WORD.finditer(text):
        start, end = match.span()
        joins = match["mark"] is None and _IS_UNSPACED.match(match[0]) is not None
        if joins and 0 < length < _TOGETHER and found[-1][1] == start:
            found[-1] = (found[-1][0], end)
            length += 1
        elif match["mark"] is None:
            found.append((start, end))
            length = int(joins)
    return found


def has_word(text: str) -> bool:
    """Whether there is a word in the text that is no mark."""
    return any(match["mark"] is None for match in _WORD.finditer(text))


def crosses_word(left: str, right: str) -> bool:
    """Whether a word would reach over the seam, were the second text put right after the first."""
    near = left[-_NEAR:]
    found = _WORD.finditer(near + right[:_NEAR])
    return any(match.start() < len(near) < match.end() and match["mark"] is None for match in found)


def sentence_spans(text: str) -> list[Span]:
    """Character spans of the sentences of `text`, in order, not overlapping, without blanks around them.

    None has more than 48 words: a longer one is cut where a clause ends, else after 48 words.
    """
    whole = (_trim(text, start, end) for start, end in pairwise([0, *_sentence_ends(text), len(text)]))
    return [part for start, end in whole if start < end for part in _parts(text, start, end)]


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


def _sentence_ends(text: str) -> Iterator[int]:
    begin = 0
    for match in _END.finditer(text):
        start, end = match.span()
        if match[0] == ".":
            # No more is looked at than tells: looking at whole sentences again and again would make long texts slow.
            is_small = _SMALL_LETTER.match(text, end) is not None
            if is_small and not _SMALL_BEGINNING.match(text, begin, min(start, begin + 100)):
                continue
            if _is_abbreviation(text, start, is_small=is_small):
                continue
        yield end
        begin = end


def _is_abbreviation(text: str, stop: int, *, is_small: bool) -> bool:
    """Whether the full stop at `stop` shortens a word; `is_small`: a small letter comes next."""
    before = text[max(0, stop - 24) : stop]  # no word is longer
    if _ITEM_NUMBER.search(before) or _ORDINAL.match(text, stop):
        return True
    word = _LAST_WORD.search(before)[0]
    if is_small and _SMALL_ABBREVIATIONS.fullmatch(word):
        return True
    if _BEFORE_NUMBERS.fullmatch(word) and _NUMBER.match(text, stop + 1):
        return True
    if _ABBREVIATIONS.fullmatch(word) or (len(word) == 1 and word != "I" and word.isupper()):
        return True
    pair = _PAIR.search(text, max(0, stop - 6), stop + 6)
    if _LAST_ABBREVIATIONS.fullmatch(word) or (pair and pair.start() < stop < pair.end()):
        return _BEGINNING.match(text, stop + 1) is None
    return False


def _parts(text: str, start: int, end: int) -> Iterator[Span]:
    """A sentence, or the parts of one that is too long."""
    sentence = text[start:end]
    for first, last in pairwise([0, *(_cuts(sentence) if len(sentence) > _LONGEST else ()), len(sentence)]):
        yield _trim(text, start + first, start + last)


def _cuts(sentence: str) -> Iterator[int]:
    """Where to cut: at the best end of a clause, the nearest to parts of equal length, else after so many words."""
    found = list(_WORD.finditer(sentence))
    spans = [match.span() for match in found]
    words = [at for at, match in enumerate(found) if match["mark"] is None]  # people do not count commas
    first = 0
    while (left := len(words) - first) > _LONGEST:
        goal = first + left / ceil(left / _LONGEST)
        within = range(first + _SHORTEST, min(first + _LONGEST, len(words) - _SHORTEST) + 1)
        ranked = [(rank, abs(at - goal), at) for at in within if (rank := _clause_rank(sentence, spans, words[at]))]
        first = min(ranked)[2] if ranked else first + _LONGEST
        yield spans[words[first]][0]


def _clause_rank(sentence: str, words: Sequence[Span], at: int) -> int:
    """1 where a clause ends before word `at`, 2 where there is but a comma, 0 where neither is."""
    (start, end), (after, after_end) = words[at - 1], words[at]
    mark = sentence[start:end]
    if _WIDE_CLAUSE_END.search(mark):
        return 1
    if end == after or _CLAUSE_END.search(mark) is None:
        return 0
    if mark[-1] == ",":
        return 1 if _CONJUNCTION.fullmatch(sentence, after, after_end) else 2
    if mark == ".":
        return 0 if _is_abbreviation(sentence, start, is_small=True) else 1
    return 0 if mark == "-" and words[at - 2][1] == start else 1  # the hyphen of "pre- and post-"


def _trim(text: str, start: int, end: int) -> Span:
    piece = text[start:end]
    start += len(piece) - len(piece.lstrip())
    return start, start + len(piece.strip())
