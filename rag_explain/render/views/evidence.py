"""Evidence: the query and the sentences to read for it, with their values. Not tinted: tints are score units."""

from rag_explain.render.blocks import Column, Line, Piece, Section, Table, Texts, View, Words
from rag_explain.render.sentences import one_line
from rag_explain.results.evidence import Evidence
from rag_explain.results.notices import READING

_COLUMNS = Column("where to look"), Column("value", is_number=True)


def evidence_view(evidence: Evidence, *, top: int | None = None) -> View:
    """The best sentences, or the `top` ones, the best first."""
    unread = (Line(notice.text, "warning") for notice in evidence.notices if notice.code in READING)
    others = (Line(notice.text, "muted") for notice in evidence.notices if notice.code not in READING)
    found = tuple(evidence) if top is None else evidence.top(top)
    rows = tuple((one_line(span.text), f"{span.value:.4f}") for span in found)
    meaning = f"{len(rows)} of {len(evidence.sentences)} sentences; where to look, not what carried the score"
    source = " · ".join(part for part in (evidence.method, evidence.model) if part)
    return (
        Section((*unread, Texts((Words((Piece(evidence.query),), label="query"),)))),
        Section((Table(_COLUMNS, rows) if rows else Line("no sentence to read", "aside"),)),
        Section((Line(meaning, "muted"), Line(source, "muted"), *others)),
    )
