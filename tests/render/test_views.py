"""What holds for every view and every drawer: one gate, one palette, one batch."""

from __future__ import annotations

import argparse
import io
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import resources
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from rag_explain.cli.output import write
from rag_explain.render import palette
from rag_explain.render.blocks import (
    Cell,
    Column,
    Facing,
    FacingRow,
    Figures,
    Fold,
    Grid,
    GridRow,
    Legend,
    Line,
    Piece,
    Section,
    Table,
    Texts,
    Words,
)
from rag_explain.render.notebook import draw as draw_notebook
from rag_explain.render.terminal import plain_text
from rag_explain.results.comparison import Compared, Comparison
from rag_explain.results.contrast import Contrast
from rag_explain.results.deferred import Deferred
from rag_explain.results.display import Viewable
from rag_explain.results.explanation import Explanation
from rag_explain.results.hits import Hit, Hits
from rag_explain.results.notices import SPELLED, UNKNOWN, Notice
from tests.support.answers import hit, reranked
from tests.support.samples import DOCUMENT, OTHER, QUERY, explain, terms

RAW = "\x1b[2J\u202eraw"
SEEN = "\ufffd[2J\ufffdraw"
EVERY_BLOCK = (
    Section((Texts((Words((Piece(RAW, 0), Piece(RAW, None, False)), (0.5,), 1.0, (RAW,), RAW, RAW),)),)),
    Section((Figures(RAW, RAW, RAW + RAW), Line(RAW), Line(RAW, "muted"), Line(RAW, "warning"))),
    Section((Table((Column(RAW), Column(RAW, is_number=True)), ((RAW, RAW),), RAW, (0.5,), 1.0), Legend(1.0, RAW))),
    Section((Words((Piece(RAW),)), Fold(RAW, (Line(RAW),))), RAW, 1, RAW),
    Section((Grid((RAW,), (RAW,), (GridRow(1, RAW, RAW, (Cell(RAW, 0.5, RAW),), (RAW,), 1.0, RAW),), 0.5),)),
    Section((Facing(RAW, RAW, RAW, (FacingRow(RAW, 0.5, -0.5, RAW, RAW),)),)),
)


@pytest.mark.parametrize(("draw", "count"), [(plain_text, 31), (draw_notebook, 37)])
def test_no_block_lets_a_raw_string_through(draw: Callable[..., str], count: int) -> None:
    shown = draw(EVERY_BLOCK)
    assert not {"\x1b", "\u202e"} & set(shown)
    assert shown.count(SEEN) == count


LOOKS: dict[str, Callable[[Hits], object]] = {
    "terminal": lambda found: Console(file=io.StringIO()).print(found),
    "notebook": lambda found: found._repr_html_(),
    "page": lambda found: found.to_html(),
    "json": lambda found: write(found, argparse.Namespace(json=True, html=None, top=3, by=None)),
    "command line": lambda found: write(found, argparse.Namespace(json=False, html=None, top=3, by=None)),
}


@pytest.mark.parametrize("look", LOOKS)
def test_looking_at_hits_computes_their_explanations_in_one_batch(look: str) -> None:
    batches: list[int] = []

    def alone() -> Explanation:
        raise AssertionError("computed on its own")

    def together(pending: Sequence[Deferred[Explanation]]) -> None:
        batches.append(len(pending))
        for one in pending:
            one.fill(explain())

    found = Hits(
        Hit(id=str(k), text=DOCUMENT, rank=k, score=0.5, metric="cosine", handle=Deferred(alone, together=together))
        for k in range(10)
    )
    repr(found)
    str(found)
    assert batches == []
    LOOKS[look](found)
    assert batches == [10]
    assert {hit.status for hit in found} == {"ready"}


def test_a_contrast_and_a_comparison_show_themselves_in_a_notebook() -> None:
    html = Contrast(explain(document=OTHER, surrogate="a reranker made the score"), explain())._repr_html_()
    contrast = "".join(ET.fromstring(html).itertext())
    for part in (QUERY, DOCUMENT[:30], OTHER[:30], "got - wanted", "no word", "wanted: Stand-in: a reranker"):
        assert part in contrast
    rows = [Compared("bilrp", explain(), 0.4), Compared("<b>", replace(explain(method="ij"), error=1e-4), 0.8)]
    comparison = Comparison.of([*rows, Compared("bti", None, 0.1, "needs <i>more</i>")])._repr_html_()
    for part in ("bilrp", "&lt;b&gt;", "refused: needs &lt;i&gt;more&lt;/i&gt;", "rank correlation", "1.00"):
        assert part in comparison


def test_hits_of_several_queries_and_methods_keep_them_apart() -> None:
    weak = explain("Another question", OTHER, method="ij")
    weak = replace(weak, matrix=weak.matrix / 100, score=weak.score / 100)
    found = [
        Hit(id=str(k), text=one.document, rank=1, score=0.5, metric="cosine", handle=Deferred.ready(one))
        for k, one in enumerate((explain(), explain(document=OTHER), weak))
    ]
    view = Hits(found)._view()
    queries = [block.rows[0] for section in view for block in section.blocks if isinstance(block, Texts)]
    assert ["".join(piece.text for piece in words.pieces) for words in queries] == [QUERY, "Another question"]
    scales = [block.scale for section in view for block in section.blocks if isinstance(block, Words)]
    assert scales[0] == scales[1] == pytest.approx(np.abs(explain().by_word().document_saliency()).max())
    assert scales[2] == pytest.approx(np.abs(weak.by_word().document_saliency()).max())


