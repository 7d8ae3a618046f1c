"""Two logs of the same queries, before and after a change: which hits moved, and which word pairs moved them."""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from rag_explain.errors import RagExplainError
from rag_explain.log.compact import LoggedExplanation, all_cells, cells
from rag_explain.log.reader import records
from rag_explain.log.record import LoggedHit, Record


@dataclass(frozen=True, slots=True)
class PairShift:
    """A word pair before and after, in each encoder's own score units. None: not among the pairs that were kept."""

    query: str
    document: str
    before: float | None
    after: float | None

    @property
    def change(self) -> float:
        """after - before; a pair that was not kept counts as nothing."""
        return (self.after or 0.0) - (self.before or 0.0)


@dataclass(frozen=True, slots=True)
class Move:
    """One document for one query, in two logs. A rank or score of None: it was not retrieved."""

    query: str
    document: str
    rank_before: int | None
    rank_after: int | None
    score_before: float | None
    score_after: float | None
    same_text: bool | None  # None where a hash is missing
    pairs: tuple[PairShift, ...]  # those that changed most; none unless both logs explain the same text

    @property
    def moved(self) -> bool:
        """Whether the rank changed, or the document came or went."""
        return self.rank_before != self.rank_after


def diff(before: str | os.PathLike[str], after: str | os.PathLike[str], *, top: int = 5) -> Iterator[Move]:
    """Every document of every query that both logs hold; where a query was asked twice, its last record counts."""
    old, new = ({record.query_hash: record for record in records(path)} for path in (before, after))
    for key, record in new.items():
        if key in old:
            yield from _moves(old[key], record, top)


def _moves(before: Record, after: Record, top: int) -> Iterator[Move]:
    old, new = ({hit.id: hit for hit in record.logged_hits if hit.id} for record in (before, after))
    for document in new | old:
        a, b = old.get(document), new.get(document)
        same = a.text_hash == b.text_hash if a and b and a.text_hash and b.text_hash else None
        yield Move(
            query=after.query or before.query or after.query_hash,
            document=document,
            rank_before=None if a is None else a.rank,
            rank_after=None if b is None else b.rank,
            score_before=None if a is None else a.score,
            score_after=None if b is None else b.score,
            same_text=same,
            pairs=tuple(_pair_shifts(a, b))[:top] if a and b and same else (),
        )


def _pair_shifts(a: LoggedHit, b: LoggedHit) -> list[PairShift]:
    """Strongest change first; none where the pairs are of other words."""
    old, new = a.explanation, b.explanation
    if old is None or new is None or a.query_hash != b.query_hash or old.outline.unit != new.outline.unit:
        return []
    query, document = new.outline.query or old.outline.query, b.text or a.text
    before, after = _cells(old), _cells(new)
    shifts = [
        PairShift(_piece(query, *cell[:2]), _piece(document, *cell[2:]), before.get(cell), after.get(cell))
        for cell in before.keys() | after.keys()
    ]
    return sorted(shifts, key=lambda shift: (-abs(shift.change), shift.query, shift.document))


def _cells(logged: LoggedExplanation) -> dict[tuple[int, ...], float]:
    """All pairs where the matrix and the texts were kept, else the strongest."""
    if logged.matrix is not None and logged.outline.query is not None and logged.outline.document is not None:
        with suppress(RagExplainError):  # a matrix that is damaged: its strongest pairs are there still
            return all_cells(logged.explanation().grouped(logged.outline.unit))
    return cells(logged.pairs)


def _piece(text: str | None, start: int, end: int) -> str:
    return f"[{start}:{end}]" if text is None else text[start:end]
