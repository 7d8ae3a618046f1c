"""Two logs of the same queries, before and after a change: which hits moved, and which word pairs moved them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rag_explain.log.reader import records
from rag_explain.log.record import Record


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
    return {record.data["query"]["hash"]: record for record in records(path)}


def _moves(before: Record, after: Record, top: int) -> Iterator[Move]:
    old, new = _by_document(before), _by_document(after)
    query = after.query or before.query or after.data["query"]["hash"]
    for document in [*new, *(key for key in old if key not in new)]:
        a, b = old.get(document), new.get(document)
        same = _same_text(a, b)
        yield Move(
            query=query,
            document=document,
            rank_before=None if a is None else a["rank"],
            rank_after=None if b is None else b["rank"],
            score_before=None if a is None else a["score"],
            score_after=None if b is None else b["score"],
            same_text=same,
            pairs=tuple(_pair_shifts(before, after, a, b))[:top] if a and b and same else (),
        )


def _by_document(record: Record) -> dict[str, dict[str, Any]]:
    return {hit["id"]: hit for hit in record.data["hits"] if hit["id"]}


def _same_text(a: Mapping[str, Any] | None, b: Mapping[str, Any] | None) -> bool | None:
    if a is None or b is None or a["hash"] is None or b["hash"] is None:
        return None
    return bool(a["hash"] == b["hash"])


def _pair_shifts(before: Record, after: Record, a: Mapping[str, Any], b: Mapping[str, Any]) -> list[PairShift]:
    """Strongest change first."""
    if a["explanation"] is None or b["explanation"] is None or a.get("query") != b.get("query"):
        return []
    if a["explanation"]["unit"] != b["explanation"]["unit"]:
        return []
    old, new = _cells(before, a), _cells(after, b)
    query = _text_of(after, b) or _text_of(before, a)
    document = b["text"] or a["text"]
    shifts = [
        PairShift(_piece(query, *cell[:2]), _piece(document, *cell[2:]), old.get(cell), new.get(cell))
        for cell in old.keys() | new.keys()
    ]
    return sorted(shifts, key=lambda shift: (-abs(shift.change), shift.query, shift.document))


def _piece(text: str | None, start: int, end: int) -> str:
    return f"[{start}:{end}]" if text is None else text[start:end]


def _text_of(record: Record, hit: Mapping[str, Any]) -> str | None:
    return record.asked(record.data["hits"].index(hit))


def _cells(record: Record, hit: Mapping[str, Any]) -> dict[tuple[int, int, int, int], float]:
    """Pairs by their offsets: all of them where the matrix was kept, else the strongest."""
    if hit["explanation"].get("matrix") and record.query is not None and hit["text"] is not None:
        whole = record.hits[record.data["hits"].index(hit)].explanation
        assert whole is not None  # it is in the record
        words = whole.by_word() if whole.unit == "token" else whole
        return {
            (q.start, q.end, d.start, d.end): float(words.pairs[i, j])
            for i, q in enumerate(words.query_tokens)
            for j, d in enumerate(words.document_tokens)
        }
    return {(q0, q1, d0, d1): float(value) for q0, q1, d0, d1, value in hit["explanation"]["pairs"]}
