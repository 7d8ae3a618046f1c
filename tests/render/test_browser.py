"""The page driven in a real Chromium: hover, keyboard, methods, hostile documents, no request, no jump."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rag_explain.render import sentences
from rag_explain.render.page import write_page
from rag_explain.results.calibration import Calibration
from rag_explain.results.comparison import Compared, Comparison
from rag_explain.results.contrast import Contrast
from rag_explain.results.deferred import Deferred, Parts
from rag_explain.results.hits import Hits
from rag_explain.results.spans import ValuedSpan
from rag_explain.results.stages import Stage
from rag_explain.results.what_if import Change, WhatIf
from rag_explain.results.why_not import Rung, Suggestion, WhyNot
from rag_explain.results.x_ray import XRay
from tests.support.samples import DOCUMENT, HOSTILE, OTHER, QUERY, explain, hits, hostile, terms

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt-get install chromium")

ARGUMENTS = [
    "--headless",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
LONG = "\n\n".join(
    f"Part {k} of the manual says how to reset a password. The bank sends a letter about account {k}. "
    "Nobody reads it twice, and the branch keeps a copy for ten years."
    for k in range(14)
)

# How readers set their machines: fonts, sizes, zoom (fewer CSS pixels) and windows. No font is named, so that none has
# to be installed; the spacing is what WCAG 1.4.12 lets a reader ask for, and moves words as a wider font would.
LOOKS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "monospace": {"style": "* { font-family: monospace !important; }", "width": 900},
    "large serif": {"style": ":root { font-size: 25px; } * { font-family: serif !important; }", "width": 1000},
    "small in a wide window": {"style": ":root { font-size: 11px; }", "width": 1900},
    "wide spacing": {
        "style": "* { letter-spacing: .12em !important; word-spacing: .16em !important; line-height: 1.5 !important; }",
        "width": 1024,
    },
    "zoomed": {"width": 640, "height": 360, "device_scale_factor": 2},
    "telephone": {"width": 360, "height": 740},
    "large on a telephone": {"style": ":root { font-size: 25px; }", "width": 360, "height": 740},
}
looks = pytest.mark.parametrize("look", list(LOOKS.values()), ids=list(LOOKS))

# Milliseconds after which a browser that does not answer counts as hanging: far more than a busy machine needs.
PATIENCE = 300_000

Open = Callable[..., Any]
expect = sync_api.expect
expect.set_options(timeout=PATIENCE)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:

        def launch(sandbox: bool) -> Any:
            return playwright.chromium.launch(
                executable_path=CHROMIUM, args=ARGUMENTS, chromium_sandbox=sandbox, timeout=PATIENCE
            )

        try:
            launched = launch(sandbox=os.geteuid() != 0)  # Chromium refuses to sandbox root
        except sync_api.Error:  # some containers forbid the namespaces that the sandbox is made of
            launched = launch(sandbox=False)
        yield launched
        launched.close()


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Opens HTML as a file; at the end nothing was complained about and nothing was fetched."""
    complaints: list[str] = []
    requests: list[str] = []
    contexts: list[Any] = []

    def open_(
        html: str,
        *,
        width: int = 1200,
        height: int = 900,
        scheme: str = "light",
        style: str = "",
        address: str = "",
        **options: Any,
    ) -> Any:
        path = tmp_path / f"page-{len(contexts)}.html"
        path.write_text(html, encoding="utf-8")
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, **options)
        context.set_default_timeout(PATIENCE)
        contexts.append(context)
        page = context.new_page()
        if style:  # in force before the page's script runs; unlike a <style>, its policy lets this pass
            page.add_init_script(
                f"const sheet = new CSSStyleSheet(); sheet.replaceSync({json.dumps(style)});"
                "document.adoptedStyleSheets = [sheet];"
            )
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.on("dialog", lambda dialog: complaints.append(dialog.message))
        page.goto(path.as_uri() + address)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert complaints == []
    assert [url for url in requests if not url.startswith("file://")] == []
    assert len(requests) == len(contexts)  # the page itself and nothing more


def tint(locator: Any) -> float:
    return float(locator.evaluate("node => parseFloat(node.style.getPropertyValue('--a'))"))


def word(page: Any, text: str, number: int = 0) -> Any:
    return page.locator(".text .w").get_by_text(text, exact=True).nth(number)


def asked(page: Any, text: str) -> Any:
    return page.locator(".words button").filter(has_text=text)


def caption(page: Any) -> Any:
    """Of the table of pairs. The page draws it last, and for a card in sight: expect it before reading the rest."""
    return page.locator(".pairs caption")


def is_focused(page: Any, text: str) -> None:
    expect(page.locator(":focus")).to_have_text(text)


