"""One explanation: both texts with their words tinted, the figures, and the strongest pairs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rag_explain.render import sentences
from rag_explain.render.blocks import Block, Column, Figures, Labelled, Legend, Line, Section, Table, Texts, View, Words
from rag_explain.render.pieces import in_unit, pieces
from rag_explain.results.explanation import Explanation
from rag_explain.texts.tokens import Role, Unit

# Characters of a label, which can be a sentence, after which it is cut.
_LABEL = 120


def explanation_view(explanation: Explanation, *, top: int = 10, by: Unit | None = None) -> View:
    """The explanation by words, or by the unit asked for, with its `top` strongest pairs."""
    shown = in_unit(explanation, by)
    scale = strongest(shown.document_saliency())
    query = words(shown, "query", strongest(shown.query_saliency()))
    return (
        Section((Texts((Labelled("query", query), Labelled("document", words(shown, "document", scale)))),)),
        Section(
            (
                *figures(shown),
                Line(sentences.source(shown), "muted"),
                key(shown),
                legend(scale, shown.method),
                *warnings(shown),
            )
        ),
        Section(pairs(shown, top)),
    )


def words(shown: Explanation, side: Role, scale: float) -> Words:
    """The text of one side, tinted by what each token carries."""
    values = (shown.query_saliency() if side == "query" else shown.document_saliency()).tolist()
    notes = tuple(sentences.met(shown, side, index) for index in range(len(values)))
    return Words(pieces(shown, side), tuple(values), scale, notes)


def figures(shown: Explanation) -> tuple[Block, ...]:
    """The score, what makes it up, and whether it adds up."""
    return sums(shown), Line(sentences.balance(shown))


def sums(shown: Explanation) -> Figures:
    """The score as the sum of what pairs carry and what no pair carries."""
    if not shown.additive:
        return Figures("score", f"{shown.score:.4f}")
    carried = sentences.number(shown.score - shown.unattributed), f"{shown.unit}s"
    rest = sentences.number(shown.unattributed), sentences.no_word(shown.unit)
    return Figures("score", f"{shown.score:.4f}", (carried, rest))


def key(shown: Explanation, more: str = "") -> Line:
    """What the last of the figures means."""
    return Line(f"{more}{sentences.no_word(shown.unit)}: what cannot be attributed to {shown.unit}s", "muted")


def legend(scale: float, method: str) -> Legend:
    """What the tints of document words stand for."""
    return Legend(scale, f"score units: the tints of document words, {method}")


def warnings(shown: Explanation, about: str = "") -> tuple[Line, ...]:
    """What a reader must know before trusting the numbers."""
    return tuple(Line(f"{about}{notice}", "warning") for notice in sentences.notices(shown))


def pairs(shown: Explanation, top: int, scale: float | None = None, brief: int | None = None) -> tuple[Block, ...]:
    """The strongest pairs; given one scale, the bars of several tables compare."""
    found = shown.top_pairs(max(top, brief or 0))
    if not found or brief == 0:
        return ()
    columns = (
        Column("query", width=24),
        Column("document", width=44),
        Column("score units", is_number=True),
        Column("share of Σ|pairs|", is_number=True),
    )
    rows = tuple(
        (
            sentences.name(pair.query, shown.query_tokens.index(pair.query)),
            sentences.name(pair.document, shown.document_tokens.index(pair.document), _LABEL),
            sentences.number(pair.value),
            f"{pair.share:.1%}",
        )
        for pair in found
    )
    bars = tuple(pair.value for pair in found)
    longest = abs(bars[0]) if scale is None else scale
    return (Table(columns, rows, "strongest pairs", bars, longest, brief),)


def strongest(values: NDArray[np.float32]) -> float:
    """The largest |value|; 0 where there is none."""
    return float(np.abs(values).max(initial=0.0))
