"""Notices: what a reader must know before trusting the numbers of an explanation.

A notice is added where its reason is known: by the scorer, by the method, by the retriever, or by a measurement. Later
ones never replace earlier ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from rag_explain.texts.tokens import Role

Level = Literal["note", "warning"]

# The score that is explained is not the model's own similarity: the method or the model decides so.
OTHER_SCORE = "other-score"
# The documents were not chosen by this similarity alone: the retriever reranks, mixes or diversifies.
OTHER_RANKING = "other-ranking"
# The index's score implies another similarity than the one that was computed.
MISMATCH = "mismatch"
# The encoder read only a part of a text.
TRUNCATED = "truncated"
# Something the method itself says about this pair.
METHOD = "method"

STAND_INS = (OTHER_SCORE, OTHER_RANKING, MISMATCH)


@dataclass(frozen=True, slots=True)
class Notice:
    """One sentence about an explanation.

    Attributes:
        code: what kind of notice it is, for programs; the constants of this module are the ones used here.
        text: the sentence, for people.
        level: "warning" where the numbers can mislead without it, else "note".
        side: the text that it is about, where it is about one of them.
    """

    code: str
    text: str
    level: Level = "warning"
    side: Role | None = None


def truncation(side: Role) -> Notice:
    """The encoder read only a part of this side's text."""
    text = f"The encoder read only a part of the {side}; the rest has no influence on the score."
    return Notice(TRUNCATED, text, side=side)


def stand_in_reason(notices: Iterable[Notice]) -> str | None:
    """Why what is explained is not what the retriever scored: all reasons in one string, None where there is none."""
    return "; ".join(dict.fromkeys(notice.text for notice in notices if notice.code in STAND_INS)) or None


def merged(*groups: Iterable[Notice]) -> tuple[Notice, ...]:
    """Notices in the order in which they became known, each once."""
    return tuple(dict.fromkeys(notice for group in groups for notice in group))
