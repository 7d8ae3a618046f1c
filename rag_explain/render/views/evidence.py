"""Evidence: the query and the sentences to read for it, where they stand. Not tinted: tints are score units."""

from collections.abc import Iterator

from rag_explain.render.blocks import Block, Column, Fold, Line, Piece, Section, Table, Texts, View, Words
from rag_explain.render.sentences import one_line
from rag_explain.results.evidence import Evidence
from rag_explain.results.notices import READING
from rag_explain.results.spans import ValuedSpan

_COLUMNS = Column("where to look"), Column("value", is_number=True)


def evidence_view(evidence: Evidence, *, top: int | None = None) -> View:
    """The best sentences, or the `top` ones, the best first; then all of the text, the others folded away."""
    unread = (Line(notice.text, "warning") for notice in evidence.notices if notice.code in READING)
    others = (Line(notice.text, "muted") for notice in evidence.notices if notice.code not in READING)
    found = tuple(evidence) if top is None else evidence.top(top)
    rows = tuple((one_line(span.text), f"{span.value:.4f}") for span in found)
    bars = tuple(span.value for span in found)
    table = Table(_COLUMNS, rows, bars=bars, scale=max(map(abs, bars), default=0.0))
    is_short = len(found) == len(evidence.sentences) or not found
    meaning = f"{len(rows)} of {len(evidence.sentences)} sentences; where to look, not what carried the score"
    source = " · ".join(part for part in (evidence.method, evidence.model) if part)
    return (
        Section((*unread, Texts((Words((Piece(evidence.query),), label="query"),)))),
        Section((table if rows else Line("no sentence to read", "aside"),)),
        *(() if is_short else (Section(tuple(_opened(evidence, found))),)),
        Section((Line(meaning, "muted"), Line(source, "muted"), *others)),
    )


def _opened(evidence: Evidence, found: tuple[ValuedSpan, ...]) -> Iterator[Block]:
    """The document in its own order: what is to be read open, and what is between folded away."""
    text, position, starts = evidence.document, 0, [span.start for span in evidence.sentences]
    for span in (*sorted(found, key=lambda one: one.start), None):
        start = len(text) if span is None else span.start
        count = sum(position <= one < start for one in starts)
        if count:
            yield Fold(
                f"… {count} sentence{'s' if count > 1 else ''}", (Words((Piece(text[position:start].strip()),)),)
            )
        if span is not None:
            yield Words((Piece(span.text),))
            position = span.end