ABOUT_QUERY = Notice(UNKNOWN, "The query was not understood.", side="query")
ABOUT_DOCUMENT = Notice(SPELLED, "The document was spelled.", side="document")


def unread(document: str = DOCUMENT, **changes: object) -> Explanation:
    """An explanation with something that was not read on both sides, and a stand-in beside it."""
    return explain(document=document, surrogate="a reranker made the score", **changes).with_notices(
        ABOUT_QUERY, ABOUT_DOCUMENT
    )


def hits_of(*explanations: Explanation) -> Hits:
    return Hits(
        Hit(id=f"doc-{k}", text=one.document, rank=k, score=0.5, metric="cosine", handle=Deferred.ready(one))
        for k, one in enumerate(explanations, 1)
    )


def told(result: Viewable) -> list[str]:
    """What a terminal, a notebook and `print` show; printing hits computes nothing, and shows nothing."""
    screen = io.StringIO()
    Console(file=screen, width=200).print(result)
    media = [screen.getvalue(), result._repr_html_()]
    return [*media, str(result)] if not isinstance(result, Hits) else media


def test_what_was_not_read_comes_first_in_every_view() -> None:
    first, second = ABOUT_QUERY.text, ABOUT_DOCUMENT.text
    results = [
        unread(),
        hits_of(unread()),
        Contrast(unread(document=OTHER), unread()),
        Comparison.of(
            [Compared("bilrp", unread(), 0.4), Compared("no", None, 0.1, "refused"), Compared("ij", unread(), 1)]
        ),
    ]
    for result in results:
        for text in told(result):
            before = re.sub(r"<[^>]*>", "", text[: text.index(first)])
            assert before.strip("! \n") == "", type(result)
            assert text.count(first) == 1
            assert text.index(first) < text.index(second)
    for text in told(unread()):
        assert text.index(second) < text.index("Stand-in: a reranker made the score")


def test_hits_say_once_what_was_not_read_of_the_query_and_each_what_was_not_read_of_it() -> None:
    found = hits_of(unread(), unread(OTHER), explain("Another question", OTHER))
    for text in told(found):
        assert text.count(ABOUT_QUERY.text) == 1
        assert text.count(ABOUT_DOCUMENT.text) == 2
        one, two, three = (text.rindex(name) for name in ("doc-1", "doc-2", "doc-3"))
        assert one < text.index(ABOUT_DOCUMENT.text) < two < text.rindex(ABOUT_DOCUMENT.text) < three
    sections = page_data(found.to_html())["sections"]
    assert [section["unread"] for section in sections] == [[ABOUT_QUERY.text], []]
    shown = [card["shown"][0] for section in sections for card in section["cards"]]
    assert [one["unread"] for one in shown] == [[ABOUT_DOCUMENT.text], [ABOUT_DOCUMENT.text], []]
    assert all(ABOUT_DOCUMENT.text not in one["notices"] for one in shown)


def test_hits_whose_query_was_not_kept_say_it_beside_each() -> None:
    found = hits_of(replace(unread(), query=None), replace(explain(), query=None))
    for text in told(found):
        assert text.count(ABOUT_QUERY.text) == 1
        assert text.index("doc-1") < text.index(ABOUT_QUERY.text) < text.index("doc-2")
    (section,) = page_data(found.to_html())["sections"]
    assert section["unread"] == []
    assert [card["shown"][0]["unread"][:1] for card in section["cards"]] == [[ABOUT_QUERY.text], []]


def test_a_figure_begins_its_caption_with_what_was_not_read() -> None:
    caption = unread().plot().texts[0].get_text()
    assert caption.splitlines()[:2] == [ABOUT_QUERY.text, ABOUT_DOCUMENT.text]
    assert "score" in caption.splitlines()[2]


def page_data(page: str) -> dict[str, Any]:
    found = re.search(r'id="rag-explain-data">(.*?)</script>', page, re.S)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_the_page_has_the_colours_of_the_palette() -> None:
    style = resources.files("rag_explain.render").joinpath("page.css").read_text(encoding="utf-8")
    light, _ = re.findall(r"--for: (\d+) (\d+) (\d+); --against: (\d+) (\d+) (\d+);", style)
    assert tuple(map(int, light)) == (*palette.LIGHT.positive, *palette.LIGHT.negative)
    assert f"--ink: {palette.INK}; --muted: {palette.MUTED};" in style


def test_every_view_names_the_stage_that_ranked_a_hit() -> None:
    found = Hits([reranked(hit())])
    views = plain_text(found._view(), 200), found._repr_html_(), found.to_html()
    for view in views:
        assert "rank 1 by Reranker (2.0000)" in view
        assert "VectorIndexRetriever" in view  # in the table of stages
        assert "ranked by Reranker, not by this encoder" in view.replace("&#x27;", "'")


def test_terms_are_shown_with_what_is_known_of_each() -> None:
    shown = str(explain(terms=terms(count=25)))
    assert "length factor" in shown
    lines = [line.split() for line in shown.splitlines() if line.startswith("password")]
    assert [line[2] for line in lines if line[2].isdigit()] == [str(k) for k in range(24, 4, -1)]
    absent = str(explain(terms=terms(count=1)))
    assert "–" in absent
    assert "+0.0000" in absent
