"""A contrast: what made the difference in one sentence, then the query's words and the pairs, then both texts, cut."""

from collections.abc import Sequence

from rag_explain.render.blocks import Block, Column, Figures, Line, Piece, Section, Table, Texts, View, Words
from rag_explain.render.sentences import across, number, one_line, parts, place, source
from rag_explain.render.views.explanation import trust, unread, warnings
from rag_explain.results.contrast import NO_WORD, Contrast, Difference, StageDifference
from rag_explain.results.stages import Stage

_SHOWN = 400  # characters of a document


def contrast_view(contrast: Contrast, *, top: int = 8) -> View:
    """The `top` words of the query and the `top` pairs that made the largest difference."""
    sides = {"wanted": contrast.wanted, "got": contrast.got}
    total = contrast.difference
    figures = Figures("difference", number(total), parts(total, contrast.unattributed, "word"))
    documents = (line for side, one in sides.items() for line in unread(one, "document", f"{side}: "))
    read = *unread(contrast.got, "query"), *documents
    told = (line for side, one in sides.items() for line in (*trust(one, f"{side}: "), *warnings(one, f"{side}: ")))
    texts = [_text("query", contrast.query)]
    texts += [_text(side, one.document, f"{one.score:.4f}") for side, one in sides.items()]
    return (
        Section((*read, Line(decided(contrast)), figures, Line(source(contrast.got), "muted"), *told)),
        *((Section(_stages(contrast.stages)),) if contrast.stages else ()),
        Section((_table(contrast.query_words()[:top], "word of the query"),)),
        Section((_table(contrast.pairs(top), "query · document"),)),
        Section((Texts(tuple(texts)),)),
    )


def _stages(stages: Sequence[StageDifference]) -> tuple[Block, ...]:
    """In words, and as a table: ranks, scores and what each leg adds."""
    columns = Column("stage", width=48), *(Column(name, is_number=True) for name in ("wanted", "got", "got adds more"))
    rows = tuple((one_line(one.name), _standing(one.wanted), _standing(one.got), _more(one)) for one in stages)
    return (*map(Line, across(stages)), Table(columns, rows))


def _standing(stage: Stage | None) -> str:
    if stage is None:
        return ""
    score = "" if stage.score is None else f"{stage.score:.4f}"
    return score if stage.kind == "term" else " · ".join(part for part in (place(stage.rank), score) if part)


def _more(one: StageDifference) -> str:
    shares = [stage.contribution for stage in (one.wanted, one.got) if stage is not None]
    known = [share for share in shares if share is not None]
    return number(known[1] - known[0]) if len(known) == 2 else ""


def decided(contrast: Contrast) -> str:
    """What made the difference, in one sentence: whether it was a word at all comes first."""
    total, unattributed = contrast.difference, contrast.unattributed
    if not contrast.got.additive:
        return f"{contrast.got.method} ranks pairs and does not split the scores: that of the difference is not known"
    if not total:
        return "both have the same score"
    winner, loser = ("got", "wanted") if total > 0 else ("wanted", "got")
    share = unattributed / total
    if share > 0.5:
        most = "more than all" if share > 1 else f"{share:.0%}"
        return f"{most} of the difference is in no word: the words alone would not tell the two apart like this"
    words = [item for item in contrast.query_words() if item.query != NO_WORD and item.value * total > 0]
    if not words:
        return f"no word of the query speaks for {winner}"
    best = max(words, key=lambda item: abs(item.value))
    against = f"; {-share:.0%} as much as the difference is in no word, and speaks for {loser}" if share < -0.5 else ""
    return f"the word that speaks most for {winner} is “{one_line(best.query)}” ({number(best.value)}){against}"


def _text(label: str, text: str | None, number: str = "") -> Words:
    shown = text if text is None or len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
    return Words((Piece(shown or ""),), label=label, number=number)


def _table(items: Sequence[Difference], title: str) -> Table:
    columns = Column(title, width=48), *(Column(name, is_number=True) for name in ("wanted", "got", "got - wanted"))
    return Table(columns, tuple((_label(item), *map(number, (item.wanted, item.got, item.value))) for item in items))


def _label(item: Difference) -> str:
    return one_line(item.query if item.document is None else f"{item.query} · {item.document}")
