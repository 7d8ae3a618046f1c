"""What is shown, not how: a view is sections of blocks, and each drawer draws any of them."""

from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

from rag_explain.render.sentences import all_visible

_NOTHING = 5e-4  # a share of the whole that is not worth a line


@dataclass(frozen=True, slots=True)
class _Visible:
    """Every string in a block passes `visible` when the block is made, so that no view can forget it."""

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, all_visible(getattr(self, field.name)))


@dataclass(frozen=True, slots=True)
class Piece(_Visible):
    """A stretch of a text, the number of the token it belongs to, if any, and whether the encoder read and knows it."""

    text: str
    token: int | None = None
    is_read: bool = True
    is_known: bool = True


@dataclass(frozen=True, slots=True)
class Words(_Visible):
    """A whole text, its words tinted by the values."""

    pieces: tuple[Piece, ...]
    values: tuple[float, ...] = ()  # what each token carries
    scale: float = 0.0  # the |value| with the strongest tint
    notes: tuple[str, ...] = ()  # one per token: a sentence to show when one points at it
    label: str = ""  # what the text is called among other texts
    number: str = ""  # what belongs to it there


@dataclass(frozen=True, slots=True)
class Fold(_Visible):
    """What is there to be opened, or to be closed; a medium that cannot fold names it, and leaves it out."""

    title: str
    blocks: "tuple[Block, ...]"
    is_open: bool = False


@dataclass(frozen=True, slots=True)
class Texts(_Visible):
    """Texts with their labels and numbers, one below the other; the first is the query."""

    rows: tuple[Words, ...]


@dataclass(frozen=True, slots=True)
class Figures(_Visible):
    """A total with its name, and what it is the sum of, if it is one."""

    name: str
    total: str
    parts: str = ""


@dataclass(frozen=True, slots=True)
class Line(_Visible):
    """A sentence; an `answer` is what was asked for, a `warning` what to know before trusting the numbers."""

    text: str
    tone: Literal["plain", "answer", "muted", "aside", "warning"] = "plain"


@dataclass(frozen=True, slots=True)
class Column(_Visible):
    """A column of a table; `width` is the most characters it takes where room is scarce."""

    title: str
    is_number: bool = False
    width: int | None = None
    is_spare: bool = False  # left out first where room is scarce


@dataclass(frozen=True, slots=True)
class Table(_Visible):
    """Rows of cells, one cell per column."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""  # what the rows are, for a medium that can fold the table away
    bars: tuple[float, ...] = ()  # one value per row, drawn as a bar where a medium can
    scale: float = 0.0  # the |value| of the longest bar
    # One of several tables of the same columns: a medium that can fold it does, others show so many rows, no headings.
    brief: int | None = None
    total: int = 0  # how many rows there are, if these are only the first
    shares: tuple[float, ...] = ()  # of the whole, for each of these

    def left_out(self, shown: int) -> str:
        """How many rows are not shown, and what share of the whole they have; nothing where all are."""
        others, share = self.total - shown, 1 - sum(self.shares[:shown])
        return f"{others:,} other{'s' if others > 1 else ''}: {share:.0%}" if others > 0 and share > _NOTHING else ""


@dataclass(frozen=True, slots=True)
class Cell(_Visible):
    """A short text in a grid, tinted by its value."""

    text: str
    value: float
    note: str = ""  # what else is known of it, where there is room
    is_known: bool = True  # whether it is a match at all, and not what the encoder takes for one


@dataclass(frozen=True, slots=True)
class GridRow(_Visible):
    """One result: its rank, name and score, a cell for each head, and the numbers that no cell holds."""

    rank: int
    name: str
    total: str
    cells: tuple[Cell, ...]  # none where there is nothing to show
    more: tuple[str, ...] = ()
    bar: float = 0.0  # the length of its score's bar, of 1
    above: str = ""  # a line that parts this row from those before it


@dataclass(frozen=True, slots=True)
class Grid(_Visible):
    """Results by words, each cell tinted on one scale; a medium without room leaves out `more`, then heads."""

    heads: tuple[str, ...]
    more: tuple[str, ...]  # heads of the numbers at the end of each row
    rows: tuple[GridRow, ...]
    scale: float


@dataclass(frozen=True, slots=True)
class FacingRow(_Visible):
    """What one name carries on either side, and what it met there; no value where it has none."""

    name: str
    left: float
    right: float
    left_met: str = ""
    right_met: str = ""


@dataclass(frozen=True, slots=True)
class Facing(_Visible):
    """Two sides of the same names, their bars on one scale."""

    left: str
    name: str
    right: str
    rows: tuple[FacingRow, ...]

    @property
    def scale(self) -> float:
        return max((abs(value) for row in self.rows for value in (row.left, row.right)), default=0.0)


@dataclass(frozen=True, slots=True)
class Legend(_Visible):
    """The scale of the tints, for a medium whose tints are continuous."""

    scale: float
    text: str


Block: TypeAlias = Texts | Words | Fold | Figures | Line | Table | Grid | Facing | Legend


@dataclass(frozen=True, slots=True)
class Section(_Visible):
    """Blocks that belong together, set off from the other sections; about one result among several, with its rank."""

    blocks: tuple[Block, ...]
    title: str = ""
    rank: int | None = None
    facts: str = ""


View: TypeAlias = tuple[Section, ...]
