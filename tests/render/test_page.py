"""The page as a parser sees it: one fixed skeleton, whatever the documents hold."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import html5lib
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rag_explain.errors import InvalidInput
from rag_explain.render.page import LONG, write_page
from rag_explain.results.hits import Hit
from tests.support.samples import HOSTILE, OTHER, explain, hits, hostile


def parsed(page: str) -> ET.Element:
    root: ET.Element = html5lib.parse(page, namespaceHTMLElements=False)
    return root


def skeleton(page: str) -> Counter[tuple[str, tuple[str, ...]]]:
    """Every element with the names of its attributes."""
    return Counter((str(node.tag), tuple(sorted(map(str, node.attrib)))) for node in parsed(page).iter())


def data_of(page: str) -> dict[str, Any]:
    [block] = [node for node in parsed(page).iter("script") if node.get("type") == "application/json"]
    data: dict[str, Any] = json.loads(block.text or "")
    return data


def test_the_page_is_self_contained_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "why.html"
    page = explain().to_html(path)
    assert path.read_text(encoding="utf-8") == page
    root = parsed(page)
    assert not list(root.iter("link"))
    assert not [node for node in root.iter() if {"src", "href"} & set(node.attrib)]
    [policy] = [node.get("content", "") for node in root.iter("meta") if node.get("http-equiv")]
    assert policy.startswith("default-src 'none'")
    for tag in ("style", "script"):
        [source] = [node.text or "" for node in root.iter(tag) if not node.get("type")]
        digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
        assert "url(" not in source
        assert "innerHTML" not in source


def test_the_data_holds_the_figures_in_score_units() -> None:
    explanation = explain()
    word = explanation.by_word()
    [section] = data_of(explanation.to_html())["sections"]
    [card] = section["cards"]
    [shown] = card["shown"]
    assert shown["score"] == explanation.score
    assert shown["unattributed"] == pytest.approx(word.unattributed)
    assert shown["balance"].startswith("adds up to the score, gap")
    assert shown["pairs"][3] == pytest.approx(word.pairs[3].tolist(), rel=1e-4)
    assert "".join(text for text, _, _ in shown["document"]) == explanation.document
    assert "% of the score" not in explanation.to_html()


def test_long_documents_come_by_sentence_and_short_ones_by_pair() -> None:
    short = data_of(explain().to_html())["sections"][0]["cards"][0]["shown"][0]
    assert short["sentences"] is None
    document = " ".join(f"Sentence number {k} is about a bank." for k in range(LONG // 4))
    long = data_of(explain(document=document).to_html())["sections"][0]["cards"][0]["shown"][0]
    assert len(long["sentences"]["texts"]) == LONG // 4


def test_hits_groups_and_queries() -> None:
    page = write_page([*hits(), Hit(id="x", text=OTHER, rank=3, score=0.1, metric="cosine")])
    [section] = data_of(page)["sections"]
    assert [card["title"] for card in section["cards"]] == ["doc-1", "doc-2", "x"]
    assert section["cards"][2]["missing"] == "No explanation (skipped): not asked for"
    several = data_of(write_page([[explain(), explain(method="ij")]]))["sections"][0]
    assert several["methods"] == ["bilrp", "ij"]
    queries = data_of(write_page([explain(), explain(query="Another question"), explain(query="Another question")]))
    assert [len(section["cards"]) for section in queries["sections"]] == [1, 2]
    assert data_of(write_page([]))["sections"] == []
    assert hits().to_html()


def test_explanations_of_different_pairs_cannot_be_shown_as_one() -> None:
    [card] = data_of(write_page([[explain(), explain(method="ij")]]))["sections"][0]["cards"]
    assert len(card["shown"]) == 2
    with pytest.raises(InvalidInput, match="same query and document"):
        write_page([[explain(), explain(document=OTHER)]])


@pytest.mark.slow
def test_a_real_explanation_becomes_a_page() -> None:
    from rag_explain import Explainer

    document = " ".join(["Honeybees navigate back to the hive by the sun. Nobody told them."] * 40)
    with Explainer("all-MiniLM-L6-v2") as explainer:
        explanation = explainer.explain("How do bees find home?", document)
    shown = data_of(explanation.to_html())["sections"][0]["cards"][0]["shown"][0]
    assert shown["balance"].startswith("adds up to the score")
    assert f"of {len(document):,} characters of the document" in shown["unread"][0]
    assert [seen for _, _, seen in shown["document"]].count(0) == 1
    best = explanation.by_word().top_pairs(1)[0]
    assert (best.query.text, best.document.text) == ("bees", "Honeybees")


HARMLESS = skeleton(write_page(hostile("harmless")))


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_texts_add_no_element_and_no_attribute(text: str) -> None:
    page = write_page(hostile(text))
    page.encode()
    assert skeleton(page) == HARMLESS
    assert not re.search(r"<!--|\u2028|\u2029", page)


@given(st.text(alphabet="<>/!-&\"'=sctyle ipr\u2028]\\u0", max_size=40))
@settings(max_examples=40, deadline=None)
def test_any_text_leaves_the_skeleton_alone(text: str) -> None:
    page = write_page(hostile(text))
    assert skeleton(page) == HARMLESS
    [section] = data_of(page)["sections"]
    assert section["cards"][0]["title"] == text
