"""The colours of every medium: Okabe and Ito's blue and vermilion, which every kind of colour blindness tells apart.

`page.css` holds the same values, since a style sheet cannot import them (a test compares them), and its dark ones.
"""

from typing import NamedTuple

Colour = tuple[int, int, int]


class Hues(NamedTuple):
    """What carries for the score, and what carries against it."""

    positive: Colour
    negative: Colour

    def hex(self, value: float) -> str:
        """The hue of a value, by its sign: #rrggbb."""
        return "#{:02x}{:02x}{:02x}".format(*self._of(value))

    def css(self, value: float, alpha: float) -> str:
        """The hue of a value, translucent: rgba(...)."""
        return "rgba({},{},{},{:.3f})".format(*self._of(value), alpha)

    def _of(self, value: float) -> Colour:
        return self.positive if value > 0 else self.negative


# By what lies under them: paper or a light page; a terminal or a notebook, whose theme is not known.
LIGHT = Hues((0, 114, 178), (213, 94, 0))
EITHER = Hues((47, 143, 208), (217, 102, 10))
# Darker, so that white text on them is legible.
GROUND = Hues((26, 106, 168), (173, 76, 8))
INK, MUTED = "#1b1d21", "#5b616b"

# A tint is at most this opaque, so that the text on it stays legible.
STRENGTH = 0.6
# Below one, so that weak words can be seen beside the strongest.
POWER = 0.75
# Share of the scale from which a negative word is underlined: colour alone never tells the sign.
MARKED = 0.1
