"""Explanations in a terminal, with rich; readable without colour, and as plain text.

The background of a terminal is not known, so words are tinted in steps that read on light and dark alike:
coloured, coloured and bold, reversed. What carries against the score is also underlined.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rag_explain.render import view
from rag_explain.results.explanation import Explanation, Pair
from rag_explain.results.hits import Hit
from rag_explain.texts.tokens import Role, Unit

# After Okabe and Ito's blue and vermilion, which every kind of colour blindness tells apart.
_FOR, _AGAINST = "#2f8fd0", "#d9660a"
# Darker, so that white on them is legible.
_FOR_GROUND, _AGAINST_GROUND = "#1a6aa8", "#ad4c08"
# Share of the strongest value from which a word gets the first, second and third step.
_STEPS = (0.15, 0.4, 0.7)
_BAR = 16


def explanation_view(explanation: Explanation, *, top: int = 10, by: Unit | None = None) -> RenderableType:
    """The texts with their words tinted, the figures, and the `top` strongest pairs."""
    shown = view.at(explanation, by)
    return Group(
        _labelled("query", _tinted(shown, "query", _strongest(shown.query_saliency()))),
        _labelled("document", _tinted(shown, "document", _strongest(shown.document_saliency()))),
        Text(),
        _sums(shown),
        Text(view.source(shown), style="dim"),
        _key(shown),
        *_warnings(shown),
        Text(),
        *_pairs(shown, top),
    )


def items_view(items: Sequence[Explanation | Hit]) -> RenderableType:
    """One explanation in full, or hits one below the other."""
    if len(items) == 1 and isinstance(items[0], Explanation):
        return explanation_view(items[0])
    return hits_view([item for item in items if isinstance(item, Hit)])


def hits_view(hits: Iterable[Hit], *, top: int = 3, by: Unit | None = None) -> RenderableType:
    """Each hit with its words tinted on one scale for all, and its `top` strongest pairs."""
    hits = list(hits)
    if not hits:
        return Text("no hits")
    shown = [None if hit.explanation is None else view.at(hit.explanation, by) for hit in hits]
    scale = max((_strongest(one.document_saliency()) for one in shown if one is not None), default=0.0)
    longest = max((_strongest(one.pairs) for one in shown if one is not None), default=0.0)
    explained = [one for one in shown if one is not None]
    parts: list[RenderableType] = []
    if explained:
        query = "".join(piece.text for piece in view.pieces(explained[0], "query"))
        parts += [_labelled("query", Text(query)), Text()]
    for hit, explanation in zip(hits, shown, strict=True):
        head = Text.assemble((f"{hit.rank:>2}  ", "dim"), (view.visible(hit.id), "bold"), "  ", view.facts(hit))
        parts.append(head)
        body: list[RenderableType] = []
        if explanation is None:
            body += [Text(view.visible(hit.text or "")), Text(view.missing(hit), style="italic")]
        else:
            body += [
                _tinted(explanation, "document", scale),
                _sums(explanation),
                *_warnings(explanation),
                *_pairs(explanation, top, longest),
            ]
        parts.append(Padding(Group(*body), (0, 0, 1, 4)))
    parts += [Text(source, style="dim") for source in dict.fromkeys(view.source(one) for one in explained)]
    if explained:
        parts.append(_key(explained[0], "pairs in score units, with their share of Σ|pairs|; "))
    return Group(*parts)


def plain_text(explanation: Explanation, *, top: int = 10, by: Unit | None = None, width: int = 100) -> str:
    """The same without any colour code, for `print` and files."""
    console = Console(width=width, color_system=None, force_terminal=False, highlight=False, legacy_windows=False)
    with console.capture() as captured:
        console.print(explanation_view(explanation, top=top, by=by))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _labelled(label: str, text: Text) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", width=8)
    table.add_column(overflow="fold")
    table.add_row(label, text)
    return table


def _tinted(explanation: Explanation, side: Role, scale: float) -> Text:
    values = explanation.query_saliency() if side == "query" else explanation.document_saliency()
    text = Text(overflow="fold")
    for piece in view.pieces(explanation, side):
        if not piece.seen:
            text.append(" [not read by the encoder: ", style="dim italic")
            text.append(piece.text.strip(), style="dim italic")
            text.append("]", style="dim italic")
        elif piece.token is None:
            text.append(piece.text)
        else:
            text.append(piece.text, style=_style(float(values[piece.token]), scale))
    return text


def _style(value: float, scale: float) -> str:
    step = sum(abs(value) >= limit * scale for limit in _STEPS) if scale else 0
    if not step:
        return ""
    colour, ground, line = (_FOR, _FOR_GROUND, "") if value > 0 else (_AGAINST, _AGAINST_GROUND, " underline")
    return (f"{colour}{line}", f"bold {colour}{line}", f"bold #ffffff on {ground}{line}")[step - 1]


def _sums(explanation: Explanation) -> Text:
    """The score, what makes it up, and whether it adds up."""
    text = Text.assemble("score ", (f"{explanation.score:.4f}", "bold"))
    if explanation.additive:
        text.append(f" = {view.number(explanation.score - explanation.unattributed)} {explanation.unit}s")
        text.append(f" {view.number(explanation.unattributed)} unattributed")
    return text.append(f"\n{view.balance(explanation)}")


def _key(explanation: Explanation, more: str = "") -> Text:
    return Text(f"{more}unattributed: what cannot be attributed to {explanation.unit}s", style="dim")


def _warnings(explanation: Explanation) -> list[RenderableType]:
    return [Text(f"! {notice}", style="bold") for notice in view.notices(explanation)]


def _pairs(explanation: Explanation, top: int, scale: float | None = None) -> list[RenderableType]:
    """The strongest pairs; bars of several tables compare, without headings, when they are given one scale."""
    pairs = explanation.top_pairs(top)
    if not pairs:
        return []
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False, show_header=scale is None)
    table.add_column("query", overflow="fold", max_width=24)
    table.add_column("document", overflow="fold", max_width=44)
    table.add_column("score units", justify="right", no_wrap=True)
    table.add_column("share of Σ|pairs|", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True, min_width=_BAR)
    scale = abs(pairs[0].value) if scale is None else scale
    for pair in pairs:
        colour = _FOR if pair.value > 0 else _AGAINST
        table.add_row(*_labels(explanation, pair), view.number(pair.value), f"{pair.share:.1%}",
                      Text(_bar(pair.value, scale), style=colour))  # fmt: skip
    return [table]


def _labels(explanation: Explanation, pair: Pair) -> tuple[Text, Text]:
    left = view.name(pair.query, explanation.query_tokens.index(pair.query))
    right = view.name(pair.document, explanation.document_tokens.index(pair.document))
    return Text(left), Text(_shortened(right))


def _shortened(label: str, limit: int = 120) -> str:
    return label if len(label) <= limit else f"{label[: limit - 1]}…"


def _bar(value: float, scale: float) -> str:
    """A bar whose length is |value|; against the score it is broken, so that it differs without colour."""
    length = round(_BAR * abs(value) / scale) if scale else 0
    return ("━" if value > 0 else "╍") * length


def _strongest(values: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> float:
    return float(np.abs(values).max(initial=0.0))
