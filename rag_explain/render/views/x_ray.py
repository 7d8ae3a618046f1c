"""An x-ray: the text tinted by what its words make up of its vector, then sentences, headers and metadata."""

from collections.abc import Sequence

from rag_explain.render.blocks import Block, Column, Figures, Line, Piece, Section, Table, View, Words
from rag_explain.render.sentences import one_line
from rag_explain.results.notices import READING
from rag_explain.results.spans import ValuedSpan
from rag_explain.results.x_ray import XRay

_WIDTH = 90
_SHARE = Column("share", is_number=True)
_PLENTY = 0.25  # a header or a line of metadata that makes up more than this is said first


def x_ray_view(found: XRay) -> View:
    """What most of the vector is, then every part with its share."""
    read = tuple(Line(notice.text, "warning") for notice in found.notices if notice.code in READING)
    scale = max((abs(share) for share in _all(found)), default=0.0)
    body: list[Block] = [_table("metadata", found.metadata, scale)] if found.metadata else []
    body += [_table("header", _named(found.headers), scale)] if found.headers else []
    body.append(_table("sentence", _named(found.sentences), scale))
    apart = f"special tokens {_percent(found.special)}, rest {_percent(found.rest)}"
    own = _percent(sum(one.value for one in found.sentences))
    figures = Figures("its own text", own, f" · no sentence {_percent(found.no_text)} ({apart})")
    meaning = "share of the text's own vector: 100 % with what is of no sentence; below zero: it turns the vector away"
    source = " · ".join(part for part in (found.method, found.model) if part)
    return (
        Section((*read, *_said(found), _words(found))),
        Section((figures, *body)),
        Section((Line(meaning, "muted"), Line(source, "muted"))),
    )


def _all(found: XRay) -> list[float]:
    return [one.value for one in (*found.sentences, *found.headers)] + [share for _, share in found.metadata]


def _said(found: XRay) -> list[Line]:
    """Headers and metadata that make up so much that a person should know."""
    parts = [(one.text, one.value) for one in found.headers] + list(found.metadata)
    return [
        Line(f"{_percent(share)} of this vector is “{one_line(text, 60)}”", "warning")
        for text, share in sorted(parts, key=lambda one: -one[1])
        if share > _PLENTY
    ]


def _words(found: XRay) -> Words:
    parts = found.words or found.sentences
    pieces, position = [], 0
    for index, one in enumerate(parts):
        pieces += [Piece(found.document[position : one.start]), Piece(one.text, index)]
        position = one.end
    pieces.append(Piece(found.document[position:]))
    values = tuple(one.value for one in parts)
    scale = max(map(abs, values), default=0.0)
    notes = tuple(_percent(value) for value in values)
    return Words(tuple(one for one in pieces if one.text), values, scale, notes, label="text")


def _named(parts: Sequence[ValuedSpan]) -> list[tuple[str, float]]:
    return [(one.text, one.value) for one in parts]


def _table(title: str, parts: Sequence[tuple[str, float]], scale: float) -> Table:
    rows = tuple((one_line(text, _WIDTH), _percent(share)) for text, share in parts)
    return Table((Column(title, width=_WIDTH), _SHARE), rows, bars=tuple(share for _, share in parts), scale=scale)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
