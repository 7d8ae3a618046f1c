"""WhatIf: what the score and the rank would be, had the texts been others. Computed again, never predicted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from rag_explain.results.comparison import rank_correlation
from rag_explain.results.display import Paged
from rag_explain.results.notices import Notice
from rag_explain.results.serialization import to_plain, write_notices
from rag_explain.texts.tokens import Role

Kind = Literal["without", "replaced", "unread"]
Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Change:
    """One text changed in one way, and what came of it."""

    text: str  # what was left out, or replaced, or had not been read
    role: Role
    kind: Kind  # "unread": what the encoder had not read of the document, read by itself
    spans: Spans  # where it stands in that text, everywhere it does
    score: float | None  # the score then; None where no text would be left
    rank: int | None  # the rank then, where the index can tell
    carried: float | None  # what the explanation says that it carries; None where it does not say
    before: float  # the score as it is
    replacement: str | None = None

    @property
    def change(self) -> float | None:
        """By how much the score changes; None where no text would be left."""
        return None if self.score is None else self.score - self.before


@dataclass(frozen=True, eq=False, kw_only=True)
class WhatIf(Paged):
    """The score of a query and a document, and what it becomes when a part of them is left out or replaced.

    Attributes:
        score, rank: as they are; the rank in the whole index, None where that is not known.
        total: how many documents the rank is among.
        changes: each tried by itself.
        method, model: what tells `carried`, and what scores.
        unknown_rank: why there are no ranks, where there are none.
    """

    _title: ClassVar[str] = "What if?"

    query: str
    document: str
    score: float
    changes: tuple[Change, ...]
    rank: int | None = None
    total: int | None = None
    method: str = ""
    model: str = ""
    measure: str = "cosine"
    fingerprint: str = ""
    notices: tuple[Notice, ...] = ()
    unknown_rank: str = ""

    @property
    def agreement(self) -> float:
        """Spearman's rank correlation of what parts carry with what the score loses without them; NaN below three."""
        return agreement((one.carried, one.change) for one in self.changes if one.kind == "without")

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        names = ("query", "document", "score", "rank", "total", "method", "model", "measure", "fingerprint")
        return {
            "format": "rag_explain.what_if",
            "version": 1,
            **{name: getattr(self, name) for name in names},
            "agreement": to_plain(self.agreement),
            "changes": [to_plain({**asdict(one), "change": one.change}) for one in self.changes],
            "notices": write_notices(self.notices),
            "unknown_rank": self.unknown_rank,
        }

    def __repr__(self) -> str:
        return f"WhatIf({len(self.changes)} changes, score={self.score:.4f}, rank={self.rank})"


def agreement(found: Iterable[tuple[float | None, float | None]]) -> float:
    """The rank correlation of what is carried with what is lost, over all for which both are known."""
    known = [(carried, -change) for carried, change in found if carried is not None and change is not None]
    if len(known) < 3:
        return float("nan")
    carried, lost = np.array(known).T
    return rank_correlation(carried, lost)
