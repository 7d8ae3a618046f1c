"""One explanation: both texts with their words tinted, the figures, and the strongest pairs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rag_explain.render import sentences
from rag_explain.render.blocks import Block, Column, Figures, Legend, Line, Section, Table, Texts, View, Words
from rag_explain.render.pieces import in_unit, pieces
from rag_explain.results.explanation import Explanation
from rag_explain.texts.tokens import Role, Unit

# Characters of a label, which can be a sentence, after which it is cut.
_LABEL = 120
_COLUMNS = (
    Column("query", width=24),
    Column("document", width=44),
    Column("score units", is_number=True),
    Column("share of Σ|pairs|", is_number=True),
)


def explanation_view(explanation: Explanation, *, top: int = 10, by: Unit | None = None) -> View:
    """The explanation by words, or by the unit asked for, with its `top` strongest pairs."""
    shown = in_unit(explanation, by)
    scale = strongest(shown.document_saliency())
    query = words(shown, "query", strongest(shown.query_saliency()))
    texts = Texts((query, words(shown, "document", scale)))
    about = Line(sentences.source(shown), "muted"), key(shown), legend(scale, shown.method)
    return Section((texts,)), Section((*figures(shown), *about, *warnings(shown))), Section(pairs(shown, top))


def words(shown: Explanation, side: Role, scale: float) -> Words:
    """The text of one side, tinted by what each token carries."""
    values = (shown.query_saliency() if side == "query" else shown.document_saliency()).tolist()
    notes = tuple(sentences.met(shown, side, index) for index in range(len(values)))
    return Words(pieces(shown, side), tuple(values), scale, notes, label=side)


def figures(shown: Explanation) -> tuple[Figures, Line]:
    """The score, what makes it up, and whether it adds up."""
    parts = sentences.parts(shown.score, shown.unattributed, shown.unit) if shown.additive else ""
    return Figures("score", f"{shown.score:.4f}", parts), Line(sentences.balance(shown))


def key(shown: Explanation, more: str = "") -> Line:
    """What the last of the figures means."""
    return Line(f"{more}no {shown.unit}: what cannot be attributed to {shown.unit}s", "muted")


def legend(scale: float, method: str) -> Legend:
    """What the tints of document words stand for."""
    return Legend(scale, f"score units: the tints of document words, {method}")


def warnings(shown: Explanation, about: str = "") -> tuple[Line, ...]:
    """What a reader must know before trusting the numbers."""
    return tuple(Line(f"{about}{notice}", "warning") for notice in sentences.notices(shown))


def pairs(shown: Explanation, top: int, scale: float | None = None, brief: int | None = None) -> tuple[Block, ...]:
    """The strongest pairs; given one scale, the bars of several tables compare."""
    count = max(top, brief or 0)
    found = [(*cell, pair) for cell, pair in zip(shown.top_cells(count), shown.top_pairs(count), strict=True)]
    if not found or brief == 0:
        return ()
    rows = tuple(
        (
            sentences.name(pair.query, i),
            sentences.name(pair.document, j, _LABEL),
            sentences.number(pair.value),
            f"{pair.share:.1%}",
        )
        for i, j, pair in found
    )
    bars = tuple(pair.value for *_, pair in found)
    return (Table(_COLUMNS, rows, "strongest pairs", bars, abs(bars[0]) if scale is None else scale, brief),)


def strongest(values: NDArray[np.float32]) -> float:
    """The largest |value|; 0 where there is none."""
    return float(np.abs(values).max(initial=0.0))
