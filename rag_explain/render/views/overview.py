"""An overview of hits: the sentence that says why the first came first, and the words that met, hit by hit."""

from collections.abc import Sequence
from dataclasses import replace

from rag_explain.render.blocks import Cell, Grid, GridRow, Line, Section, View
from rag_explain.render.sentences import background, number, one_line
from rag_explain.results.overview import Meeting, Overview, Row

# Words of the query that get a column of their own; the others are summed.
_COLUMNS = 6
_WORD = 24  # characters of a document's word
_UNMET = "–"


def overview_view(overview: Overview, *, columns: int = _COLUMNS) -> View:
    """The reason first, then a grid of hits by the words of the query that carry most."""
    return (Section((*said(overview), *grid(overview, columns))),)


def said(overview: Overview) -> tuple[Line, ...]:
    """What the grid shows, in sentences."""
    silent = " or ".join(f"“{word}”" for word in overview.silent or ())
    lines = (
        Line(overview.reason, "answer"),
        Line(overview.margin, "muted"),
        Line(f"nothing here speaks to {silent}" if silent else "", "warning"),
    )
    return tuple(line for line in lines if line.text)


def grid(overview: Overview, columns: int = _COLUMNS) -> tuple[Grid, ...]:
    """Each cell is the word of the document that a word of the query met most, with what the word carries there."""
    chosen = overview.columns(columns)
    has_others = len(chosen) < len(overview.words)
    rows = tuple(_row(row, chosen, has_others) for row in overview.rows)
    if not any(row.cells for row in rows):
        return ()
    more = ("other words", "no query word")[0 if has_others else 1 :] if any(row.more for row in rows) else ()
    scale = max(abs(cell.value) for row in rows for cell in row.cells)
    rows = _parted(_with_bars(rows, overview), background([row.standing for row in overview.rows]))
    return (Grid(tuple(one_line(overview.words[i], _WORD) for i in chosen), more, rows, scale),)


def _with_bars(rows: Sequence[GridRow], overview: Overview) -> list[GridRow]:
    """A bar for each score, where scores are similarities: a distance or a rank is no length."""
    scores = [row.score for row in overview.rows]
    known = [score for score in scores if score is not None]
    is_length = len(known) == len(scores) and min(known) >= 0 and known == sorted(known, reverse=True)
    return [
        replace(row, bar=score / known[0]) if is_length and score and known[0] else row
        for row, score in zip(rows, scores, strict=True)
    ]


def _parted(rows: Sequence[GridRow], start: int | None) -> tuple[GridRow, ...]:
    """With the line where background begins."""
    said = "background begins here: no better than chance"
    return tuple(replace(row, above=said) if at == start else row for at, row in enumerate(rows))


def _row(row: Row, chosen: tuple[int, ...], has_others: bool) -> GridRow:
    score = "" if row.score is None else f"{row.score:.4f}"
    if not row.meetings:
        return GridRow(row.rank, row.id, score, ())
    others = sum(one.carried for i, one in enumerate(row.meetings) if i not in chosen)
    more = () if row.unattributed is None else (*([number(others)] if has_others else []), number(row.unattributed))
    return GridRow(row.rank, row.id, score, tuple(_cell(row.meetings[i], row.rank) for i in chosen), more)


def _cell(meeting: Meeting, rank: int) -> Cell:
    note = "" if meeting.rank is None or meeting.rank == rank else f"without it: rank {meeting.rank:,}"
    return Cell(one_line(meeting.word, _WORD) if meeting.word else _UNMET, meeting.carried, note, meeting.is_known)
