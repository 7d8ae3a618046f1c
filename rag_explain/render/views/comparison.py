"""A comparison of methods: the methods below one another, then the agreement of each with each."""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rag_explain.render import sentences
from rag_explain.render.blocks import Block, Column, Fold, Line, Piece, Section, Table, Texts, View, Words
from rag_explain.render.sentences import one_line
from rag_explain.render.views.explanation import cut, strongest, unread, words
from rag_explain.results.comparison import TOP, Compared, Comparison
from rag_explain.results.explanation import Explanation
from rag_explain.results.notices import OTHER_SCORE

_TOP = 3
_PARTS, _WIDTH = 8, 40
_SHOWN = 240  # characters of the document


def comparison_view(comparison: Comparison) -> View:
    """What each method says and costs, and how far they agree."""
    score, *numbers = (Column(title, is_number=True) for title in ("score", "gap", "error", "ms", "real"))
    columns = Column("method"), score, Column("unit", width=24), *numbers, Column("strongest pairs of words")
    read = dict.fromkeys(line for row in comparison.rows if row.explanation for line in unread(row.explanation))
    table = Table(columns, tuple(map(_cells, comparison.rows, comparison.real)))
    methods = Section((*read, table, *_real(comparison)))
    texts = tuple(_texts(comparison))
    if len(comparison.rows) < 2:
        return (methods, *texts)
    correlation = Line("agreement: rank correlation of the pairs of words", "muted")
    overlap = Line(f"overlap: share of pairs in common among the {TOP} strongest of each", "muted")
    return (
        methods,
        *texts,
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


def _texts(comparison: Comparison) -> Iterator[Section]:
    """The document under each method, on a scale of its own: methods share no unit."""
    shown = [(row.method, row.explanation.by_word()) for row in comparison.rows if row.explanation is not None]
    if shown:
        query = Words((Piece(shown[0][1].query or ""),), label="query")
        tinted = (
            replace(cut(words(one, "document", strongest(one.document_saliency())), _SHOWN), label=method)
            for method, one in shown
        )
        yield Section((Fold("the document under each method", (Texts((query, *tinted)),), is_open=True),))


def _unit(explanation: Explanation) -> str:
    """What the score and its parts are counted in: no two methods are to be compared by their numbers alone."""
    if not explanation.additive:
        return sentences.units(explanation)
    is_other = any(notice.code == OTHER_SCORE for notice in explanation.notices)
    return f"{explanation.measure}, not this encoder's score" if is_other else explanation.measure


def _cells(row: Compared, real: float) -> tuple[str, ...]:
    explanation = row.explanation
    if explanation is None:
        return row.method, "", "", "", "", "", "", f"refused: {row.reason or 'no reason given'}"
    best = explanation.by_word().top_pairs(_TOP)
    pairs = ", ".join(f"{one_line(pair.query.label)} ~ {one_line(pair.document.label)}" for pair in best)
    gap = "not additive" if explanation.gap is None else f"{explanation.gap:+.0e}"
    error = "" if row.error is None else f"{row.error:.0e}"
    agrees = "" if math.isnan(real) else f"{real:+.2f}"
    score = f"{explanation.score:.4f}"
    return row.method, score, _unit(explanation), gap, error, f"{row.seconds * 1000:.0f}", agrees, pairs


def _each_with_each(comparison: Comparison, measured: NDArray[np.float64]) -> Table:
    columns = Column(""), *(Column(row.method, is_number=True) for row in comparison.rows)
    rows = (
        (row.method, *("" if math.isnan(value) else f"{value:.2f}" for value in values))
        for row, values in zip(comparison.rows, measured, strict=True)
    )
    return Table(columns, tuple(rows))
