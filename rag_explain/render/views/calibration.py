"""A calibration: the line, in the index's own unit, and the distribution of unrelated pairs."""

from rag_explain.errors import InvalidInput
from rag_explain.render.blocks import Column, Figures, Line, Section, Table, View
from rag_explain.results.calibration import LINE, Calibration

_SHOWN = (0.5, 0.9, 0.95, LINE, 0.999)
_SOURCES = {"queries": "queries of your own", "sentences": "sentences of other documents in place of queries"}


def calibration_view(found: Calibration) -> View:
    """Where background begins, and how the similarities of unrelated pairs are spread."""
    is_similarity = _score(found, LINE) == f"{found.line():.4f}"
    names = ("similarity", "±") if is_similarity else ("similarity", "score", "±")
    columns = Column("unrelated pairs below"), *(Column(name, is_number=True) for name in names)
    rows = tuple(
        (f"{share:.1%}", f"{found.line(share):.4f}", _score(found, share), f"{found.error(share):.2%}")
        for share in _SHOWN
    )
    lines = tuple(found.line(share) for share in _SHOWN)
    table = Table(
        columns,
        tuple((*row[:2], row[3]) for row in rows) if is_similarity else rows,
        bars=lines,
        scale=max(map(abs, lines)),
    )
    figures = Figures("background begins below", _score(found, LINE), f" {found.metric}, {LINE:.0%} of unrelated pairs")
    counted = f"{found.pairs:,} pairs of {found.queries:,} queries and {found.documents:,} documents"
    how = f"{counted}; {_SOURCES[found.source]}"
    return (Section((figures,)), Section((table, Line(how, "muted"), Line(found.model, "muted"))))


def _score(found: Calibration, share: float) -> str:
    try:
        return f"{found.threshold(share):.4f}"
    except InvalidInput:
        return "–"