def test_the_trust_line_is_there_where_there_is_doubt_and_only_there(show: Open) -> None:
    doubted = explain(document=DOCUMENT.replace("cannot", "must"))  # nothing is negated beside its strongest word
    quiet = replace(doubted, matrix=doubted.matrix / 2, score=doubted.score / 2)
    expect(show(doubted.to_html()).locator(".trust")).to_have_text(sentences.trust(doubted))
    expect(show(quiet.to_html()).locator(".trust")).to_have_count(0)


def test_the_figures_are_shown_in_score_units(show: Open) -> None:
    explanation = explain()
    page = show(explanation.to_html())
    shown = explanation.by_word()
    sums = page.locator(".sum").inner_text().replace("−", "-")
    assert f"{shown.score:.4f}" in sums
    assert f"{shown.unattributed:+.4f}" in sums
    assert "no word" in sums
    assert "checked ✓" in sums
    assert "adds up to the score, gap" in page.locator(".sum .check").first.get_attribute("title")
    assert page.locator(".text").inner_text() == DOCUMENT
    first = page.locator(".pairs tbody tr").first.inner_text()
    best = shown.top_pairs(1)[0]
    assert f"{best.value:+.4f}" in first
    assert f"{100 * best.share:.1f} %" in first


def test_hovering_a_query_word_shows_what_it_met(show: Open) -> None:
    explanation = explain().by_word()
    page = show(explanation.to_html())
    before = tint(word(page, "reset"))
    asked(page, "reset").hover()
    pair = next(p for p in explanation.top_pairs(9) if p.query.text == p.document.text == "reset")
    strongest = explanation.top_pairs(1)[0].value
    expect(caption(page)).to_have_text("Pairs of “reset”")
    assert tint(word(page, "reset")) == pytest.approx((pair.value / strongest) ** 0.75, abs=2e-3)
    assert tint(word(page, "password")) < 0.2
    assert page.locator(".status").inner_text().startswith("reset carries +")
    page.mouse.move(1, 1)
    expect(caption(page)).to_have_text("Strongest pairs")
    assert tint(word(page, "reset")) == before


def test_hovering_a_document_word_shows_the_query_words_it_met(show: Open) -> None:
    explanation = explain().by_word()
    page = show(explanation.to_html())
    word(page, "bank's").hover()
    column = next(i for i, token in enumerate(explanation.document_tokens) if token.text == "bank's")
    row = next(i for i, token in enumerate(explanation.query_tokens) if token.text == "bank")
    assert asked(page, "bank").inner_text().split() == ["bank", f"{explanation.pairs[row, column]:+.4f}"]
    assert tint(asked(page, "bank")) > 3 * tint(asked(page, "reset"))
    assert "met bank +" in page.locator(".status").inner_text()


def test_a_cell_and_a_row_of_the_tables_point_at_their_words(show: Open) -> None:
    page = show(explain().to_html())
    page.locator(".pairs tbody tr").nth(2).hover()
    expect(page.locator(".text .w.on")).to_have_count(1)
    expect(page.locator(".words button.on")).to_have_count(1)
    page.locator(".grid td.tint").nth(7).hover()
    assert " met " in page.locator(".status").inner_text()
    assert "of all pairs" in page.locator(".status").inner_text()


def test_alignments_show_the_cosine_of_a_pair_beside_what_it_carries(show: Open) -> None:
    explanation = explain(method="alignment")
    similarities = np.full(explanation.pairs.shape, 0.25, dtype=np.float32)
    page = show(explain(method="alignment", similarities=similarities).to_html())
    page.locator(".grid td.tint").nth(7).hover()
    assert page.locator(".status").inner_text().endswith(", cosine 0.250")


@looks
def test_everything_works_from_the_keyboard(show: Open, look: dict[str, Any]) -> None:
    page = show(explain(document=f"{DOCUMENT}\n\n{OTHER}").to_html(), **look)
    page.keyboard.press("Tab")
    expect(page.locator(":focus")).to_have_text("Copy as Markdown")
    page.keyboard.press("Tab")
    expect(page.locator(":focus")).to_have_text(re.compile("^How"))
    expect(caption(page)).to_have_text("Pairs of “How”")
    page.keyboard.press("Enter")
    expect(asked(page, "How")).to_have_attribute("aria-pressed", "true")
    page.keyboard.press("Escape")
    expect(asked(page, "How")).to_have_attribute("aria-pressed", "false")
    for _ in range(page.locator(".words button").count()):
        page.keyboard.press("Tab")
    is_focused(page, "If")
    page.keyboard.press("ArrowRight")
    is_focused(page, "you")
    assert page.locator("[aria-live]").inner_text().startswith("you carries ")
    page.keyboard.press("ArrowDown")
    below = page.evaluate("document.activeElement.getBoundingClientRect().top")
    assert below > word(page, "you").bounding_box()["y"]
    page.keyboard.press("ArrowUp")
    is_focused(page, "you")
    page.keyboard.press("End")
    is_focused(page, ".")
    page.keyboard.press("ArrowRight")  # there is nothing after the last word
    page.keyboard.press("Home")
    is_focused(page, "If")
    assert page.locator(".text .w[tabindex]").count() == 1  # one stop for the whole text
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.tagName") == "SUMMARY"


