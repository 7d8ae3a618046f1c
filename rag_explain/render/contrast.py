"""A contrast in a terminal, with rich, and as plain text."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from rag_explain.render import view
from rag_explain.results.contrast import Contrast, Difference


def contrast_view(contrast: Contrast, *, top: int = 8) -> RenderableType:
    """Both documents with their scores, the query's words, and the pairs that made the difference."""
    texts = Table.grid(padding=(0, 2))
    texts.add_column(style="dim", width=8)
    texts.add_column(justify="right", no_wrap=True)
    texts.add_column(overflow="fold")
    texts.add_row("query", "", view.visible(contrast.query or ""))
    for name, explanation in (("wanted", contrast.wanted), ("got", contrast.got)):
        texts.add_row(name, Text(f"{explanation.score:.4f}", style="bold"), view.visible(explanation.document or ""))
    carried = contrast.difference - contrast.unattributed
    sums = Text(
        f"difference {view.number(contrast.difference)} = {view.number(carried)} words "
        f"{view.number(contrast.unattributed)} unattributed"
    )
    notices = [
        Text(f"! {name}: {notice}", style="bold")
        for name, explanation in (("wanted", contrast.wanted), ("got", contrast.got))
        for notice in view.notices(explanation)
    ]
    return Group(
        texts,
        Text(),
        sums,
        Text(view.source(contrast.got), style="dim"),
        *notices,
        Text(),
        _table(contrast.query_words()[:top], "word of the query"),
        Text(),
        _table(contrast.pairs(top), "query · document"),
    )


def plain_text(contrast: Contrast, *, top: int = 8, width: int = 100) -> str:
    """The same without any colour code."""
    console = Console(width=width, color_system=None, force_terminal=False, highlight=False, legacy_windows=False)
    with console.capture() as captured:
        console.print(contrast_view(contrast, top=top))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _table(items: Sequence[Difference], title: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column(title, overflow="fold", max_width=48)
    for name in ("wanted", "got", "got - wanted"):
        table.add_column(name, justify="right", no_wrap=True)
    for item in items:
        label = item.query if item.document is None else f"{item.query} · {item.document}"
        table.add_row(Text(view.visible(label)), *map(view.number, (item.wanted, item.got, item.value)))
    return table
