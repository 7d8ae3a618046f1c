"""Leaving parts of a text out, so that what is left reads well."""

from __future__ import annotations

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from rag_explain.texts.edits import edited, is_empty, without
from rag_explain.texts.segments import sentence_spans, word_spans
from tests.support.strategies import TEXTS


def left_out(text: str, *parts: str) -> str:
    spans = [(text.index(part), text.index(part) + len(part)) for part in parts]
    return without(text, spans)


def words(text: str) -> list[str]:
    return [text[a:b] for a, b in word_spans(text) if not is_empty(text[a:b])]


@pytest.mark.parametrize(
    ("text", "part", "wanted"),
    [
        ("The old dog barked.", "old", "The dog barked."),
        ("The old dog barked.", "The", "old dog barked."),
        ("The old dog barked.", "barked", "The old dog."),
        ("However, the dog barked.", "However", "the dog barked."),
        ("red, green, blue.", "green", "red, blue."),
        ("red, green, blue.", "blue", "red, green."),
        ("Is it red? No, blue.", "blue", "Is it red? No."),
        ("Paris (France) is big.", "France", "Paris is big."),
        ("He said “hello” to her.", "hello", "He said to her."),
        ('He said "hello" to her.', "hello", "He said to her."),
        ("Paris (old and big) is far.", "old", "Paris (and big) is far."),
        ("Paris (old and big) is far.", "big", "Paris (old and) is far."),
        ("Il dit « bonjour monsieur » ici.", "bonjour", "Il dit « monsieur » ici."),
        ("A **bold** word.", "bold", "A word."),
        ("Call `run` here.", "run", "Call here."),
        ("No. It is.", "No", "It is."),
        ("No.", "No", ""),
        ("Costs about .5 cents", "about", "Costs .5 cents"),
        ("foo/bar", "/", "foo bar"),
        ("我爱你。", "爱", "我你。"),
        ("我爱你。", "你", "我爱。"),
        ("甲，乙，丙。", "乙", "甲，丙。"),
        ("iPhone手机很好", "手机", "iPhone很好"),
        ("One is. Two is. Three is.", "Two is.", "One is. Three is."),
        ("One is. Two is. Three is.", "One is.", "Two is. Three is."),
        ("One is. Two is. Three is.", "Three is.", "One is. Two is."),
        ("One is.\n\nTwo is. Three is.", "Two is.", "One is.\n\nThree is."),
        ("甲是。乙是。丙是。", "乙是。", "甲是。丙是。"),
        ("Title\nRed, green", "Red", "Title\ngreen"),
        ("- Red, green\n- blue", "Red", "- green\n- blue"),
        ("wait: what?", "what", "wait?"),
        ("من می\u200cخواهم بروم", "می\u200cخواهم", "من بروم"),
    ],
)
def test_what_is_left_reads_well(text: str, part: str, wanted: str) -> None:
    assert left_out(text, part) == wanted


def test_several_parts_are_left_out_together() -> None:
    assert left_out("red, green, blue.", "red", "green") == "blue."
    assert left_out("The old grey dog barked.", "old", "grey") == "The dog barked."


def test_other_words_take_the_place_of_a_part() -> None:
    assert edited("The old dog barked.", {(4, 7): "young", (8, 11): ""}) == "The young barked."


@pytest.mark.parametrize(("text", "wanted"), [("", True), (" ,\n…!", True), ("a", False), ("我", False), ("👍", False)])
def test_marks_and_blanks_alone_are_nothing(text: str, wanted: bool) -> None:
    assert is_empty(text) is wanted


@given(TEXTS, st.data())
def test_every_other_word_stays_and_none_grows_together(text: str, data: st.DataObject) -> None:
    # Joiners and accents that stand for themselves join whatever is near.
    text = regex.sub(r"[\u200c\u200d]|(?<!\p{L})\p{M}", "", text)
    spans = [span for span in word_spans(text) if not is_empty(text[slice(*span)])]
    chosen = data.draw(st.sets(st.sampled_from(spans)) if spans else st.just(set()))
    found = without(text, chosen)
    assert words(found) == [text[a:b] for a, b in spans if (a, b) not in chosen]
    assert len(found) <= len(text) + len(chosen)
    if not chosen:
        assert found == text


@given(TEXTS, st.data())
def test_no_blank_is_doubled_and_none_stands_before_a_mark(text: str, data: st.DataObject) -> None:
    for run in ("  ", " ,", " .", ",,", "()"):
        text = text.replace(run, "a")
    spans = word_spans(text)
    chosen = data.draw(st.sets(st.sampled_from(spans)) if spans else st.just(set()))
    found = without(text, {span for span in chosen if not is_empty(text[slice(*span)])})
    assert not regex.search(r" [ ]", found)
    assert not regex.search(r"\w \.(?=\s|$)|\w ,(?=\s|$)", found)


@given(TEXTS, st.data())
def test_the_other_sentences_stay_as_they_are(text: str, data: st.DataObject) -> None:
    text = regex.sub(r"[\u200c\u200d]|(?<!\p{L})\p{M}", "", text)
    spans = sentence_spans(text)
    chosen = data.draw(st.sets(st.sampled_from(spans)) if spans else st.just(set()))
    found = without(text, chosen)
    assert words(found) == [word for span in spans if span not in chosen for word in words(text[slice(*span)])]