# For each word: the line it begins on, the lines that down leads to, and the word that as many times up comes back to.
LINES = """() => {
  const words = [...document.querySelectorAll(".text .w")];
  const tops = words.map((word) => Math.round(word.getClientRects()[0].top));
  const lines = [...new Set(tops)].sort((a, b) => a - b);
  const press = (key) => {
    document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
    return words.indexOf(document.activeElement);
  };
  words[0].focus({ preventScroll: true });
  return words.map((_, start) => {
    const line = lines.indexOf(tops[start]);
    const presses = Array.from({ length: Math.min(3, lines.length - 1 - line) });
    const down = presses.map(() => lines.indexOf(tops[press("ArrowDown")]));
    const up = presses.map(() => press("ArrowUp"));
    press("ArrowRight");
    return { line, down, back: up.at(-1) ?? start };
  });
}"""


@looks
def test_up_comes_back_to_the_word_that_down_left(show: Open, look: dict[str, Any]) -> None:
    page = show(explain(document=f"{DOCUMENT}\n\nYes. {'é' * 300}\n\n\n{OTHER}").to_html(), **look)
    found = page.evaluate(LINES)
    last = found[-1]["line"]
    assert last >= 2
    assert [start["back"] for start in found] == list(range(len(found)))
    for start in found:  # no line that a word begins on is left out
        assert start["down"] == list(range(start["line"] + 1, min(start["line"] + 3, last) + 1))


@pytest.mark.parametrize("style", ["", *(look["style"] for look in LOOKS.values() if "style" in look)])
def test_the_column_is_kept_over_short_lines_until_another_move(show: Open, style: str) -> None:
    page = show(
        explain(document="one two three four\ni\none two three four\ni\none two three four").to_html(), style=style
    )
    words = page.locator(".text .w")

    def press(*keys: str) -> None:
        for key in keys:
            page.keyboard.press(key)

    def at(index: int) -> None:
        expect(words.nth(index)).to_be_focused()

    def down_to_the_short_line() -> None:
        words.nth(0).click()
        page.locator(".text .w[tabindex]").focus()
        press("Home", "ArrowRight", "ArrowRight", "ArrowRight", "ArrowDown")
        at(4)

    down_to_the_short_line()
    press("ArrowDown")
    at(8)
    press("Enter", "ArrowDown", "ArrowDown", "ArrowDown", "ArrowUp", "ArrowUp")  # a word is kept, the text has an end
    at(8)
    down_to_the_short_line()
    press("ArrowRight", "ArrowLeft", "ArrowDown")
    at(5)
    down_to_the_short_line()
    words.nth(4).click()
    press("ArrowDown")
    at(5)
    down_to_the_short_line()
    press("Tab", "Shift+Tab")
    at(4)
    press("ArrowDown")
    at(5)


def test_right_to_left_texts_read_and_move_from_right_to_left(show: Open) -> None:
    page = show(explain("كيف أعيد تعيين كلمة المرور؟", "افتح صفحة تسجيل الدخول").to_html())
    first = page.locator(".text .w").first
    first.focus()
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("document.activeElement.textContent") == "صفحة"
    assert page.evaluate("document.activeElement.getBoundingClientRect().left") < first.bounding_box()["x"]
    number = page.locator(".words button .num").first
    assert number.evaluate("node => getComputedStyle(node).direction") == "ltr"


def test_a_click_keeps_a_word_until_it_is_clicked_again(show: Open) -> None:
    page = show(explain().to_html())
    word(page, "Forgot").click()
    page.mouse.move(1, 1)
    expect(caption(page)).to_have_text("Pairs of “Forgot”")
    word(page, "Forgot").click()
    page.mouse.move(1, 1)
    expect(caption(page)).to_have_text("Strongest pairs")


