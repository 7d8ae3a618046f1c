"""The notebook's fragment: no script, no style element, no name that could clash, and nothing from a document."""

from __future__ import annotations

from collections import Counter
from xml.etree import ElementTree as ET

import html5lib
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rag_explain.results.hits import Hit, Hits
from tests.support.samples import DOCUMENT, HOSTILE, OTHER, QUERY, explain, hits, hostile

ALLOWED = {"div", "span", "b", "details", "summary", "table", "tbody", "tr", "th", "td"}
ATTRIBUTES = {"style", "title", "dir", "open", "scope", "tabindex"}


def parsed(text: str) -> list[ET.Element]:
    root = html5lib.parseFragment(text, namespaceHTMLElements=False)
    return [node for node in root.iter() if node is not root]


def text_of(text: str) -> str:
    return "".join(html5lib.parseFragment(text, namespaceHTMLElements=False).itertext())


def test_the_figures_are_there_in_words() -> None:
    explanation = explain(limit=20)
    text = text_of(explanation._repr_html_())
    word = explanation.by_word()
    assert f"score {explanation.score:.4f} = {word.score - word.unattributed:+.4f} words" in text
    assert f"{word.unattributed:+.4f} no word" in text
    assert "adds up to the score, gap" in text
    assert "not read by the encoder" in text
    assert "of all pairs" in text
    assert "% of the score" not in text


def test_a_list_of_hits_says_the_query_once_and_why_one_is_missing() -> None:
    found = Hits([*hits(), Hit(id="x", text=OTHER, rank=3, score=0.1, metric="cosine")])
    text = text_of(found._repr_html_())
    assert text.count(QUERY) == 1
    assert text.count(DOCUMENT[:20]) == 1
    assert "No explanation (skipped): not asked for" in text
    assert "no hits" in text_of(Hits()._repr_html_())


def test_words_tell_what_they_met() -> None:
    titles = [node.get("title", "") for node in parsed(explain()._repr_html_()) if node.text == "password"]
    assert titles[0].startswith("carries +")
    assert "met password +" in titles[0]


def test_nothing_can_leak_or_clash() -> None:
    for node in parsed(hits()._repr_html_()):
        assert node.tag in ALLOWED
        assert set(node.attrib) <= ATTRIBUTES
        assert "url" not in node.get("style", "")


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_texts_add_no_element_and_no_attribute(text: str) -> None:
    output = Hits(hostile(text))._repr_html_()
    output.encode()
    for node in parsed(output):
        assert node.tag in ALLOWED
        assert set(node.attrib) <= ATTRIBUTES
    styles = Counter(len(node.get("style", "")) > 200 for node in parsed(output))
    assert not styles[True]


@given(st.text(alphabet="<>/!-&\"'=sctyle ipr]\\u0;:{}", max_size=40))
@settings(max_examples=40, deadline=None)
def test_any_text_stays_text(text: str) -> None:
    output = Hits(hostile(text))._repr_html_()
    assert {str(node.tag) for node in parsed(output)} <= ALLOWED
    assert text.strip() in text_of(output)
