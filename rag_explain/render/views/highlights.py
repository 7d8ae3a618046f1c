"""Highlights: a document with its words tinted by what they carry, of one pair or of all hits before their pairs."""

from collections.abc import Iterable

from rag_explain.render import sentences
from rag_explain.render.blocks import Block, Column, Line, Piece, Section, Table, Texts, View, Words
from rag_explain.render.sentences import number
from rag_explain.render.views.explanation import total
from rag_explain.results.highlights import Highlights
from rag_explain.results.hits import Hit
from rag_explain.results.notices import READING

_COLUMNS = Column("document", width=44), Column("score units", is_number=True)


def highlights_view(highlights: Highlights, *, top: int = 10) -> View:
    """Both texts, the score and what makes it up, and the words that carry most."""
    found = sorted(highlights, key=lambda span: -abs(span.value))[:top]
    rows = tuple((sentences.one_line(span.text), number(span.value)) for span in found)
    bars = tuple(span.value for span in found)
    source = " · ".join(part for part in (highlights.method, highlights.model) if part)
    texts = Texts((Words((Piece(highlights.query),), label="query"), _words(highlights, _strongest([highlights]))))
    return (
        Section((*_unread(highlights), texts)),
        Section((*_figures(highlights), Line(source, "muted"), *_others(highlights))),
        Section((Table(_COLUMNS, rows, "strongest words", bars, abs(bars[0])),) if rows else ()),
    )


def first_look_view(hits: Iterable[Hit]) -> View:
    """Each hit with its words tinted, which is there long before all pairs are."""
    looked = [(hit, hit.highlights) for hit in hits]
    scale = _strongest([one for _, one in looked if one is not None])
    sections = []
    for hit, one in looked:
        body: tuple[Block, ...] = Words((Piece(hit.text or ""),)), Line(sentences.missing(hit), "aside")
        if one is not None:
            body = *_unread(one), _words(one, scale), *_others(one)
        sections.append(Section(body, hit.id, hit.rank, sentences.facts(hit)))
    return tuple(sections)


def _words(highlights: Highlights, scale: float) -> Words:
    pieces, position = [], 0
    for index, span in enumerate(highlights):
        pieces += [Piece(highlights.document[position : span.start]), Piece(span.text, index)]
        position = span.end
    pieces.append(Piece(highlights.document[position:]))
    values = tuple(span.value for span in highlights)
    return Words(tuple(piece for piece in pieces if piece.text), values, scale, label="document")


def _figures(highlights: Highlights) -> tuple[Block, ...]:
    parts = "" if highlights.gap is None else sentences.parts(highlights.score, highlights.unattributed, "word")
    return total(highlights.score, highlights.measure, highlights.returned, parts)


def _unread(highlights: Highlights) -> tuple[Line, ...]:
    return tuple(Line(notice.text, "warning") for notice in highlights.notices if notice.code in READING)


def _others(highlights: Highlights) -> tuple[Line, ...]:
    return tuple(Line(notice.text, "warning") for notice in highlights.notices if notice.code not in READING)


def _strongest(found: Iterable[Highlights]) -> float:
    return max((abs(span.value) for one in found for span in one), default=0.0)