def test_a_finger_can_use_it_on_a_narrow_screen(show: Open) -> None:
    page = show(write_page(hits()), width=360, height=740, has_touch=True, is_mobile=True)
    assert page.locator(".status").inner_text() == "Tap a word to see what it met."
    word(page, "password").tap()
    expect(caption(page).first).to_have_text("Pairs of “password”")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_the_method_switch(show: Open) -> None:
    one, other = explain(), explain(method="ij")
    page = show(write_page([[one, other]]))
    assert f"{one.score:.4f}" in page.locator(".sum").inner_text()
    page.get_by_label("ij").check()
    assert f"{other.score:.4f}" in page.locator(".sum").inner_text()
    assert "ij · all-MiniLM" in page.locator(".sum").inner_text()
    page.keyboard.press("ArrowLeft")
    assert f"{one.score:.4f}" in page.locator(".sum").inner_text()
    assert show(one.to_html()).locator(".switch").count() == 0


def test_hits_share_one_scale_and_the_query_follows_the_hit(show: Open) -> None:
    both = show(write_page(hits()))
    alone = show(write_page([hits()[1]]))
    assert tint(word(both, "bank")) < tint(word(alone, "bank"))
    assert tint(both.locator(".text .w").get_by_text("password", exact=True).nth(0)) > 0.9
    cards = both.locator(".card")
    assert "active" in cards.nth(0).get_attribute("class")
    cards.nth(1).locator(".w").first.hover()
    assert "active" in cards.nth(1).get_attribute("class")
    asked(both, "bank").hover()
    for card in cards.all():  # a card out of sight is brought up to date when it comes into sight
        card.locator(".pairs").scroll_into_view_if_needed()
        expect(caption(card)).to_have_text("Pairs of “bank”")


def test_documents_out_of_sight_are_tinted_when_they_come_into_sight(show: Open) -> None:
    page = show(write_page(hits(documents=[f"{DOCUMENT} {k}" for k in range(12)])), height=600)
    asked(page, "reset").click()
    page.mouse.move(1, 1)
    last = page.locator(".card").last
    last.scroll_into_view_if_needed()
    expect(caption(last)).to_have_text("Pairs of “reset”")
    assert tint(last.locator(".w").get_by_text("password", exact=True).first) < 0.2
    assert tint(last.locator(".w").get_by_text("reset", exact=True)) > 0.4


