"""Figures of an explanation for papers and slides, with matplotlib: a heatmap, or the words joined by lines.

Figures are made without pyplot, so the host's backend, style and open figures stay as they are.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from rag_explain.errors import InvalidInput, import_extra
from rag_explain.render import sentences
from rag_explain.render.palette import INK, LIGHT, MUTED
from rag_explain.render.views.explanation import figures as figures_of
from rag_explain.render.views.explanation import in_unit
from rag_explain.results.explanation import Explanation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Inches: the width of a two-column paper, the room for the caption, and what another line of it takes.
_WIDTH, _CAPTION, _LINE = 6.75, 0.62, 0.1
# Characters of a label after which it is cut.
_WORD, _SENTENCE, _LONG_SENTENCE = 24, 56, 74
# More columns than this cannot be told apart at paper width: sentences take the place of words.
_COLUMNS = 48
# How many pairs are joined by lines, and from how many words on those without a line are left out.
_LINES, _ROWS = 20, 16
# Characters after this one are as wide as they are high, and not in matplotlib's own font.
_WIDE = 0x2E7F

Kind = Literal["heatmap", "connections"]


def plot(explanation: Explanation, kind: Kind = "heatmap", path: str | Path | None = None) -> Figure:
    """A figure of the explanation by words, or by sentences where there are too many words; saved to `path` if given.

    `heatmap` shows every pair; `connections` joins the words of the strongest pairs by lines.
    """
    if kind not in ("heatmap", "connections"):
        raise InvalidInput(f"there is no figure {kind!r}: use 'heatmap' or 'connections'")
    mpl = import_extra("matplotlib", "matplotlib", "plot")
    from rag_explain.render.figure import NotebookFigure

    shown = in_unit(explanation)
    if shown.unit == "word" and shown.can_be_grouped and len(shown.document_tokens) > _COLUMNS:
        shown = shown.by_sentence()
    if not shown.pairs.size:
        raise InvalidInput("there is no pair to draw: a text without words was explained")
    with mpl.rc_context({"font.family": _fonts(shown), "svg.fonttype": "path"}):
        figure = NotebookFigure(dpi=200)
        (_heatmap if kind == "heatmap" else _connections)(figure, shown)
        if path is not None:
            figure.savefig(path)
    return figure


def _heatmap(figure: Figure, shown: Explanation) -> None:
    # Sentences are long: they are beside the rows, where they can be read.
    is_tall = shown.unit == "sentence"
    values = shown.pairs.T if is_tall else shown.pairs
    side, top = (shown.document_tokens, shown.query_tokens) if is_tall else (shown.query_tokens, shown.document_tokens)
    rows = sentences.names(side, _SENTENCE if is_tall else _WORD)
    columns = sentences.names(top, _WORD)
    left = _inches(rows, 7.0)
    width = min(0.28, (_WIDTH - left - 0.75) / len(columns))
    size = max(4.0, min(7.0, width * 50))
    height = 0.19 if is_tall else width
    axes = _axes(figure, shown, left, _inches(columns, size), width * len(columns), height * len(rows))
    axes.set_xticks(range(len(columns)), columns, rotation=90, fontsize=size, parse_math=False)
    axes.set_yticks(range(len(rows)), rows, fontsize=7.0 if is_tall else size, parse_math=False)
    axes.xaxis.tick_top()
    _cells(axes, values)
    _caption(axes, shown)


def _cells(axes: Axes, values: NDArray[np.float32]) -> None:
    """The coloured cells with lines between them, and the scale of the colours beside them."""
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("rag_explain", [LIGHT.hex(-1), "#ffffff", LIGHT.hex(1)])
    reach = float(np.abs(values).max()) or 1.0
    image = axes.imshow(values, cmap=colours, vmin=-reach, vmax=reach, aspect="auto")
    axes.set_xticks(np.arange(-0.5, values.shape[1]), minor=True)
    axes.set_yticks(np.arange(-0.5, values.shape[0]), minor=True)
    axes.grid(which="minor", color="#e6e6e2", linewidth=0.5)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)
    place = axes.get_position()
    beside = axes.figure.add_axes((place.x1 + 0.15 / _WIDTH, place.y0, 0.11 / _WIDTH, place.height))
    bar = axes.figure.colorbar(image, cax=beside)
    bar.outline.set_visible(False)
    beside.tick_params(labelsize=6, length=2)
    beside.locator_params(nbins=5)
    beside.set_title("score units", fontsize=6, loc="left")


def _connections(figure: Figure, shown: Explanation) -> None:
    is_tall = shown.unit == "sentence"
    cells = shown.top_cells(_LINES)
    left = _places(len(shown.query_tokens), {i for i, _ in cells})
    right = _places(len(shown.document_tokens), {j for _, j in cells})
    rows = max(len(left), len(right))
    axes = _axes(figure, shown, 1.3, 0.1, 1.3 if is_tall else 3.2, 0.17 * rows)
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    axes.set_ylim(rows - 0.5, -0.5)
    labels = sentences.names(shown.document_tokens, _LONG_SENTENCE if is_tall else _WORD)
    starts = _write_labels(axes, left, sentences.names(shown.query_tokens, _WORD), rows)
    ends = _write_labels(axes, right, labels, rows, is_right=True)
    reach = float(np.abs(shown.pairs).max()) or 1.0
    for i, j in reversed(cells):  # the strongest on top
        _join(axes, starts[i], ends[j], float(shown.pairs[i, j]) / reach)
    _caption(axes, shown, f"the {len(cells)} strongest pairs, the widest {reach:.4f}; dashed: against the score")


def _places(count: int, met: set[int]) -> list[int | None]:
    """The tokens of one side in reading order; of a long text those that are met, with None where some are left out."""
    kept = (index if count <= _ROWS or index in met else None for index in range(count))
    return [index for index, _ in groupby(kept)]  # one None for all that are left out in one place


def _write_labels(
    axes: Axes, places: list[int | None], labels: list[str], rows: int, *, is_right: bool = False
) -> dict[int, float]:
    """Write one side's labels below one another; the height at which each of them stands."""
    heights = {}
    x, align = (1.02, "left") if is_right else (-0.02, "right")
    for place, index in enumerate(places):
        height = (rows - len(places)) / 2 + place  # the shorter side stands around the middle of the longer one
        text, colour = ("⋯", MUTED) if index is None else (labels[index], INK)
        axes.text(x, height, text, ha=align, va="center", fontsize=7, color=colour, parse_math=False)
        if index is not None:
            heights[index] = height
    return heights


