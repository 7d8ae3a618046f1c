"""Hits by document: its chunks in its own order, with their places in it, tinted on one scale."""

from collections.abc import Iterator
from dataclasses import replace

from rag_explain.render import sentences
from rag_explain.render.blocks import Block, Line, Piece, Section, View, Words
from rag_explain.render.views.explanation import in_unit, strongest, unread, warnings, words
from rag_explain.results.deferred import load
from rag_explain.results.documents import Document, Documents
from rag_explain.results.hits import Hit


def documents_view(found: Documents) -> View:
    """One section for each document. Pending explanations are computed, in one batch."""
    hits = [hit for one in found.documents for hit in one.hits]
    load(hit.handle for hit in hits)
    shown = [in_unit(hit.explanation) for hit in hits if hit.explanation is not None]
    scale = max((strongest(one.document_saliency()) for one in shown), default=0.0)
    query = [Section((Words((Piece(shown[0].query),)),))] if shown and shown[0].query else []
    sections = [Section(tuple(_blocks(one, scale)), one.id, one.rank, _facts(one)) for one in found.documents]
    return (*query, *sections) if sections else (Section((Line("no hits"),)),)


def _facts(document: Document) -> str:
    count = len(document.hits)
    return f"{count} chunks" if count > 1 else sentences.facts(document.hits[0])


def _blocks(document: Document, scale: float) -> Iterator[Block]:
    end: int | None = 0
    for hit, start in zip(document.hits, document.starts, strict=True):
        text = hit.text or ""
        if start is not None and end is not None and start > end:
            yield Line(f"… {start - end:,} characters that were not returned", "muted")
        where = "" if start is None else f"characters {start:,} to {start + len(text):,} · "
        if len(document.hits) > 1 or where:
            yield Line(f"{where}{hit.id} · rank {hit.rank} · {sentences.facts(hit)}", "muted")
        yield from _chunk(hit, scale, 0 if start is None or end is None else max(0, end - start))
        end = None if start is None else max(end or 0, start + len(text))


def _chunk(hit: Hit, scale: float, above: int) -> Iterator[Block]:
    """The text of a chunk, without its first characters where the chunk before it has them too."""
    if hit.explanation is None:
        yield Words((Piece((hit.text or "")[above:]),))
        yield Line(sentences.missing(hit), "aside")
        return
    shown = in_unit(hit.explanation)
    tinted, kept = words(shown, "document", scale), []
    for piece in tinted.pieces:
        if above < len(piece.text):
            kept.append(replace(piece, text=piece.text[above:]))
        above = max(0, above - len(piece.text))
    yield from unread(shown, "document")
    yield replace(tinted, pieces=tuple(kept))
    yield from warnings(shown)
