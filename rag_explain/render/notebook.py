"""Blocks inside another page: a notebook's output cell.

No script, no style element, no id and no class: styles are on the elements themselves. So nothing leaks from one output
into another, tints are translucent over the colours of the notebook's theme, and a notebook that is not trusted, where
scripts and styles are removed, still shows it.
"""

from typing import assert_never
from xml.etree import ElementTree as ET

from rag_explain.render.blocks import Block, Facing, Figures, Fold, Grid, Legend, Line, Table, Texts, View, Words
from rag_explain.render.palette import EITHER, MARKED, POWER, STRENGTH
from rag_explain.render.sentences import UNKNOWN_WORD, number

_ROOT = "line-height:1.6;max-width:60em;text-align:left"
_MUTED = "opacity:.7;font-size:.85em"
_CELL = "padding:.1em .8em .1em 0;text-align:left;background:none;border:0"
_NUMBER = f"{_CELL};text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums"
_HEAD = "padding:.1em .6em;text-align:center;border:0;min-width:5em"
_QUERY = "font-size:1.1em;font-weight:600;white-space:pre-wrap"
_TEXT = "white-space:pre-wrap;line-height:1.9;margin:.4em 0"
_BESIDE = "display:flex;flex-wrap:wrap;gap:0 2em"
_LEFT = "padding:.15em .6em;text-align:right;border:0;width:42%;background:none"
_MIDDLE = "padding:.15em .6em;text-align:center;border:0;background:none"
_RIGHT = "padding:.15em .6em;text-align:left;border:0;width:42%;background:none"
_HATCHED = "background:repeating-linear-gradient(135deg,rgba(128,128,128,.35) 0 2px,transparent 2px 6px)"
_MARK = f"{_MUTED};border:1px dashed;border-radius:.3em;padding:0 .3em;margin:0 .3em"
_TONES = {
    "plain": "",
    "answer": "font-size:1.15em;font-weight:600;margin:.2em 0",
    "muted": _MUTED,
    "aside": "font-style:italic",
    "warning": f"border-left:3px solid {EITHER.hex(-1)};padding-left:.6em;margin:.3em 0",
}


def draw(view: View) -> str:
    """The view as one element of HTML."""
    root = ET.Element("div", {"style": _ROOT})
    for section in view:
        target = _add(root, "div", "margin:.6em 0")
        if section.rank is not None:
            head = _add(target, "div", "margin-top:1em")
            _add(head, "b", "", f"{section.rank}  {section.title}")
            _add(head, "span", _MUTED, f"  {section.facts}")
        for block in section.blocks:
            _block(target, block)
    return ET.tostring(root, encoding="unicode", method="html")


def _block(target: ET.Element, block: Block) -> None:
    match block:
        case Texts():
            _texts(target, block)
        case Words():
            _words(_add(target, "div", _TEXT), block)
        case Figures():
            figures = _add(target, "div", "font-variant-numeric:tabular-nums")
            _add(figures, "b", "", f"{block.name} {block.total}")
            _add(figures, "span", "", block.parts)
        case Fold():
            folded = _add(target, "details", "margin:.2em 0")
            _add(folded, "summary", f"{_MUTED};cursor:pointer", block.title)
            folded.attrib |= {"open": "open"} if block.is_open else {}
            for inner in block.blocks:
                _block(folded, inner)
        case Line():
            _add(target, "div", _TONES[block.tone], block.text)
        case Table():
            _table(target, block)
        case Grid():
            _grid(target, block)
        case Facing():
            _facing(target, block)
        case Legend():
            _legend(_add(target, "div", _MUTED), block)
        case _:
            assert_never(block)


def _texts(target: ET.Element, texts: Texts) -> None:
    """The query, and the others below it; two documents side by side where there is room."""
    beside = _add(target, "div", _BESIDE) if len(texts.rows) > 2 else target
    for index, row in enumerate(texts.rows):
        place = _add(beside, "div", "flex:1 1 min(20em,100%);min-width:0") if index and beside is not target else target
        _add(place, "div", _MUTED, f"{row.label} {row.number}")
        _words(_add(place, "div", _TEXT if index else _QUERY), row)
    if beside is not target:  # below the query, which was added after it
        target.remove(beside)
        target.append(beside)


def _words(target: ET.Element, words: Words) -> None:
    target.set("dir", "auto")
    for piece in words.pieces:
        if not piece.is_read:
            _add(target, "span", _MARK, "not read by the encoder")
            _add(target, "span", "opacity:.6;font-style:italic", piece.text)
        elif piece.token is None or not words.values:
            _add(target, "span", "", piece.text)
        else:
            style = _tint(words.values[piece.token], words.scale) if piece.is_known else _HATCHED
            word = _add(target, "span", style, piece.text)
            note = words.notes[piece.token] if words.notes else ""
            word.set("title", note if piece.is_known else UNKNOWN_WORD)


def _tint(value: float, scale: float) -> str:
    strength = abs(value) / scale if scale else 0.0
    style = f"background:{EITHER.css(value, STRENGTH * strength**POWER)};border-radius:.25em"
    is_marked = value < 0 and strength > MARKED
    return f"{style};text-decoration:underline dotted {EITHER.hex(value)}" if is_marked else style


