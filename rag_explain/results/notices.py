"""Notices: what a reader must know before trusting the numbers of an explanation.

Each is added where its reason is known: by the scorer, the method, the retriever, or a measurement. None is replaced.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from rag_explain.texts.tokens import Role

Level = Literal["note", "warning"]

# The score that is explained is not the model's own similarity: the method or the model decides so.
OTHER_SCORE = "other-score"
# The documents were not chosen by this similarity alone: the retriever reranks, mixes or diversifies.
OTHER_RANKING = "other-ranking"
# A score or vector of the index, or the framework's vector of the query, is not what was computed here.
MISMATCH = "mismatch"
# Nothing showed whether the index was built, or searched, with this encoder.
UNCHECKED = "unchecked"
# The encoder does not know words of a text, and reads all of them as one; or an index does not look for them.
UNKNOWN = "unknown"
# The encoder read words of a text letter by letter.
SPELLED = "spelled"
# The encoder read only a part of a text.
TRUNCATED = "truncated"
# What is explained is a chunk, by which the document that was returned was found.
CHUNK = "chunk"
# The explanation holds the pairs that a log kept, and not all pairs of the original.
KEPT_PAIRS = "kept-pairs"
# Each value is what the score loses without a part: values of another unit are not sums of these.
LEFT_OUT = "left-out"
# Not all parts of a text were left out: no more texts could be sent.
PARTIAL = "partial"
# Words were left out of some sentences of a text only.
NARROWED = "narrowed"
# The embedding of a text is what the index keeps for it: it was not embedded again.
TAKEN = "taken"
# A wrapper found nothing to look into, and asked what embeds for the vectors of edited texts.
BLACK_BOX = "black-box"
# Something the method itself says about this pair.
METHOD = "method"

# What could not be read: first in every list of notices and in every view.
READING = (UNKNOWN, SPELLED, TRUNCATED)
STAND_INS = (OTHER_SCORE, OTHER_RANKING, MISMATCH)


@dataclass(frozen=True, slots=True)
class Notice:
    """One sentence about an explanation: `code` is for programs, `text` for people."""

    code: str  # the constants of this module are the ones used here
    text: str
    level: Level = "warning"  # where the numbers can mislead without it, else "note"
    side: Role | None = None  # the text that it is about, where it is about one of them


def cut_sides(notices: Iterable[Notice]) -> tuple[Role, ...]:
    """The texts of which the encoder read only a part."""
    return tuple(notice.side for notice in notices if notice.code == TRUNCATED and notice.side is not None)


def is_of_chunk(notices: Iterable[Notice]) -> bool:
    """Whether what is explained is a chunk of the document that is shown."""
    return any(notice.code == CHUNK for notice in notices)


def stand_in_reason(notices: Iterable[Notice]) -> str | None:
    """Why what is explained is not what the retriever scored: all reasons in one string, None where there is none."""
    return "; ".join(dict.fromkeys(notice.text for notice in notices if notice.code in STAND_INS)) or None


def merged(*groups: Iterable[Notice]) -> tuple[Notice, ...]:
    """Notices in the order in which they became known, each once, but first what could not be read."""
    known = dict.fromkeys(notice for group in groups for notice in group)
    return tuple(sorted(known, key=lambda notice: notice.code not in READING))
