"""Why not that one: the reason first, then the rungs that were looked at, then the words."""

from rag_explain.render.blocks import Block, Column, Figures, Line, Section, Table, View
from rag_explain.render.views.contrast import contrast_view
from rag_explain.results.why_not import WhyNot

_NAMES = {
    "returned": "was it returned?",
    "missing": "is it in the index?",
    "chunks": "in which chunks?",
    "filter": "does the filter let it through?",
    "threshold": "is its score enough?",
    "approximate": "did the index find it?",
    "stage": "did a later stage lower it?",
    "cut": "where does it stand?",
    "unread": "was it read to its end?",
    "unknown": "can it be known?",
    "words": "what makes its score?",
}


def why_not_view(found: WhyNot, *, top: int = 6) -> View:
    """The sentence that answers, what would change it, the ladder, and the contrast with its tables first."""
    of = f" of {found.total:,}" if found.total else ""
    rank = "" if found.rank is None else f", rank {found.rank:,}{of} by exact search"
    figures = Figures("wanted", found.wanted, f"{rank}; {found.k:,} {'was' if found.k == 1 else 'were'} returned")
    reason = Line(_sentence(found.reason.text), "answer")
    rows = tuple((_NAMES[rung.name], f"{'→ ' if rung is found.reason else ''}{rung.text}") for rung in found.rungs)
    ladder: Block = Table((Column("looked at"), Column("seen")), rows)
    tried = tuple(Line(f"What would change it: {one.text}") for one in found.suggestions)
    head = Section((Line(f"Why not {found.wanted}? “{found.query}”", "muted"), figures, reason, *tried))
    ids = {"wanted": found.wanted, "got": found.got or ""}
    words = () if found.contrast is None else contrast_view(found.contrast, top=top, ids=ids)
    return (head, Section((ladder,)), *words)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}." if text else ""
