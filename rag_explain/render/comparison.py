"""A comparison of methods in a terminal."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from rag_explain.render import view

if TYPE_CHECKING:
    from rag_explain.results.comparison import Compared, Comparison

_TOP = 3


def comparison_view(comparison: Comparison) -> RenderableType:
    """The methods below one another, then the agreement of each with each."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("method", overflow="fold")
    for heading in ("score", "gap", "error", "ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("strongest pairs of words", overflow="fold")
    for row in comparison.rows:
        table.add_row(*_cells(row))
    parts: list[RenderableType] = [table]
    if len(comparison.rows) > 1:
        parts += [
            Text(),
            Text("agreement: rank correlation of the pairs of words", style="dim"),
            _agreement(comparison),
        ]
    return Group(*parts)


def comparison_text(comparison: Comparison, width: int = 120) -> str:
    """The same without any colour code."""
    console = Console(width=width, color_system=None, force_terminal=False, highlight=False, legacy_windows=False)
    with console.capture() as captured:
        console.print(comparison_view(comparison))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _cells(row: Compared) -> tuple[str | Text, ...]:
    explanation = row.explanation
    if explanation is None:
        reason = Text(view.visible(row.reason or "refused"), style="italic")
        return row.method, "", "", "", "", reason
    words = explanation.by_word()
    pairs = ", ".join(
        f"{view.visible(pair.query.label)} ~ {view.visible(pair.document.label)}" for pair in words.top_pairs(_TOP)
    )
    gap = "not additive" if explanation.gap is None else f"{explanation.gap:+.0e}"
    error = "" if row.error is None else f"{row.error:.0e}"
    return row.method, f"{explanation.score:.4f}", gap, error, f"{row.seconds * 1000:.0f}", pairs


def _agreement(comparison: Comparison) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("")
    for row in comparison.rows:
        table.add_column(row.method, justify="right", overflow="fold")
    for row, values in zip(comparison.rows, comparison.agreement, strict=True):
        table.add_row(row.method, *("" if math.isnan(value) else f"{value:.2f}" for value in values))
    return table
