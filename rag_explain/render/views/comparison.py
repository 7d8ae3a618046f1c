"""A comparison of methods: the methods below one another, then the agreement of each with each."""

import math

import numpy as np
from numpy.typing import NDArray

from rag_explain.render.blocks import Block, Column, Line, Section, Table, View
from rag_explain.render.sentences import one_line
from rag_explain.render.views.explanation import unread
from rag_explain.results.comparison import TOP, Compared, Comparison

_TOP = 3
_PARTS, _WIDTH = 8, 40


def comparison_view(comparison: Comparison) -> View:
    """What each method says and costs, and how far they agree."""
    numbers = (Column(title, is_number=True) for title in ("score", "gap", "error", "ms", "real"))
    columns = Column("method"), *numbers, Column("strongest pairs of words")
    read = dict.fromkeys(line for row in comparison.rows if row.explanation for line in unread(row.explanation))
    table = Table(columns, tuple(map(_cells, comparison.rows, comparison.real)))
    methods = Section((*read, table, *_real(comparison)))
    if len(comparison.rows) < 2:
        return (methods,)
    correlation = Line("agreement: rank correlation of the pairs of words", "muted")
    overlap = Line(f"overlap: share of pairs in common among the {TOP} strongest of each", "muted")
    return (
        methods,
        Section((correlation, _each_with_each(comparison, comparison.agreement))),
        Section((overlap, _each_with_each(comparison, comparison.overlap))),
    )


def _real(comparison: Comparison) -> tuple[Block, ...]:
    """The split of each method beside the real loss, for the parts without which the score loses most, or gains."""
    known = [(one.lost, one) for one in comparison.losses if one.lost is not None]
    if not known:
        return ()
    strongest = sorted(known, key=lambda pair: -abs(pair[0]))[:_PARTS]
    titles = ("real loss", *(row.method for row in comparison.rows))
    rows = (
        (
            one_line(loss.text, _WIDTH),
            loss.role,
            *("" if value is None else f"{value:+.4f}" for value in (lost, *loss.carried)),
        )
        for lost, loss in strongest
    )
    table = Table((Column("without"), Column("of"), *(Column(title, is_number=True) for title in titles)), tuple(rows))
    meaning = "real: rank correlation of what parts carry with what the score loses without them"
    meaning += f" ({len(known)} tried; the largest losses are below)"
    return Line(meaning, "muted"), table


def _cells(row: Compared, real: float) -> tuple[str, ...]:
    explanation = row.explanation
    if explanation is None:
        return row.method, "", "", "", "", "", f"refused: {row.reason or 'no reason given'}"
    best = explanation.by_word().top_pairs(_TOP)
    pairs = ", ".join(f"{one_line(pair.query.label)} ~ {one_line(pair.document.label)}" for pair in best)
    gap = "not additive" if explanation.gap is None else f"{explanation.gap:+.0e}"
    error = "" if row.error is None else f"{row.error:.0e}"
    agrees = "" if math.isnan(real) else f"{real:+.2f}"
    return row.method, f"{explanation.score:.4f}", gap, error, f"{row.seconds * 1000:.0f}", agrees, pairs


def _each_with_each(comparison: Comparison, measured: NDArray[np.float64]) -> Table:
    columns = Column(""), *(Column(row.method, is_number=True) for row in comparison.rows)
    rows = (
        (row.method, *("" if math.isnan(value) else f"{value:.2f}" for value in values))
        for row, values in zip(comparison.rows, measured, strict=True)
    )
    return Table(columns, tuple(rows))
