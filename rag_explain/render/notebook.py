"""Explanations inside somebody else's page: a notebook's output cell.

No script, no style element, no id and no class: styles are on the elements themselves. So nothing leaks into
the notebook or from one output into another, light and dark themes keep their text colour under translucent
tints, and a notebook that is not trusted, where scripts and styles are removed, still shows it. The page that
`to_html` writes is the one to explore.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np

from rag_explain.render import view
from rag_explain.results.explanation import Explanation
from rag_explain.texts.tokens import Role

# Between the hues of the light and of the dark page: both themes lie under them.
_FOR, _AGAINST = "24,128,196", "222,104,16"
_STRENGTH = 0.6
# Weak words can be seen beside the strongest, as on the page.
_POWER = 0.75
_MUTED = "opacity:.7;font-size:.85em"
_CELL = "padding:.1em .8em .1em 0;text-align:left;background:none;border:0;white-space:nowrap"
_NUMBER = f"{_CELL};text-align:right;font-variant-numeric:tabular-nums"
_QUERY = "font-size:1.1em;font-weight:600;white-space:pre-wrap"
_PAIRS, _MET = 8, 3


def fragment(items: Iterable[view.Item]) -> str:
    """The items as one element of HTML, on one colour scale for each method."""
    cards = view.cards(items)
    shown = [[view.at(explanation) for explanation in card.explanations] for card in cards]
    scales: dict[str, float] = {}
    for one in (one for group in shown for one in group):
        scales[one.method] = max(scales.get(one.method, 0.0), _strongest(one.document_saliency()))
    root = ET.Element("div", {"style": "line-height:1.6;max-width:60em;text-align:left"})
    query: str | None = None
    for card, group in zip(cards, shown, strict=True):
        if card.hit is not None:
            if group and group[0].query != query:  # one query for many hits: said once, and not in the tints of one
                query = group[0].query
                text = "".join(piece.text for piece in view.pieces(group[0], "query"))
                _add(root, "div", _QUERY, text).set("dir", "auto")
            head = _add(root, "div", "margin-top:1em")
            _add(head, "b", "", f"{card.hit.rank}  {view.visible(card.hit.id)}")
            _add(head, "span", _MUTED, f"  {view.facts(card.hit)}")
            if not group:
                _add(root, "div", "font-style:italic", view.missing(card.hit))
                _add(root, "div", "white-space:pre-wrap", view.visible(card.hit.text or ""))
        for one in group:
            _explanation(root, one, scales[one.method], is_hit=card.hit is not None)
    for method, scale in scales.items():
        legend = _add(root, "div", _MUTED)
        _add(legend, "span", _tint(-scale, scale) + ";padding:0 .4em", view.number(-scale))
        _add(legend, "span", "", " to ")
        _add(legend, "span", _tint(scale, scale) + ";padding:0 .4em", view.number(scale))
        _add(legend, "span", "", f" score units: the tints of document words, {view.visible(method)}")
    if not cards:
        _add(root, "div", "", "no hits")
    return ET.tostring(root, encoding="unicode", method="html")


def _explanation(root: ET.Element, shown: Explanation, scale: float, *, is_hit: bool) -> None:
    if not is_hit:
        _tinted(_add(root, "div", _QUERY), shown, "query", _strongest(shown.query_saliency()))
    figures = _add(root, "div", "margin:.2em 0;font-variant-numeric:tabular-nums")
    _add(figures, "b", "", f"score {shown.score:.4f}")
    if shown.additive:
        carried = shown.score - shown.unattributed
        sums = f" = {view.number(carried)} {shown.unit}s {view.number(shown.unattributed)} "
        _add(figures, "span", "", f"{sums} not attributable to {shown.unit}s (unattributed)")
    _add(figures, "div", _MUTED, f"{view.balance(shown)} · {view.source(shown)}")
    for notice in view.notices(shown):
        _add(root, "div", f"border-left:3px solid rgb({_AGAINST});padding-left:.6em;margin:.3em 0", notice)
    _tinted(_add(root, "div", "white-space:pre-wrap;line-height:1.9;margin:.4em 0"), shown, "document", scale)
    details = _add(root, "details", "margin:.2em 0 .6em")
    if not is_hit:
        details.set("open", "open")
    _add(details, "summary", f"{_MUTED};cursor:pointer", "strongest pairs")
    _pairs(details, shown)


def _tinted(target: ET.Element, shown: Explanation, side: Role, scale: float) -> None:
    target.set("dir", "auto")
    values = shown.query_saliency() if side == "query" else shown.document_saliency()
    for piece in view.pieces(shown, side):
        if not piece.seen:
            _add(target, "span", f"{_MUTED};border:1px dashed;border-radius:.3em;padding:0 .3em;margin:0 .3em",
                 "not read by the encoder")  # fmt: skip
            _add(target, "span", "opacity:.6;font-style:italic", piece.text)
        elif piece.token is None:
            _add(target, "span", "", piece.text)
        else:
            value = float(values[piece.token])
            word = _add(target, "span", _tint(value, scale), piece.text)
            word.set("title", _met(shown, side, piece.token, value))


def _tint(value: float, scale: float) -> str:
    strength = abs(value) / scale if scale else 0.0
    alpha = _STRENGTH * strength**_POWER
    style = f"background:rgba({_FOR if value > 0 else _AGAINST},{alpha:.3f});border-radius:.25em"
    if value < 0 and strength > 0.1:  # colour alone never tells
        style += f";text-decoration:underline dotted rgb({_AGAINST})"
    return style


def _met(shown: Explanation, side: Role, index: int, value: float) -> str:
    """What one word carries and the words it met most."""
    row = shown.pairs[index] if side == "query" else shown.pairs[:, index]
    others = shown.document_tokens if side == "query" else shown.query_tokens
    best = np.argsort(-np.abs(row), kind="stable")[:_MET]
    met = ", ".join(f"{view.name(others[k], int(k))} {view.number(float(row[k]))}" for k in best)
    return f"carries {view.number(value)} score units; met {met}" if met else ""


def _pairs(target: ET.Element, shown: Explanation) -> None:
    table = _add(target, "table", "border-collapse:collapse;margin:.3em 0;font-size:.95em")
    head = _add(table, "tr", "background:none")
    for text, style in (
        ("query", _CELL),
        ("document", _CELL),
        ("score units", _NUMBER),
        ("share of Σ|pairs|", _NUMBER),
    ):
        _add(head, "th", f"{style};font-weight:400;opacity:.7", text).set("scope", "col")
    for pair in shown.top_pairs(_PAIRS):
        row = _add(table, "tr", "background:none")
        _add(row, "td", _CELL, view.name(pair.query, shown.query_tokens.index(pair.query)))
        _add(row, "td", _CELL, view.name(pair.document, shown.document_tokens.index(pair.document)))
        _add(row, "td", _NUMBER, view.number(pair.value))
        _add(row, "td", _NUMBER, f"{pair.share:.1%}")


def _add(parent: ET.Element, tag: str, style: str, text: str = "") -> ET.Element:
    """A child of `parent`; ElementTree escapes what is put in it, as text and as an attribute's value."""
    child = ET.SubElement(parent, tag, {"style": style} if style else {})
    child.text = text
    return child


def _strongest(values: np.ndarray[Any, np.dtype[np.float32]]) -> float:
    return float(np.abs(values).max(initial=0.0))
