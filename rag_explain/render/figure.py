"""A matplotlib figure that a notebook shows by itself: those made without pyplot are a line of text there."""

from io import BytesIO
from typing import Any

from matplotlib.figure import Figure

# Dots of a figure for one of a screen: its figures are made for paper.
_DOTS = 2


class NotebookFigure(Figure):
    """What `explanation.plot()` returns."""

    def _repr_png_(self) -> tuple[bytes, dict[str, Any]]:
        with BytesIO() as file:
            self.savefig(file, format="png", dpi=self.dpi)
            return file.getvalue(), {"width": round(self.get_figwidth() * self.dpi / _DOTS)}
