"""A text without some of its parts, or with others in their place, that still reads as a person would have written it.

Parts are given by their places in the caller's own text. What is left is not touched, but for the seam: one of two
blanks goes, a mark that followed the part goes or takes the place of a weaker one, and so do brackets around nothing.
"""

from collections.abc import Iterable, Mapping

import regex

from rag_explain.texts.segments import Span, crosses_word, has_word

_WEAK, _STRONG = ",;:،؛、，；：", ".!?…؟۔।॥。！？｡"
# A mark that belongs to what stands before it: ".5" and ".NET" begin with none. Full-width marks need no blank.
_CLOSING = regex.compile(r"[,;:.!?…،؛؟۔।॥]+(?=[\s\"'”’»)\]]|\Z)|[、，；：。！？｡]++(?![\p{M}\u200c\u200d])")
_OPENING = "([{“‘„«‹「『（【-–—•*#>|/"
_AROUND = ("()", "[]", "{}", "“”", "‘’", "«»", "‹›", "「」", "『』", "（）", "【】", '""', "''", "**", "``")
_BEFORE, _AFTER = ({pair[at] for pair in _AROUND if pair[0] != pair[1]} for at in (0, 1))


def without(text: str, parts: Iterable[Span]) -> str:
    """The text without these parts, which may be words, sentences, or anything between two characters."""
    return edited(text, dict.fromkeys(parts, ""))


def edited(text: str, changes: Mapping[Span, str]) -> str:
    """The text with other words in place of some parts; a part without any ("") is left out. Parts do not overlap."""
    for (start, end), words in sorted(changes.items(), reverse=True):  # from the end: places before it stay
        before, after = text[:start], text[end:]
        text = before + words + after if words else _closed(before, after)
    return text


def is_empty(text: str) -> bool:
    """Whether nothing but blanks and marks is left."""
    return not has_word(text)


def _closed(before: str, after: str) -> str:
    """The two texts as one, after what stood between them was left out."""
    left, right = before.rstrip(), after.lstrip()
    gaps = (before[len(left) :], after[: len(after) - len(right)])
    if not any(gaps) and left[-1:] + right[:1] in _AROUND:
        return _closed(left[:-1], right[1:])
    if not right:
        return left + gaps[1]
    mark = None if gaps[1] else _CLOSING.match(right)
    if mark is not None:
        begins = not left or "\n" in gaps[0] or left[-1] in _OPENING
        if begins or (left[-1] in _WEAK + _STRONG and not (left[-1] in _WEAK and mark[0][0] in _STRONG)):
            return _closed(before, right[mark.end() :])
        return _joined(left.rstrip(_WEAK) if left[-1] in _WEAK else left, "", right)
    if (not gaps[0] and left[-1:] in _BEFORE) or (not gaps[1] and right[:1] in _AFTER):
        return _joined(left, "", right)
    return _joined(left, gaps[0] if not left else max(gaps, key=lambda gap: gap.count("\n") or bool(gap) / 2), right)


def _joined(left: str, gap: str, right: str) -> str:
    """With a blank where two words would become one."""
    return left + (gap or " " * crosses_word(left, right)) + right
