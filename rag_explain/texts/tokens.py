"""A token, and the words that say what it belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Part = Literal["text", "special", "prompt", "metadata"]
Role = Literal["query", "document"]
Unit = Literal["token", "word", "sentence"]


@dataclass(frozen=True, slots=True)
class Token:
    """One token, word or sentence of a text, and where it stands in the caller's own string.

    `text` is the caller's `text[start:end]`. A token that is not part of the caller's text (a special token,
    a prompt, metadata put in front) has `start == end` and an empty `text`; `piece` still names it.
    """

    text: str
    start: int
    end: int
    part: Part = "text"
    piece: str = ""

    @property
    def label(self) -> str:
        """What to show a person: the text where there is some, else the vocabulary piece."""
        return self.text or self.piece

    def without_text(self) -> Token:
        """The same token where text is not kept: only special tokens keep their name."""
        return Token("", self.start, self.end, self.part, self.piece if self.part == "special" else "")
