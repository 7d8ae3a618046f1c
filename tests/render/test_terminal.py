"""The terminal: the figures in words, tints that need no colour, and no escape that a document brings along."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from rag_explain.render.terminal import draw, plain_text
from rag_explain.render.views.explanation import explanation_view
from rag_explain.render.views.hits import hits_view
from rag_explain.results.deferred import Deferred
from rag_explain.results.hits import Hit, Hits
from rag_explain.texts.tokens import Unit
from tests.support.samples import DOCUMENT, HOSTILE, OTHER, explain, hits

ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def rendered(renderable: object, **options: object) -> str:
    settings: dict[str, object] = {"width": 100, "force_terminal": True, "color_system": "truecolor"}
    console = Console(file=io.StringIO(), **(settings | options))  # type: ignore[arg-type]  # rich's many options
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]  # a StringIO


def test_plain_text_says_everything_without_colour() -> None:
    explanation = explain(limit=20, surrogate="the score is a reranker's")
    text = str(explanation)
    shown = explanation.by_word()
    assert "\x1b" not in text
    assert "How do I reset a forgotten bank password?" in text
    assert f"score {explanation.score:.4f} = {shown.score - shown.unattributed:+.4f} words" in text
    assert f"{shown.unattributed:+.4f} no word" in text
    assert "adds up to the score, gap " in text
    assert "bilrp · all-MiniLM-L6-v2 · layer 0" in text
    assert "! Stand-in: the score is a reranker's" in text
    assert text.startswith("! The encoder read only the first 10 of 90 characters of the document")
    assert "[not read by the encoder:" in " ".join(text.split())
    first = shown.top_pairs(1)[0]
    assert re.search(rf"{first.query.text} +{first.document.text} +\{first.value:+.4f} +{first.share:.1%}", text)
    assert "of all pairs" in text
    assert "% of the score" not in text


def test_what_is_against_the_score_looks_different_without_colour() -> None:
    explanation = explain()
    text = plain_text(explanation_view(explanation, top=400))
    against = [line for line in text.splitlines() if re.search(r"-0\.\d{4} +\d", line)]
    assert against
    assert not any("━" in line for line in against)


def test_words_are_tinted_by_saliency() -> None:
    output = rendered(explain())
    strong = re.search(r"\x1b\[([0-9;]*)mpassword\x1b\[0m", output)
    assert strong is not None
    assert "48;2;" in strong[1]  # the strongest word is reversed
    assert re.search(r"(?<!m)your ", output)  # a weak one is left alone
    assert "38;2" not in rendered(explain(), color_system=None)


@pytest.mark.parametrize(
    ("by", "found"), [("token", "[CLS]"), ("word", "password"), ("sentence", "Cards are not affected.")]
)
def test_units(by: Unit, found: str) -> None:
    assert found in plain_text(explanation_view(explain(), by=by, top=300))


def test_top_chooses_how_many_pairs() -> None:
    shown = {top: plain_text(explanation_view(explain(), top=top)) for top in (0, 3, 12)}
    assert {top: len(re.findall(r"\.\d%", text)) for top, text in shown.items()} == {0: 0, 3: 3, 12: 12}
    words = explain().by_word()
    share = 1 - sum(pair.share for pair in words.top_pairs(3))
    assert f"{words.pairs.size - 3} others: {share:.0%}" in shown[3]


def test_hits_share_one_scale_and_say_why_one_is_not_explained() -> None:
    found = list(hits())
    found.append(Hit(id="doc-3", text=OTHER, rank=3, score=0.1, metric="cosine"))

    def fail() -> None:
        raise RuntimeError("boom")

    found.append(Hit(id="doc-4", text=None, rank=4, score=0.1, metric="cosine", handle=Deferred(fail)))  # type: ignore[arg-type]
    text = ESCAPES.sub("", rendered(draw(hits_view(found))))
    assert text.count("How do I reset") == 1
    for part in ("doc-1", "doc-2", "No explanation (skipped): not asked for", "(failed): RuntimeError: boom"):
        assert part in text
    alone = rendered(draw(hits_view([hits()[1]])))
    # Beside a document that carries much more, the same word is no longer among the strongest.
    assert re.search(r"\x1b\[1;38;2;255;255;255;48;[0-9;]*mbank", alone)
    assert not re.search(r"\x1b\[1;38;2;255;255;255;48;[0-9;]*mbank\x1b\[0m was", rendered(draw(hits_view(hits()))))


def test_hits_render_themselves() -> None:
    assert "doc-1" in rendered(hits())
    assert "no hits" in rendered(Hits())


def test_narrow_terminals_are_no_problem() -> None:
    lines = ESCAPES.sub("", rendered(explain(), width=40)).splitlines()
    assert max(map(len, lines)) <= 40


def test_hostile_documents_send_no_escape_to_the_terminal() -> None:
    document = "\n".join(HOSTILE) + " [bold red]markup[/] [link=http://x]y[/link]"
    explanation = explain(document=document, surrogate="\x1b[31mred", model="\x1b]0;owned\x07")
    for by in ("token", "word", "sentence"):
        text = plain_text(explanation_view(explanation, by=by, top=500))  # type: ignore[arg-type]  # the literals above
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202d\u202e\ud800-\udfff]", text)
        assert "[bold red]" in plain_text(explanation_view(explanation, top=0))
    output = rendered(draw(explanation_view(explanation)))
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", ESCAPES.sub("", output))
    hit = Hit(id="\x1b[2J", text=None, rank=1, score=0.0, metric="\x1b[1m", handle=Deferred.ready(explanation))
    assert "\x1b[2J" not in rendered(draw(hits_view([hit])))


def test_an_explanation_without_words() -> None:
    assert "score" in str(explain(query="", document=""))
    assert DOCUMENT[:10] in str(explain(query="")).replace("\n", " ")
