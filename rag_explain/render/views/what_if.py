"""What if: each change with what its part carries, what the score really becomes, and the rank."""

import math
from collections.abc import Sequence

from rag_explain.render.blocks import Block, Column, Figures, Line, Piece, Section, Table, Texts, View, Words
from rag_explain.render.sentences import number, one_line
from rag_explain.results.notices import READING
from rag_explain.results.what_if import Change, WhatIf
from rag_explain.texts.tokens import Role

_SHOWN = 280  # characters of the document
_NUMBERS = tuple(
    Column(name, is_number=True, is_spare=name == "score") for name in ("carries", "real", "score", "rank")
)
_SIDES: tuple[Role, ...] = ("query", "document")
_NONE = "–"


def what_if_view(found: WhatIf) -> View:
    """The table of changes, the figure that says how far to trust the split, and both texts, cut."""
    read = tuple(Line(notice.text, "warning") for notice in found.notices if notice.code in READING)
    texts = Texts((_text("query", found.query), _text("document", found.document)))
    ranked = "" if found.rank is None else f", rank {found.rank:,}" + (f" of {found.total:,}" if found.total else "")
    figures = Figures("score", f"{found.score:.4f}", ranked)
    tables = (_table(found.changes, side) for side in _SIDES)
    meaning = "real: by how much the score really changes; score and rank: what they are then, computed again"
    told: tuple[Block, ...] = (Line(meaning, "muted"), *_agreement(found))
    if found.unknown_rank:
        told = (*told, Line(f"no ranks: {found.unknown_rank}", "muted"))
    source = " · ".join(part for part in (found.method, found.model) if part)
    return (
        Section((*read, texts)),
        Section((figures, *(table for table in tables if table.rows))),
        Section((*told, Line(source, "muted"))),
    )


def _agreement(found: WhatIf) -> tuple[Line, ...]:
    value = found.agreement
    if math.isnan(value):
        return ()
    return (Line(f"what parts carry and what is lost without them agree in rank by {value:+.2f} (1: the same order)"),)


def told(change: Change) -> str:
    """What was done, in words."""
    text = one_line(change.text, 60)
    if change.kind == "unread":
        return f"only the unread “{text}”"
    return f"without “{text}”" if change.replacement is None else f"“{text}” → “{one_line(change.replacement, 60)}”"


def _table(changes: Sequence[Change], side: Role) -> Table:
    rows = tuple(_cells(change) for change in changes if change.role == side)
    return Table((Column(f"in the {side}", width=48), *_NUMBERS), rows)


def _cells(change: Change) -> tuple[str, ...]:
    carried = _NONE if change.carried is None else number(change.carried)
    score = "no text" if change.score is None else f"{change.score:.4f}"
    real = _NONE if change.change is None else number(change.change)
    rank = _NONE if change.rank is None else f"{change.rank:,}"
    return told(change), carried, real, score, rank


def _text(label: str, text: str) -> Words:
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
    return Words((Piece(shown),), label=label)
