"""A contrast: both documents with their scores, the query's words, and the pairs that made the difference."""

from collections.abc import Sequence

from rag_explain.render.blocks import Column, Figures, Line, Piece, Section, Table, Texts, View, Words
from rag_explain.render.sentences import number, one_line, parts, source
from rag_explain.render.views.explanation import trust, unread, warnings
from rag_explain.results.contrast import Contrast, Difference


def contrast_view(contrast: Contrast, *, top: int = 8) -> View:
    """The `top` words of the query and the `top` pairs that made the largest difference."""
    sides = {"wanted": contrast.wanted, "got": contrast.got}
    texts = [_text("query", contrast.query)]
    texts += [_text(side, one.document, f"{one.score:.4f}") for side, one in sides.items()]
    total = contrast.difference
    figures = Figures("difference", number(total), parts(total, contrast.unattributed, "word"))
    documents = (line for side, one in sides.items() for line in unread(one, "document", f"{side}: "))
    read = *unread(contrast.got, "query"), *documents
    told = (line for side, one in sides.items() for line in (*trust(one, f"{side}: "), *warnings(one, f"{side}: ")))
    return (
        Section((*read, Texts(tuple(texts)))),
        Section((figures, Line(source(contrast.got), "muted"), *told)),
        Section((_table(contrast.query_words()[:top], "word of the query"),)),
        Section((_table(contrast.pairs(top), "query · document"),)),
    )


def _text(label: str, text: str | None, number: str = "") -> Words:
    return Words((Piece(text or ""),), label=label, number=number)


def _table(items: Sequence[Difference], title: str) -> Table:
    columns = Column(title, width=48), *(Column(name, is_number=True) for name in ("wanted", "got", "got - wanted"))
    return Table(columns, tuple((_label(item), *map(number, (item.wanted, item.got, item.value))) for item in items))


def _label(item: Difference) -> str:
    return one_line(item.query if item.document is None else f"{item.query} · {item.document}")
