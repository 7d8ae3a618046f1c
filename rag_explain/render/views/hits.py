"""Hits one below the other, with their words tinted on one scale for each method: methods do not share a unit."""

from collections.abc import Iterable, Mapping, Sequence

from rag_explain.render import sentences
from rag_explain.render.blocks import Block, Line, Piece, Section, Texts, View, Words
from rag_explain.render.views.explanation import (
    figures,
    in_unit,
    key,
    legend,
    pairs,
    strongest,
    trust,
    unread,
    warnings,
    words,
)
from rag_explain.render.views.overview import overview_view
from rag_explain.render.views.stages import load_stages, stages_view
from rag_explain.results.deferred import load
from rag_explain.results.explanation import Explanation
from rag_explain.results.hits import Hit, Hits
from rag_explain.texts.tokens import Unit

# Pairs in a table that can be folded away.
_PAIRS = 8


def hits_view(hits: Iterable[Hit], *, top: int = 3, by: Unit | None = None) -> View:
    """Each hit with its text and its `top` strongest pairs. Pending explanations are computed, in one batch."""
    hits = tuple(hits)
    load(hit.handle for hit in hits)
    load_stages(hits)
    shown = [None if hit.explanation is None else in_unit(hit.explanation, by) for hit in hits]
    explained = [one for one in shown if one is not None]
    scales = _scales(explained)
    sections = [_query(explained, explained[0].query)] if explained else []
    query = explained[0].query if explained else None
    if explained:
        sections += _overview(hits, query)
    line = sentences.background_line(hits)
    for at, (hit, why) in enumerate(zip(hits, shown, strict=True)):
        if line is not None and line[0] == at:
            sections.append(Section((Line(f"── {line[1]} ──", "aside"),)))
        if why is not None and why.query != query:
            query = why.query
            sections += _query(explained, query), *_overview(hits, query)
        body: tuple[Block, ...] = Words((Piece(hit.text or ""),)), Line(sentences.missing(hit), "aside")
        if why is not None:
            tint, bar = scales[why.method]
            unseen, text = unread(why, None if why.query is None else "document"), words(why, "document", tint)
            body = *unseen, text, *figures(why), *trust(why), *warnings(why), *pairs(why, _PAIRS, bar, brief=top)
        sections.append(Section((*stages_view(hit), *body), hit.id, hit.rank, sentences.facts(hit)))
    return (*sections, _notes(explained, scales)) if hits else (Section((Line("no hits"),)),)


def _scales(explained: Iterable[Explanation]) -> dict[str, tuple[float, float]]:
    """For each method, what gets the strongest tint and what gets the longest bar."""
    scales: dict[str, tuple[float, float]] = {}
    for one in explained:
        tint, bar = scales.get(one.method, (0.0, 0.0))
        scales[one.method] = max(tint, strongest(one.document_saliency())), max(bar, strongest(one.pairs))
    return scales


def _notes(explained: Sequence[Explanation], scales: Mapping[str, tuple[float, float]]) -> Section:
    """What holds for all hits, said once."""
    sources = (Line(source, "muted") for source in dict.fromkeys(map(sentences.source, explained)))
    shares = (
        f"pairs in {sentences.units(explained[0])}, with their share of the sum of all |pairs|; " if explained else ""
    )
    keys = (key(one, shares) for one in explained[:1])
    first = {one.method: one for one in reversed(explained)}
    return Section((*sources, *keys, *(legend(tint, first[method]) for method, (tint, _) in scales.items())))


def _overview(hits: Iterable[Hit], query: str | None) -> View:
    """What the words of one query found in its hits, where there are several."""
    found = Hits(hit for hit in hits if hit.explanation is not None and hit.explanation.query == query)
    return overview_view(found.overview()) if len(found) > 1 and query is not None else ()


def _query(explained: Sequence[Explanation], query: str | None) -> Section:
    """The query, said once for all its hits and therefore not in the tints of one of them."""
    shown = [one for one in explained if one.query == query]
    read = dict.fromkeys(line for one in shown if query is not None for line in unread(one, "query"))
    return Section((*read, Texts((words(shown[0], "query"),))))