def _join(axes: Axes, start: float, end: float, strength: float) -> None:
    """A curve from one side to the other; `strength` is from -1 to 1, and dashed below 0."""
    x = np.linspace(0.0, 1.0, 40)
    y = start + (end - start) * x * x * (3 - 2 * x)
    line = axes.plot(x, y, color=LIGHT.hex(strength), linestyle=(0, (2, 1.5)) if strength < 0 else "-", clip_on=False)
    line[0].set(linewidth=0.3 + 3.2 * abs(strength), alpha=0.25 + 0.65 * abs(strength))


def _axes(figure: Figure, shown: Explanation, left: float, top: float, width: float, height: float) -> Axes:
    """Axes of this size at this place, in inches from the upper left corner; the caption has its room below."""
    caption = _CAPTION + _LINE * len(sentences.unread(shown))
    total = top + height + caption
    figure.set_size_inches(_WIDTH, total)
    return figure.add_axes((left / _WIDTH, caption / total, width / _WIDTH, height / total))


def _inches(labels: list[str], size: float) -> float:
    """Room for the longest label: letters are a little over half as wide as they are high, full-width ones as wide."""
    widest = max(sum(1.0 if ord(c) > _WIDE else 0.6 for c in label) for label in labels)
    return float(widest * size / 72 + 0.12)


def _caption(axes: Axes, shown: Explanation, more: str = "") -> None:
    figures, *about = figures_of(shown)
    first = "; ".join([f"{figures.name} {figures.total}{figures.parts}", *(line.text for line in about)])
    told = *filter(None, [more, sentences.trust(shown)]), *sentences.notices(shown)
    lines = [first, sentences.source(shown), *told]
    cut = [(line, 150) for line in sentences.unread(shown)] + [(line, 120) for line in lines[:4]]
    text = "\n".join(sentences.one_line(line, width) for line, width in cut)
    axes.figure.text(0.01, 0.02, text, va="bottom", fontsize=6, color=MUTED, parse_math=False)


def _fonts(shown: Explanation) -> list[str]:
    """matplotlib's default font, then installed ones that know the scripts it does not."""
    from matplotlib import font_manager

    fonts = ["DejaVu Sans"]
    if any(ord(c) > _WIDE for token in (*shown.query_tokens, *shown.document_tokens) for c in token.text):
        installed = {font.name for font in font_manager.fontManager.ttflist}
        wanted = ("Noto Sans CJK JP", "Noto Sans CJK SC", "Noto Sans Thai", "Noto Emoji", "Arial Unicode MS")
        fonts += [name for name in wanted if name in installed]
    return fonts
