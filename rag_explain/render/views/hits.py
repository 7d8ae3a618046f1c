"""Hits one below the other, with their words tinted on one scale for each method: methods do not share a unit."""

from __future__ import annotations

from collections.abc import Iterable

from rag_explain.render import sentences
from rag_explain.render.blocks import Block, Labelled, Legend, Line, Piece, Section, Texts, View, Words
from rag_explain.render.pieces import in_unit, pieces
from rag_explain.render.views.explanation import figures, key, pairs, strongest, warnings, words
from rag_explain.results.deferred import load
from rag_explain.results.explanation import Explanation
from rag_explain.results.hits import Hit
from rag_explain.texts.tokens import Unit

# Pairs in a table that can be folded away.
_PAIRS = 8


def hits_view(hits: Iterable[Hit], *, top: int = 3, by: Unit | None = None) -> View:
    """Each hit with its text and its `top` strongest pairs. Pending explanations are computed, in one batch."""
    hits = tuple(hits)
    load(hit.handle for hit in hits)
    shown = [None if hit.explanation is None else in_unit(hit.explanation, by) for hit in hits]
    explained = [one for one in shown if one is not None]
    tints: dict[str, float] = {}
    bars: dict[str, float] = {}
    for one in explained:
        tints[one.method] = max(tints.get(one.method, 0.0), strongest(one.document_saliency()))
        bars[one.method] = max(bars.get(one.method, 0.0), strongest(one.pairs))
    sections = [_query(explained[0])] if explained else []
    query = explained[0].query if explained else None
    for hit, why in zip(hits, shown, strict=True):
        if why is not None and why.query != query:
            query = why.query
            sections.append(_query(why))
        body = _missing(hit) if why is None else _body(why, top, tints[why.method], bars[why.method])
        sections.append(Section(body, hit.id, hit.rank, sentences.facts(hit)))
    notes = [Line(source, "muted") for source in dict.fromkeys(map(sentences.source, explained))]
    notes += [key(one, "pairs in score units, with their share of Σ|pairs|; ") for one in explained[:1]]
    legends = (Legend(scale, f"score units: the tints of document words, {method}") for method, scale in tints.items())
    return (*sections, Section((*notes, *legends))) if hits else (Section((Line("no hits"),)),)


def _query(shown: Explanation) -> Section:
    """The query, said once for all its hits and therefore not in the tints of one of them."""
    return Section((Texts((Labelled("query", Words(pieces(shown, "query"))),)),))


def _body(shown: Explanation, top: int, tint: float, bar: float) -> tuple[Block, ...]:
    return words(shown, "document", tint), *figures(shown), *warnings(shown), *pairs(shown, _PAIRS, bar, brief=top)


def _missing(hit: Hit) -> tuple[Block, ...]:
    return Words((Piece(hit.text or ""),)), Line(sentences.missing(hit), "aside")
