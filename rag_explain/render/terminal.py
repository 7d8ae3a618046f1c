"""Blocks in a terminal, with rich; readable without colour, and as plain text.

The background of a terminal is not known, so words are tinted in steps that read on light and dark alike:
coloured, coloured and bold, reversed. What carries against the score is also underlined.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, assert_never

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from rag_explain.render.blocks import (
    Block,
    Facing,
    Figures,
    Fold,
    Grid,
    GridRow,
    Legend,
    Line,
    Table,
    Texts,
    View,
    Words,
)
from rag_explain.render.palette import EITHER, GROUND
from rag_explain.render.sentences import number

# Share of the scale from which a word gets the first, second and third step.
_STEPS = (0.15, 0.4, 0.7)
_TONES = {"plain": "", "answer": "bold", "muted": "dim", "aside": "italic", "warning": "bold"}
_UNKNOWN = "dim strike"  # no match, whatever it carries: the encoder takes all such words for one
_BAR, _LABEL, _INDENT = 16, 8, 4
_RANK, _GAP, _NUMBER, _MET = 5, 2, 6, 24
# Characters of a line below which bars are left out, and below which columns that can be spared are.
_ROOMY, _NARROW = 60, 48

T = TypeVar("T")


def draw(view: View) -> RenderableType:
    """Sections with a blank line between them; what stands below a heading is indented."""
    parts: list[RenderableType] = []
    for section in view:
        body: list[RenderableType] = [drawn for block in section.blocks if (drawn := _block(block)) is not None]
        if section.rank is not None:
            head = Text.assemble((f"{section.rank:>2}  ", "dim"), (section.title, "bold"), "  ", section.facts)
            body = [head, Padding(Group(*body), (0, 0, 0, _INDENT))]
        parts += [Text(), *body] if parts and body else body
    return Group(*parts)


def plain_text(view: View, width: int = 100) -> str:
    """The same without any colour code, for `print` and files."""
    console = Console(width=width, color_system=None, force_terminal=False, highlight=False, legacy_windows=False)
    with console.capture() as captured:
        console.print(draw(view))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _block(block: Block) -> RenderableType | None:
    # Strings become Text, because rich reads markup in a str.
    match block:
        case Texts():
            return _texts(block)
        case Words():
            return _words(block)
        case Figures():
            return Text.assemble(f"{block.name} ", (block.total, "bold"), block.parts)
        case Fold():
            return Text(f"[{block.title}]", "dim")
        case Line():
            return Text("! " * (block.tone == "warning") + block.text, _TONES[block.tone])
        case Table():
            return _Fitted(_table, block)
        case Grid():
            return _Fitted(_grid, block)
        case Facing():
            return _Fitted(_facing, block)
        case Legend():
            return None  # the steps of a terminal's tints are not to be read as values
        case _:
            assert_never(block)


@dataclass(frozen=True)
class _Fitted(Generic[T]):
    """What is drawn for the room that there is."""

    draw: Callable[[T, int], RenderableType]
    block: T

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.draw(self.block, options.max_width)


def _texts(texts: Texts) -> RichTable:
    has_numbers = any(row.number for row in texts.rows)
    grid = RichTable.grid(padding=(0, 2))
    grid.add_column(style="dim", width=_LABEL)
    if has_numbers:
        grid.add_column(justify="right", no_wrap=True)
    grid.add_column(overflow="fold")
    for row in texts.rows:
        numbers = [Text(row.number, "bold")] if has_numbers else []
        grid.add_row(Text(row.label), *numbers, _words(row))
    return grid


def _words(words: Words) -> Text:
    text = Text(overflow="fold")
    for piece in words.pieces:
        if not piece.is_read:
            text.append(f" [not read by the encoder: {piece.text.strip()}]", "dim italic")
        elif piece.token is None or not words.values:
            text.append(piece.text)
        else:
            text.append(piece.text, _tint(words.values[piece.token], words.scale) if piece.is_known else _UNKNOWN)
    return text


def _tint(value: float, scale: float) -> str:
    step = sum(abs(value) >= limit * scale for limit in _STEPS) if scale else 0
    if not step:
        return ""
    line = " underline" if value < 0 else ""
    colour, ground = EITHER.hex(value), GROUND.hex(value)
    return (f"{colour}{line}", f"bold {colour}{line}", f"bold #ffffff on {ground}{line}")[step - 1]


def _table(table: Table, room: int) -> RenderableType:
    """Words stay: where room is scarce the bars go first, and then the columns that can be spared."""
    has_bars = bool(table.bars) and room >= _ROOMY
    kept = [at for at, column in enumerate(table.columns) if room >= _NARROW or not column.is_spare]
    drawn = RichTable(
        box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False, show_header=table.brief is None
    )
    for index in kept:
        column = table.columns[index]
        if column.is_number:  # a long title may break, a number may not
            longest = max((len(row[index]) for row in table.rows), default=0)
            drawn.add_column(Text(column.title), justify="right", overflow="fold", min_width=longest)
        else:
            drawn.add_column(Text(column.title), overflow="fold", max_width=column.width)
    if has_bars:
        drawn.add_column("", no_wrap=True, min_width=_BAR)
    for index, row in enumerate(table.rows[: table.brief]):
        bars = [_bar(table.bars[index], table.scale)] if has_bars else []
        drawn.add_row(*(Text(row[at]) for at in kept), *bars)
    if rest := table.left_out(len(table.rows[: table.brief])):
        return Group(drawn, Text(rest, "dim"))
    return drawn


def _grid(grid: Grid, room: int) -> RichTable:
    """What there is room for: the last columns go first, then the numbers, then the words with the weakest cells."""
    names = min(max(cell_len(row.name) for row in grid.rows), max(8, room // 4)) + _GAP
    left = room - names - _RANK - max(cell_len(row.total) for row in grid.rows) - _GAP
    numbered = sum(_width(grid, at, True) for at in range(len(grid.heads)))
    more = numbered + sum(len(head) + _GAP for head in grid.more) <= left
    chosen = _fitting(grid, left) if numbered > left else list(range(len(grid.heads)))
    drawn = RichTable(box=None, padding=(0, _GAP, 0, 0), header_style="dim", pad_edge=False)
    drawn.add_column("", justify="right")
    drawn.add_column(Text(""), no_wrap=True, overflow="ellipsis", max_width=names - _GAP)
    drawn.add_column(Text("score"), justify="right")
    for at in chosen:
        drawn.add_column(Text(grid.heads[at], "bold"))
    for head in grid.more if more else ():
        drawn.add_column(Text(head), justify="right")
    for row in grid.rows:
        if row.above:
            drawn.add_row(Text(), Text("── background", "dim"), Text())
        drawn.add_row(*_grid_row(row, grid, chosen, more, numbered <= left))
    return drawn


def _fitting(grid: Grid, left: int) -> list[int]:
    """The words with the strongest cells, without numbers; one always."""
    sizes = [sum(abs(row.cells[at].value) for row in grid.rows if row.cells) for at in range(len(grid.heads))]
    chosen: list[int] = []
    for at in sorted(range(len(sizes)), key=lambda at: -sizes[at]):
        width = _width(grid, at, False)
        if not chosen or width <= left:
            chosen, left = [*chosen, at], left - width
    return sorted(chosen)


def _width(grid: Grid, at: int, has_numbers: bool) -> int:
    cells = (cell_len(row.cells[at].text) for row in grid.rows if row.cells)
    return max(cell_len(grid.heads[at]), max(cells) + _NUMBER * has_numbers) + _GAP


def _grid_row(row: GridRow, grid: Grid, chosen: Sequence[int], more: bool, has_numbers: bool) -> list[Text]:
    found = [Text(str(row.rank), "dim"), Text(row.name, "bold"), Text(row.total)]
    if not row.cells:
        return [*found, Text("no explanation", "italic")]
    for at in chosen:
        cell = row.cells[at]
        value = (f" {cell.value:+.2f}" if has_numbers else "", "dim")
        found.append(Text.assemble((cell.text, _tint(cell.value, grid.scale) if cell.is_known else _UNKNOWN), value))
    return [*found, *(Text(one, "dim") for one in (row.more if more else ()))]


def _facing(facing: Facing, room: int) -> RichTable:
    """Names, numbers and their difference; what was met on either side where there is room for it."""
    drawn = RichTable(box=None, padding=(0, _GAP, 0, 0), header_style="dim", pad_edge=False)
    has_met = room >= _ROOMY
    drawn.add_column(Text(facing.name), overflow="fold")
    for side in (facing.left, facing.right):
        drawn.add_column(Text(side), justify="right")
        if has_met:
            drawn.add_column(Text("met"), overflow="fold", max_width=_MET)
    if room >= _NARROW:
        drawn.add_column(Text("difference"), justify="right")
    for row in facing.rows:
        cells = [Text(row.name, "bold")]
        for value, met in ((row.left, row.left_met), (row.right, row.right_met)):
            cells += [Text(number(value), EITHER.hex(value)), *([Text(met)] if has_met else [])]
        drawn.add_row(*cells, *([Text(number(row.left - row.right))] if room >= _NARROW else []))
    return drawn


def _bar(value: float, scale: float) -> Text:
    """A bar whose length is |value|; against the score it is broken, so that it differs without colour."""
    length = round(_BAR * abs(value) / scale) if scale else 0
    return Text(("━" if value > 0 else "╍") * length, EITHER.hex(value))
