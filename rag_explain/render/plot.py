"""Figures of an explanation for papers and slides, with matplotlib: a heatmap, or the words joined by lines.

Figures are made without pyplot, so the host's backend, style and open figures stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rag_explain.errors import InvalidInput, MissingExtra
from rag_explain.render import view
from rag_explain.results.explanation import Explanation
from rag_explain.texts.tokens import Token

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FOR, _AGAINST, _INK, _MUTED = "#0072b2", "#d55e00", "#1b1d21", "#5b616b"
_WIDTH = 6.75  # inches: the width of a two-column paper
# Characters of a label after which it is cut.
_WORD, _SENTENCE = 24, 56
# More columns than this cannot be told apart at paper width: sentences take the place of words.
_COLUMNS = 48
# How many pairs are joined by lines, and from how many words on those without a line are left out.
_LINES, _ROWS = 20, 16


def plot(
    explanation: Explanation,
    kind: Literal["heatmap", "connections"] = "heatmap",
    path: str | Path | None = None,
) -> Figure:
    """A figure of the explanation by words, or by sentences where there are too many words; saved to `path` if given.

    `heatmap` shows every pair; `connections` joins the words of the strongest pairs by lines.
    """
    if kind not in ("heatmap", "connections"):
        raise InvalidInput(f"there is no figure {kind!r}: use 'heatmap' or 'connections'")
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("matplotlib", "plot") from None
    shown = view.at(explanation)
    if shown.unit == "word" and len(shown.document_tokens) > _COLUMNS:
        shown = shown.by_sentence()
    if not shown.pairs.size:
        raise InvalidInput("there is no pair to draw: a text without words was explained")
    with mpl.rc_context({"font.family": _fonts(shown), "svg.fonttype": "path"}):
        figure = Figure(dpi=200)
        (_heatmap if kind == "heatmap" else _connections)(figure, shown)
        if path is not None:
            figure.savefig(path)
    return figure


def _heatmap(figure: Figure, shown: Explanation) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    # Sentences are long: they stand beside the rows, where they can be read.
    tall = shown.unit == "sentence"
    values = shown.pairs.T if tall else shown.pairs
    side, top = (shown.document_tokens, shown.query_tokens) if tall else (shown.query_tokens, shown.document_tokens)
    rows = [_label(token, k, _SENTENCE if tall else _WORD) for k, token in enumerate(side)]
    columns = [_label(token, k, _WORD) for k, token in enumerate(top)]
    left = _inches(rows, 7.0)
    width = min(0.28, (_WIDTH - left - 0.75) / len(columns))
    size = max(4.0, min(7.0, width * 50))
    height = 0.19 if tall else width
    box = _Box(left, _inches(columns, size), width * len(columns), height * len(rows))
    axes = box.axes(figure)
    colours = LinearSegmentedColormap.from_list("rag_explain", [_AGAINST, "#ffffff", _FOR])
    reach = float(np.abs(values).max()) or 1.0
    image = axes.imshow(values, cmap=colours, vmin=-reach, vmax=reach, aspect="auto")
    axes.set_xticks(range(len(columns)), columns, rotation=90, fontsize=size, parse_math=False)
    axes.set_yticks(range(len(rows)), rows, fontsize=7.0 if tall else size, parse_math=False)
    axes.xaxis.tick_top()
    axes.set_xticks(np.arange(-0.5, len(columns)), minor=True)
    axes.set_yticks(np.arange(-0.5, len(rows)), minor=True)
    axes.grid(which="minor", color="#e6e6e2", linewidth=0.5)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(image, cax=box.beside(figure))
    bar.ax.tick_params(labelsize=6, length=2)
    bar.ax.locator_params(nbins=5)
    bar.outline.set_visible(False)
    bar.ax.set_title("score units", fontsize=6, loc="left")
    _caption(axes, shown)


def _connections(figure: Figure, shown: Explanation) -> None:
    tall = shown.unit == "sentence"
    size_of = np.abs(shown.pairs, dtype=np.float64)
    order = np.argsort(-size_of, axis=None, kind="stable")[:_LINES]
    cells = [divmod(int(flat), size_of.shape[1]) for flat in order]
    left = _places(range(len(shown.query_tokens)), {i for i, _ in cells})
    right = _places(range(len(shown.document_tokens)), {j for _, j in cells})
    rows = max(len(left), len(right))
    box = _Box(1.3, 0.1, 1.3 if tall else 3.2, 0.17 * rows)
    axes = box.axes(figure)
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    axes.set_ylim(rows - 0.5, -0.5)
    at: list[dict[int, float]] = []
    for side, places, tokens in ((0, left, shown.query_tokens), (1, right, shown.document_tokens)):
        # The shorter side stands around the middle of the longer one.
        heights = {index: (rows - len(places)) / 2 + place for place, index in enumerate(places)}
        at.append({index: height for index, height in heights.items() if index >= 0})
        for index, height in heights.items():
            label = "⋯" if index < 0 else _label(tokens[index], index, 74 if tall and side else _WORD)
            axes.text(side + (0.02 if side else -0.02), height, label, ha="left" if side else "right", va="center",
                      fontsize=7, color=_INK if index >= 0 else _MUTED, parse_math=False)  # fmt: skip
    reach = float(size_of.max()) or 1.0
    bend = np.linspace(0.0, 1.0, 40)
    ease = bend * bend * (3 - 2 * bend)
    for i, j in reversed(cells):  # the strongest on top
        strength = float(size_of[i, j]) / reach
        against = shown.pairs[i, j] < 0
        axes.plot(
            bend,
            at[0][i] + (at[1][j] - at[0][i]) * ease,
            color=_AGAINST if against else _FOR,
            linestyle=(0, (2, 1.5)) if against else "-",
            linewidth=0.3 + 3.2 * strength,
            alpha=0.25 + 0.65 * strength,
            clip_on=False,
        )
    _caption(axes, shown, f"the {len(cells)} strongest pairs, the widest {reach:.4f}; dashed: against the score")


@dataclass(frozen=True)
class _Box:
    """Where the drawing stands in the figure, in inches from its upper left corner; the caption is below."""

    left: float
    top: float
    width: float
    height: float

    def axes(self, figure: Figure) -> Axes:
        figure.set_size_inches(_WIDTH, self._total)
        return figure.add_axes(self._share(self.left, self.width))

    def beside(self, figure: Figure) -> Axes:
        return figure.add_axes(self._share(self.left + self.width + 0.15, 0.11))

    @property
    def _total(self) -> float:
        return self.top + self.height + 0.62

    def _share(self, left: float, width: float) -> tuple[float, float, float, float]:
        bottom = 0.62 / self._total
        return left / _WIDTH, bottom, width / _WIDTH, self.height / self._total


def _places(tokens: range, met: set[int]) -> list[int]:
    """The tokens in reading order; of a long text those that are met, with a number below 0 where some are left out."""
    if len(tokens) <= _ROWS:
        return list(tokens)
    places: list[int] = []
    for index in tokens:
        if index in met:
            places.append(index)
        elif not places or places[-1] >= 0:
            places.append(-index - 1)
    return places


def _inches(labels: list[str], size: float) -> float:
    """Room for the longest label: letters are a little over half as wide as they are high, full-width ones as wide."""
    widest = max(sum(1.0 if ord(c) > 0x2E7F else 0.6 for c in label) for label in labels)
    return float(widest * size / 72 + 0.12)


def _label(token: Token, index: int, limit: int) -> str:
    text = " ".join(view.name(token, index).split())
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def _caption(axes: Axes, shown: Explanation, more: str = "") -> None:
    sums = f"score {shown.score:.4f}"
    if shown.additive:
        sums += f" = {view.number(shown.score - shown.unattributed)} {shown.unit}s"
        sums += f" {view.number(shown.unattributed)} not attributable"
    lines = [f"{sums}; {view.balance(shown)}", view.source(shown), *([more] if more else []), *view.notices(shown)]
    text = "\n".join(line if len(line) <= 120 else f"{line[:119]}…" for line in lines[:4])
    figure = axes.figure
    figure.text(0.01, 0.02, text, va="bottom", fontsize=6, color=_MUTED, parse_math=False)


def _fonts(shown: Explanation) -> list[str]:
    """matplotlib's default font, then installed ones that know the scripts it does not."""
    from matplotlib import font_manager

    labels = "".join(token.text for token in (*shown.query_tokens, *shown.document_tokens))
    fonts = ["DejaVu Sans"]
    if any(ord(character) > 0x2E7F for character in labels):
        installed = {font.name for font in font_manager.fontManager.ttflist}
        wanted: list[Any] = ["Noto Sans CJK JP", "Noto Sans CJK SC", "Noto Sans Thai", "Noto Emoji", "Arial Unicode MS"]
        fonts += [name for name in wanted if name in installed]
    return fonts