def _table(target: ET.Element, table: Table) -> None:
    """A table with a title can be folded, and is if it is one of several."""
    if table.title:
        target = _add(target, "details", "margin:.2em 0 .6em")
        target.attrib |= {"open": "open"} if table.brief is None else {}
        _add(target, "summary", f"{_MUTED};cursor:pointer", table.title)
    target = _scrolled(target)
    drawn = _add(target, "table", "border-collapse:collapse;margin:.3em 0;font-size:.95em")
    styles = [_NUMBER if column.is_number else _CELL for column in table.columns]
    head = _add(drawn, "tr", "background:none")
    for column, style in zip(table.columns, styles, strict=True):
        named = _add(head, "th" if column.title else "td", f"{style};font-weight:400;opacity:.7", column.title)
        named.attrib |= {"scope": "col"} if column.title else {}
    if table.bars:
        _add(head, "td", _CELL)
    for at, cells in enumerate(table.rows):
        row = _add(drawn, "tr", "background:none")
        for cell, style in zip(cells, styles, strict=True):
            _add(row, "td", style, cell)
        if table.bars:
            _bar(_add(row, "td", f"{_CELL};min-width:8em"), table.bars[at], table.scale)
    if rest := table.left_out(len(table.rows)):
        _add(target, "div", _MUTED, rest)


def _grid(target: ET.Element, grid: Grid) -> None:
    drawn = _add(_scrolled(target), "table", "border-collapse:separate;border-spacing:2px;margin:.5em 0")
    head = _add(drawn, "tr", "background:none")
    for title, style in (("", _CELL), ("", _CELL), ("score", _NUMBER), *((one, _HEAD) for one in grid.heads)):
        _add(head, "th", f"{style};font-weight:600", title).set("scope", "col")
    for title in grid.more:
        _add(head, "th", f"{_NUMBER};font-weight:400;opacity:.7", title).set("scope", "col")
    for row in grid.rows:
        if row.above:
            parted = _add(_add(drawn, "tr", "background:none"), "td", f"{_MUTED};border-top:2px dashed", row.above)
            parted.set("colspan", str(3 + len(grid.heads) + len(grid.more)))
        line = _add(drawn, "tr", "background:none")
        _add(line, "td", _NUMBER, str(row.rank))
        _add(line, "th", f"{_CELL};font-weight:600", row.name).set("scope", "row")
        _add(line, "td", _NUMBER, row.total)
        for cell in row.cells:
            met = _add(line, "td", f"{_HEAD};{_tint(cell.value, grid.scale) if cell.is_known else _HATCHED}")
            _add(met, "div", "", cell.text).set("dir", "auto")
            _add(met, "div", _MUTED, number(cell.value))
            if cell.note:
                _add(met, "div", _MUTED, cell.note)
        for text in row.more:
            _add(line, "td", _NUMBER, text)


def _facing(target: ET.Element, facing: Facing) -> None:
    """Names in the middle, bars to either side."""
    drawn = _add(_scrolled(target), "table", "border-collapse:collapse;margin:.3em 0;width:100%")
    head = _add(drawn, "tr", "background:none")
    sides = ((f"met in {facing.left}", _LEFT), (facing.name, _MIDDLE), (f"met in {facing.right}", _RIGHT))
    for title, style in sides:
        _add(head, "th", f"{style};font-weight:400;opacity:.7", title).set("scope", "col")
    for row in facing.rows:
        line = _add(drawn, "tr", "background:none")
        _side(_add(line, "td", _LEFT), row.left, row.left_met, facing.scale, "auto")
        name = _add(line, "th", f"{_MIDDLE};font-weight:600", row.name)
        name.attrib |= {"scope": "row", "dir": "auto"}
        _side(_add(line, "td", _RIGHT), row.right, row.right_met, facing.scale, "0")


def _side(target: ET.Element, value: float, met: str, scale: float, margin: str) -> None:
    _add(target, "bdi", _MUTED, met)
    _add(target, "span", "white-space:nowrap;font-variant-numeric:tabular-nums", f" {number(value)} ")
    _bar(target, value, scale, margin)


def _bar(target: ET.Element, value: float, scale: float, margin: str = "0") -> None:
    """A bar whose length is |value|, broken where it is against; a border, which forced colours keep."""
    share = 100 * abs(value) / scale if scale else 0.0
    line = f"border-top:.35em {'solid' if value > 0 else 'dashed'} {EITHER.hex(value)}"
    _add(target, "div", f"{line};width:{share:.1f}%;margin-left:{margin}")


def _scrolled(target: ET.Element) -> ET.Element:
    """A narrow page moves a table sideways instead of being moved itself; so the keyboard must reach it."""
    scrolled = _add(target, "div", "overflow-x:auto")
    scrolled.set("tabindex", "0")
    return scrolled


def _legend(target: ET.Element, legend: Legend) -> None:
    for value, after in ((-legend.scale, " to "), (legend.scale, f" {legend.text}")):
        _add(target, "span", _tint(value, legend.scale) + ";padding:0 .4em", number(value))
        _add(target, "span", "", after)


def _add(parent: ET.Element, tag: str, style: str, text: str = "") -> ET.Element:
    """A child of `parent`; ElementTree escapes what is put in it, as text and as an attribute's value."""
    child = ET.SubElement(parent, tag, {"style": style} if style else {})
    child.text = text
    return child