def test_negative_words_differ_by_more_than_colour(show: Open) -> None:
    matrix = explain().matrix.copy()
    matrix[:, 8:12] *= -3
    page = show(explain(matrix=matrix).to_html())
    minus = page.locator(".text .w.minus.marked")
    assert minus.count() > 0
    assert "underline" in minus.first.evaluate("node => getComputedStyle(node).textDecorationLine")
    plus = page.locator(".text .w:not(.minus)").first
    assert minus.first.evaluate("node => getComputedStyle(node).backgroundColor") != plus.evaluate(
        "node => getComputedStyle(node).backgroundColor"
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_strongest_tint_keeps_its_text_legible(show: Open, scheme: str) -> None:
    page = show(explain().to_html(), scheme=scheme)
    ratio = page.evaluate(
        """() => {
          const parse = (colour) => colour.match(/[\\d.]+/g).map(Number);
          const words = [...document.querySelectorAll(".text .w")];
          const strong = words.find((word) => word.style.getPropertyValue("--a") === "1.000");
          const card = parse(getComputedStyle(document.querySelector(".card")).backgroundColor);
          const ink = parse(getComputedStyle(strong).color);
          const worst = ["rgb(var(--for) / var(--strength))", "rgb(var(--against) / var(--strength))"].map((paint) => {
            strong.style.transition = "none";
            strong.style.backgroundColor = paint;
            const [r, g, b, a = 1] = parse(getComputedStyle(strong).backgroundColor);
            const under = [r, g, b].map((value, k) => value * a + card[k] * (1 - a));
            const light = (rgb) => rgb.slice(0, 3).map((v) => v / 255)
              .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
              .reduce((sum, v, k) => sum + v * [0.2126, 0.7152, 0.0722][k], 0);
            const [high, low] = [light(ink), light(under)].sort((x, y) => y - x);
            return (high + 0.05) / (low + 0.05);
          });
          return Math.min(...worst);
        }"""
    )
    assert ratio >= 4.5  # WCAG AA


@looks
def test_nothing_jumps_when_long_documents_are_explored(show: Open, look: dict[str, Any]) -> None:
    page = show(write_page([explain(document=LONG), explain(document=LONG, method="ij")]), **{"height": 700} | look)
    for fold in page.locator(".fold").all():
        fold.click()
    # From the top: what sticks has its place by how far the page is scrolled. The status is one line, whatever it says.
    places = """(scrollTo(0, 0), [...document.querySelectorAll('.status, .card, .pairs, .text, .grid')]
        .map((node) => `${node.offsetTop}:${node.offsetHeight}`).join())"""
    before = page.evaluate(places), page.evaluate("document.documentElement.scrollHeight")
    for target in (asked(page, "bank"), word(page, "letter"), asked(page, "password"), word(page, "branch")):
        target.hover()
        assert (page.evaluate(places), page.evaluate("document.documentElement.scrollHeight")) == before
    page.evaluate("scrollTo(0, 1000)")
    assert page.evaluate("scrollY") > 0
    assert page.locator(".query").bounding_box()["y"] == 0  # the query stays in sight


def test_long_documents_are_shown_by_sentence(show: Open) -> None:
    for width in (1200, 360):
        page = show(explain(document=LONG).to_html(), width=width)
        expect(page.locator(".grid.sentences .sentence")).to_have_count(14 * 3)
        assert page.evaluate("document.documentElement.scrollWidth") <= width


@looks
def test_nothing_is_wider_than_the_window(show: Open, look: dict[str, Any]) -> None:
    for html in (
        write_page(hits()),
        write_page([[explain(document="é" * 300), explain(document="é" * 300, method="ij")]]),
    ):
        assert show(html, **look).evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def test_the_unseen_tail_is_shown_as_unseen(show: Open) -> None:
    page = show(explain(limit=20).to_html())
    assert DOCUMENT.endswith(page.locator(".text .unseen").inner_text().strip())
    assert page.locator(".unseen-mark").inner_text() == "not read by the encoder"
    assert page.locator(".text .unseen .w").count() == 0


NAMES = """() => {
  const found = {};
  for (const node of document.querySelectorAll("*"))
    for (const name of [node.localName, ...node.getAttributeNames().map((name) => "@" + name)]) found[name] = 1;
  return Object.keys(found).sort();
}"""


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_documents_run_nothing_and_add_nothing(show: Open, text: str) -> None:
    harmless = show(write_page([*hostile("harmless words"), *hits()]))
    page = show(write_page([*hostile(text), *hits()]))
    for one in (harmless, page):
        one.locator(".words button").first.hover()
        one.locator(".text").first.locator(".w").last.hover()  # the last word is never under the next one's margin
    assert set(page.evaluate(NAMES)) <= set(harmless.evaluate(NAMES))
    assert page.evaluate("window.hacked") is None
    output = Hits(hostile(text))._repr_html_()
    notebook = show(f"<!doctype html><meta charset=utf-8><link rel=icon href=data:,>{output}")
    assert notebook.evaluate("window.hacked") is None
    assert not {"script", "img", "iframe", "svg", "i", "@onload", "@onerror", "@src"} & set(notebook.evaluate(NAMES))


def test_several_outputs_on_one_notebook_page_do_not_touch_each_other_or_the_page(show: Open) -> None:
    probe = "<p id=probe class='card query words'>probe</p>"
    alone = show(f"<!doctype html><meta charset=utf-8>{probe}")
    outputs = explain()._repr_html_() + Hits(hits())._repr_html_() + explain()._repr_html_()
    page = show(f"<!doctype html><meta charset=utf-8>{probe}{outputs}")
    style = "JSON.stringify(Object.fromEntries([...getComputedStyle(probe)].map(k => [k, getComputedStyle(probe)[k]])))"
    assert page.evaluate(style) == alone.evaluate(style)
    assert page.locator("[id]").count() == 1
    assert page.locator("script, style, link").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_barrier(show: Open, scheme: str) -> None:
    pages = [write_page([[explain(), explain(method="ij")]]), explain(document=LONG, limit=200).to_html()]
    pages.append(explain(terms=terms(count=30)).to_html())
    for html in (*pages, write_page(hits())):
        page = show(html, scheme=scheme, bypass_csp=True)  # the checker is a script that the page would refuse
        results = axe.Axe().run(page, options={"resultTypes": ["violations"]}).response
        assert [(found["id"], found["nodes"][0]["html"]) for found in results["violations"]] == []


@looks
def test_the_table_of_terms_fits_its_page(show: Open, look: dict[str, Any]) -> None:
    page = show(explain(terms=terms("überraschungsdokumentation " * 3, 30)).to_html(), **look)
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    rows = page.locator("table.terms tbody tr")
    assert rows.count() == 20
    assert page.locator("details summary", has_text="20 of 30 terms").count() == 1
    assert "+14.5000" in rows.first.inner_text()


def test_hostile_terms_are_text(show: Open) -> None:
    for text in HOSTILE:
        page = show(explain(terms=terms(text)).to_html())
        assert page.evaluate("window.hacked") is None
        assert page.locator("table.terms tbody tr").count() == 3
        assert page.locator("table.terms img, table.terms b, table.terms script").count() == 0


def test_empty_pages_are_pages(show: Open) -> None:
    assert show(write_page([])).locator("footer").count() == 1
    page = show(write_page([explain(query="", document=""), explain(query="a", document="")]))
    assert page.locator(".card").count() == 2
    page = show(replace(explain(), query=None, document=None).to_html())
    assert page.locator(".text").inner_text().startswith("[CLS] 2 3 ")


def test_the_overview_leads_to_the_word_in_the_hit(show: Open) -> None:
    page = show(write_page(hits(documents=[f"{DOCUMENT} {k}" for k in range(6)])))
    cells = page.locator(".overview tbody tr").nth(4).locator(".cell")
    heads = [head.inner_text() for head in page.locator(".overview th.word").all()]
    cells.nth(heads.index("password")).click()
    card = page.locator(".card").nth(4)
    expect(caption(card)).to_have_text("Pairs of “password”")
    expect(asked(page, "password")).to_have_attribute("aria-pressed", "true")
    expect(card).to_be_focused()
    expect(page.locator(".query .of")).to_have_text(" in doc-5")


def test_one_hit_has_no_overview(show: Open) -> None:
    assert show(write_page([hits()[0]])).locator(".overview").count() == 0


def test_the_numbers_of_the_query_are_those_of_the_hit_that_is_read(show: Open) -> None:
    found = hits(documents=[f"{DOCUMENT} {k}" for k in range(6)])
    page = show(write_page(found))
    for place in (3, 1):
        page.locator(".card").nth(place).evaluate("node => node.scrollIntoView()")
        expect(page.locator(".query .of")).to_have_text(f" in {found[place].id}")
        sums = found[place].explanation.by_word().query_saliency().tolist()  # type: ignore[union-attr]
        for word_of_query, value in zip(page.locator(".words button .num").all(), sums, strict=True):
            expect(word_of_query).to_have_text(f"{'−' if value < 0 else '+'}{abs(value):.4f}")


def test_paper_keeps_the_tints_and_begins_on_its_first_page(show: Open, tmp_path: Path) -> None:
    page = show(write_page([explain(document=LONG)]), scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    (tmp_path / "page.pdf").write_bytes(page.pdf())
    assert page.evaluate("getComputedStyle(document.body).printColorAdjust") == "exact"
    assert page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--card')").strip() == "#ffffff"
    assert page.locator(".card").evaluate("node => getComputedStyle(node).breakInside") == "auto"


def test_chinese_heads_stand_upright_and_latin_ones_are_turned(show: Open) -> None:
    page = show(write_page([explain("银行 password", "河岸 bank password")]))
    turned = {
        head.inner_text(): head.evaluate("node => getComputedStyle(node).transform")
        for head in page.locator("thead th span").all()
    }
    assert turned["bank"] != "none"
    assert {value for text, value in turned.items() if not text.isascii()} == {"none"}


def test_code_is_shown_as_code_and_prose_is_not(show: Open) -> None:
    code = "def reset(account):\n    if account.is_locked:\n        return None\n    return account.password\n"
    for document, is_code in ((code, True), (LONG, False), (DOCUMENT, False)):
        page = show(write_page([explain(document=document)]))
        assert ("source" in page.locator(".text").get_attribute("class").split()) == is_code


def test_many_methods_fit_a_telephone(show: Open) -> None:
    methods = ["bilrp", "ij", "ij-exact", "hxp", "alignment", "gradient-x-input", "occlusion", "random"]
    page = show(write_page([[explain(method=method) for method in methods]]), width=360, height=740)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_a_method_that_does_not_add_up_is_not_in_score_units(show: Open) -> None:
    page = show(write_page([replace(explain(method="bti"), additive=False)]))
    assert "score units" not in page.locator("section").inner_text()
    assert "bti values" in page.locator(".legend").inner_text()


def test_stages_are_a_table_that_can_be_folded(show: Open) -> None:
    stages = (
        Stage("BM25", "search", None, contribution=0.0),
        Stage("FAISS", "search", 2, score=0.5, metric="cosine", contribution=0.016),
        Stage("Fusion", "fusion", 2, score=0.016, metric="rrf", legs=2, note="<b>it is said</b>"),
        Stage("CrossEncoder", "rerank", 1, 2, 0.9, handle=Deferred.ready(explain(document=OTHER))),
    )
    page = show(write_page([replace(hits()[0], stages=stages)]), width=420)
    table = page.get_by_role("region", name="Stages")
    expect(table.locator("tbody tr")).to_have_count(4)
    expect(table.locator("tbody tr").first).to_contain_text("not found")
    expect(table.locator("tbody tr").last).to_contain_text("2 → 1")
    expect(table.locator("tbody tr").last).to_contain_text("bank")
    expect(page.get_by_text("Note: <b>it is said</b>")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.get_by_text("Stages (4)").click()
    expect(table).to_be_hidden()


def asked_hits() -> Hits:
    """Hits whose page carries what was computed again, and a line where background begins."""
    found = []
    for hit in hits():
        explanation = hit.explanation
        assert explanation is not None
        shown = explanation.by_word()
        changes = tuple(
            Change(
                text=token.text,
                role="query",
                kind="without",
                spans=((token.start, token.end),),
                score=0.25,
                rank=51,
                carried=0.1,
                before=explanation.score,
            )
            for token in shown.query_tokens
        )
        answer = WhatIf(query=QUERY, document=hit.text or "", score=explanation.score, changes=changes)
        known = {"what_if": Deferred.ready(answer)}
        parts = Parts(lambda name, known=known: known.get(name, Deferred.skipped("not asked for")))  # type: ignore[misc]
        parts["what_if"].get()
        levels, scores = (0.0, 0.99, 1.0), (-1.0, 5.0 if hit.rank == 2 else -0.9, 9.0)
        background = Calibration(
            levels=levels, scores=scores, errors=(0.0, 0.0, 0.0), queries=9, documents=9, pairs=81, source="sentences",
            fingerprint=explanation.fingerprint,
        )  # fmt: skip
        found.append(replace(hit, parts=parts, calibration=background))
    return Hits(found)


@pytest.mark.parametrize("look", [LOOKS["as it comes"], LOOKS["telephone"]], ids=["wide", "telephone"])
def test_a_click_on_a_word_of_the_query_shows_the_real_change_and_the_rank(show: Open, look: Any) -> None:
    page = show(asked_hits().to_html(), **look)
    status = page.locator(".status")
    height = status.bounding_box()["height"]
    page.locator(".words button").first.click()
    expect(status).to_contain_text("carries")
    expect(status).to_contain_text("without it the score is 0.2500")
    expect(status).to_contain_text("rank 51")
    assert status.bounding_box()["height"] == height  # nothing moves
    assert page.locator(".status .real").bounding_box()["y"] < status.bounding_box()["y"] + height
    expect(page.locator("p.line")).to_contain_text("background begins here")
    assert page.locator("article").nth(0).bounding_box()["y"] < page.locator("p.line").bounding_box()["y"]
    assert page.locator("p.line").bounding_box()["y"] < page.locator("article").nth(1).bounding_box()["y"]


def answers(text: str) -> dict[str, Any]:
    """One answer to each question, in which every string is `text`."""
    contrast = Contrast(explain(text, text), explain(text, f"{text} {OTHER}"))
    rungs = Rung("cut", text, explains=True), Rung("words", text)
    changes = (Change(text, "query", "without", ((0, 1),), 0.2, 7, 0.1, 0.5),)
    span = (ValuedSpan(text, 0, len(text), 0.5),)
    levels = (0.0, 0.99, 1.0)
    compared = Comparison.of([Compared(text, contrast.wanted, 0.1), Compared("bti", None, 0.1, text)])
    return {
        "comparison": compared,
        "documents": Hits(replace(hit, metadata={"source": text, "start_index": 3}) for hit in hits()).by_document(),
        "why not": WhyNot(
            query=text, wanted=text, got=text, rungs=rungs, rank=7, k=3, contrast=contrast,
            suggestions=(Suggestion(text, 1),),
        ),
        "what if": WhatIf(query=text, document=text, score=0.5, changes=changes, model=text),
        "x-ray": XRay(document=text, words=span, sentences=span, headers=span, metadata=((text, 0.4),), model=text),
        "calibration": Calibration(
            levels=levels, scores=levels, errors=levels, queries=1, documents=2, pairs=2, source="queries", model=text
        ),
    }  # fmt: skip


@pytest.mark.parametrize("width", [360, 768, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("question", ["why not", "what if", "x-ray", "calibration", "comparison", "documents"])
def test_the_page_of_an_answer_fits_and_is_accessible(show: Open, question: str, scheme: str, width: int) -> None:
    html = answers(DOCUMENT)[question].to_html()
    page = show(html, width=width, scheme=scheme, bypass_csp=True)  # the checker is a script that it would refuse
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    results = axe.Axe().run(page, options={"resultTypes": ["violations"]}).response
    assert [(found["id"], found["nodes"][0]["html"]) for found in results["violations"]] == []


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_texts_run_nothing_in_the_page_of_an_answer(show: Open, text: str) -> None:
    for answer in answers(text).values():
        page = show(answer.to_html())
        assert page.evaluate("window.hacked") is None
        assert page.locator("script, iframe, img, svg, textarea").count() == 0


def test_of_a_long_document_the_best_sentences_are_open_and_the_rest_folded(show: Open) -> None:
    explanation = explain(document=LONG)
    page = show(write_page([explanation]))
    sums = explanation.by_word().by_sentence().document_saliency()
    sentences_ = explanation.by_word().by_sentence().document_tokens
    best = sorted(np.argsort(-sums)[:2].tolist())
    text = page.locator(".text")
    seen = text.inner_text()
    assert all(sentences_[at].text.split(".")[0] in seen for at in best)
    assert text.locator(".w:visible").count() < len(explanation.by_word().document_tokens) / 4
    folds = page.locator(".fold")
    counted = sum(int(re.findall(r"\d+", one.inner_text())[0]) for one in folds.all())
    assert counted == len(sentences_) - 2
    page.locator(".text .w[tabindex]").focus()
    page.keyboard.press("End")  # the keys move between words that are seen
    assert page.evaluate("document.activeElement.checkVisibility()")
    for fold in folds.all():
        fold.click()
        expect(fold).to_have_attribute("aria-expanded", "true")
    whole = "node => [...node.querySelectorAll('.fold')].forEach((one) => one.remove()) ?? node.textContent"
    assert text.evaluate(whole) == LONG


def test_what_was_not_read_is_never_folded(show: Open) -> None:
    page = show(write_page([explain(document=LONG, limit=200)]))
    expect(page.locator(".unseen-mark")).to_be_visible()
    assert page.locator(".folded .unseen, .folded .unseen-mark").count() == 0


def test_markdown_is_shown_as_what_it_is_and_stays_as_it_stands(show: Open) -> None:
    document = "# The bank\n\nReset a `password` **here**:\n\n- by letter\n- by e-mail\n\n```\nreset(account)\n```\n"
    text = show(write_page([explain(document=document)])).locator(".text")
    assert text.evaluate("node => node.textContent") == document
    assert {"The", "bank"} <= set(text.locator(".w.heading").all_inner_texts()) <= {"#", "The", "bank"}
    assert {"password", "reset", "account"} <= set(text.locator(".w.code").all_inner_texts())
    assert "here" in text.locator(".w.strong").all_inner_texts()
    assert "monospace" in text.locator(".w.code").first.evaluate("node => getComputedStyle(node).fontFamily")
    plain = show(write_page([explain(document="A * b * c, C# and a_b_c.")])).locator(".text")
    assert plain.locator(".heading, .code, .strong").count() == 0


def test_a_link_leads_to_a_hit_and_a_word(show: Open) -> None:
    page = show(write_page(hits()))
    page.locator(".overview tr").nth(2).locator(".cell").last.click()
    address = page.evaluate("location.hash")
    kept = page.locator(".words button[aria-pressed=true] .word").inner_text()
    assert address == f"#hit=2&word={kept}"
    again = show(write_page(hits()), address=address)
    expect(again.locator(".words button[aria-pressed=true] .word")).to_have_text(kept)
    expect(again.locator(".card.active .rank")).to_have_text("2")
    elsewhere = show(write_page(hits()), address="#hit=99&word=<b>")
    expect(elsewhere.locator(".words button[aria-pressed=true]")).to_have_count(0)


@pytest.mark.parametrize("text", ["bank password", *HOSTILE])
def test_what_is_copied_is_a_table_of_markdown(show: Open, text: str) -> None:
    page = show(write_page([*hostile(text), *hits()][:2] if text in HOSTILE else hits()))
    page.evaluate(
        "() => { const set = DataTransfer.prototype.setData;"
        "DataTransfer.prototype.setData = function (kind, text) { window.copied = text; set.call(this, kind, text) } }"
    )
    page.get_by_role("button", name="Copy as Markdown").first.click()
    told = page.evaluate("window.copied")
    rows = [line for line in told.splitlines() if line.startswith("|")]
    assert len(rows) > 2
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1
    assert "<" not in re.sub(r"\\<", "", told)


def test_unknown_words_are_hatched_and_no_match(show: Open) -> None:
    made = explain(document="bank 银行 password")
    tokens = tuple(replace(one, piece="[UNK]") if not one.text.isascii() else one for one in made.document_tokens)
    page = show(write_page([replace(made, document_tokens=tokens)]))
    unknown = page.locator(".text .w.unknown")
    assert "".join(unknown.all_inner_texts()) == "银行"
    assert "repeating-linear-gradient" in unknown.first.evaluate("node => getComputedStyle(node).backgroundImage")
    unknown.first.hover()
    expect(page.locator(".status")).to_contain_text("no match")
