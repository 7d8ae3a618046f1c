"""A contrast: what made the difference in one sentence, then the query's words and the pairs, then both texts, cut."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rag_explain.render.blocks import (
    Block,
    Column,
    Facing,
    FacingRow,
    Figures,
    Line,
    Piece,
    Section,
    Table,
    Texts,
    View,
    Words,
)
from rag_explain.render.sentences import across, number, one_line, parts, place, source
from rag_explain.render.views.explanation import cut, strongest, trust, unread, warnings, words
from rag_explain.results.contrast import NO_WORD, Contrast, Difference, StageDifference
from rag_explain.results.explanation import Explanation
from rag_explain.results.stages import Stage

_SHOWN = 400  # characters of a document
_MET, _NAME = 24, 40  # of a word of it, and of its id


def contrast_view(contrast: Contrast, *, top: int = 8, ids: Mapping[str, str] | None = None) -> View:
    """The `top` words of the query and the `top` pairs that made the largest difference; `ids` name either side."""
    sides = {"wanted": contrast.wanted, "got": contrast.got}
    total = contrast.difference
    figures = Figures("difference", number(total), parts(total, _no_word(contrast), "word"))
    documents = (line for side, one in sides.items() for line in unread(one, "document", f"{side}: "))
    read = *unread(contrast.got, "query"), *documents
    told = (line for side, one in sides.items() for line in (*trust(one, f"{side}: "), *warnings(one, f"{side}: ")))
    scale = max(strongest(one.document_saliency()) for one in sides.values())
    query = Words((Piece(contrast.query or ""),), label="query")
    texts = Texts((query, *(_text(side, sides[side], scale, ids) for side in ("got", "wanted"))))
    return (
        Section((*read, Line(decided(contrast), "answer"), figures, Line(source(contrast.got), "muted"), *told)),
        *((Section(_stages(contrast.stages)),) if contrast.stages else ()),
        Section((texts,)),
        Section((_words(contrast, top),)),
        Section((_table(contrast.pairs(top), "query · document"),)),
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
    total, unattributed = contrast.difference, _no_word(contrast)
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


def _no_word(contrast: Contrast) -> float:
    """What no word of the query carries of the difference: the last row of the table, so that figures agree."""
    last = contrast.query_words()[-1]
    return last.value if contrast.got.additive else 0.0


def _text(side: str, one: Explanation, scale: float, ids: Mapping[str, str] | None) -> Words:
    label = side if ids is None else f"{side}: {one_line(ids[side], _NAME)}"
    return replace(cut(words(one, "document", scale), _SHOWN), label=label, number=f"{one.score:.4f}")


def _words(contrast: Contrast, top: int) -> Facing:
    """The words of the query that made the largest difference, with what each met most; then what no word carries."""
    found = contrast.query_words()
    shown = found[:top] if len(found) <= top or not contrast.got.additive else [*found[: top - 1], found[-1]]
    got, wanted = _met(contrast.got), _met(contrast.wanted)
    rows = tuple(
        FacingRow(one_line(one.query), one.got, one.wanted, got.get(one.query, ""), wanted.get(one.query, ""))
        for one in shown
    )
    return Facing("got", "word of the query", "wanted", rows)


def _met(one: Explanation) -> dict[str, str]:
    """For each word of the query, the word of the document with which its pair is largest."""
    if not one.pairs.size:
        return {}
    best = zip(one.query_tokens, one.pairs.argmax(axis=1).tolist(), one.pairs.max(axis=1).tolist(), strict=True)
    return {word.label: one_line(one.document_tokens[at].label, _MET) for word, at, value in best if value > 0}


def _table(items: Sequence[Difference], title: str) -> Table:
    sides = (Column(side, is_number=True, is_spare=True) for side in ("wanted", "got"))
    columns = Column(title, width=48), *sides, Column("got - wanted", is_number=True)
    cells = ((_label(one), _known(one.wanted), _known(one.got), number(one.value)) for one in items)
    return Table(columns, tuple(cells))


def _known(value: float) -> str:
    """A dash for a word that is not in this document."""
    return number(value) if value else "–"


def _label(item: Difference) -> str:
    return one_line(item.query if item.document is None else f"{item.query} · {item.document}")
