"""A token, and the words that say what it belongs to."""

import re
from dataclasses import dataclass, replace
from typing import Literal, Self, get_args

from rag_explain.errors import InvalidInput

Part = Literal["text", "special", "prompt", "metadata"]
Role = Literal["query", "document"]
Unit = Literal["token", "word", "sentence"]

_UNKNOWN = re.compile(r"[<\[(]\|?unk(nown)?\|?[>\])]", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Token:
    """One token, word or sentence of a text, and where it stands in the caller's own string.

    `text` is the caller's `text[start:end]`. A token that is not part of the caller's text (a special token,
    a prompt, metadata put in front) has `start == end` and an empty `text`; `piece` still names it. A word has the
    piece of a token of it that the vocabulary does not have, if any.
    """

    text: str
    start: int
    end: int
    part: Part = "text"
    piece: str = ""

    @property
    def is_unknown(self) -> bool:
        """Whether this stands for what a vocabulary does not have, by the names that vocabularies give to that."""
        return _UNKNOWN.fullmatch(self.piece) is not None and self.text.strip() != self.piece

    @property
    def label(self) -> str:
        """What to show a person: the text where there is some, else the vocabulary piece."""
        return self.text or self.piece

    def without_text(self) -> Self:
        """The same token where text is not kept: only special tokens keep their name."""
        return replace(self, text="", piece=self.piece if self.part == "special" else "")


def known_unit(unit: Unit) -> Unit:
    """The unit, or a refusal of what is none."""
    if unit not in get_args(Unit):
        raise InvalidInput(f"unit must be 'token', 'word' or 'sentence', not {unit!r}")
    return unit
