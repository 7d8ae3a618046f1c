"""Two logs of the same queries, before and after a change: which hits moved, and which word pairs moved them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from rag_explain.log.compact import cells
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
    """One document for one query, in two logs. A rank or score of None: it was not retrieved.

    Attributes:
        same_text: whether both logs explained the same text; None where a hash is missing.
        pairs: the pairs that changed most; empty unless both logs have an explanation of the same text.
    """

    query: str
    document: str
    rank_before: int | None
    rank_after: int | None
    score_before: float | None
    score_after: float | None
    same_text: bool | None
    pairs: tuple[PairShift, ...]

    @property
    def moved(self) -> bool:
        """Whether the rank changed, or the document came or went."""
        return self.rank_before != self.rank_after


def diff(before: str | os.PathLike[str], after: str | os.PathLike[str], *, top: int = 5) -> Iterator[Move]:
    """Every document of every query that both logs hold; where a query was asked twice, its last record counts."""
    old, new = _last(before), _last(after)
    for key, record in new.items():
        if key in old:
            yield from _moves(old[key], record, top)


def _last(path: str | os.PathLike[str]) -> dict[str, Record]:
    return {record.query_hash: record for record in records(path)}


class _RankedHit(NamedTuple):
    """A hit, and the words that it was retrieved with."""

    hit: LoggedHit
    query: str | None

    def cells(self) -> dict[tuple[int, ...], float]:
        """Pairs by their offsets: all of them where the matrix and the texts were kept, else the strongest."""
        logged = self.hit.explanation
        if logged is None:
            return {}
        if logged.matrix is None or self.query is None or self.hit.text is None:
            return {pair[0:4]: pair.value for pair in logged.pairs}
        return cells(logged.explanation(self.query, self.hit.text).grouped(logged.outline.unit))


def _moves(before: Record, after: Record, top: int) -> Iterator[Move]:
    old, new = _by_document(before), _by_document(after)
    query = after.query or before.query or after.query_hash
    for document in [*new, *(key for key in old if key not in new)]:
        a, b = old.get(document), new.get(document)
        same = _same_text(a, b)
        yield Move(
            query=query,
            document=document,
            rank_before=None if a is None else a.hit.rank,
            rank_after=None if b is None else b.hit.rank,
            score_before=None if a is None else a.hit.score,
            score_after=None if b is None else b.hit.score,
            same_text=same,
            pairs=tuple(_pair_shifts(a, b))[:top] if a and b and same else (),
        )


def _by_document(record: Record) -> dict[str, _RankedHit]:
    hits = (_RankedHit(hit, record.asked(index)) for index, hit in enumerate(record.logged_hits))
    return {ranked.hit.id: ranked for ranked in hits if ranked.hit.id}


def _same_text(a: _RankedHit | None, b: _RankedHit | None) -> bool | None:
    if a is None or b is None or a.hit.text_hash is None or b.hit.text_hash is None:
        return None
    return a.hit.text_hash == b.hit.text_hash


def _pair_shifts(a: _RankedHit, b: _RankedHit) -> list[PairShift]:
    """Strongest change first; none where the pairs are of other words."""
    old, new = a.hit.explanation, b.hit.explanation
    if old is None or new is None or a.hit.query_hash != b.hit.query_hash or old.outline.unit != new.outline.unit:
        return []
    query, document = b.query or a.query, b.hit.text or a.hit.text
    before, after = a.cells(), b.cells()
    shifts = [
        PairShift(_piece(query, *cell[:2]), _piece(document, *cell[2:]), before.get(cell), after.get(cell))
        for cell in before.keys() | after.keys()
    ]
    return sorted(shifts, key=lambda shift: (-abs(shift.change), shift.query, shift.document))


def _piece(text: str | None, start: int, end: int) -> str:
    return f"[{start}:{end}]" if text is None else text[start:end]
