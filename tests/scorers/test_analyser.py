"""Where the terms of an index stand in the caller's text, whatever split and changed them."""

from __future__ import annotations

import functools
import re
from itertools import pairwise
from typing import Any

import bm25s
import pytest
import Stemmer
from bm25s.tokenization import Tokenizer

from rag_explain import Explainer
from rag_explain.scorers.analyser import PatternAnalyser, as_analyser
from rag_explain.texts.passage import Passage

STEMMER = Stemmer.Stemmer("english")
TEXTS = (
    "The quick brown fox, running fast!",
    "Wi-Fi isn't e-mail; naïve cafés, ISTANBUL'da İzmir.",
    "",
    "東京は日本の首都です。 Tokyo",
    "a\n\tb  \u00a0c — d",
)
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"stopwords": None, "stemmer": STEMMER},
    {"stopwords": ["fox"], "lower": False, "token_pattern": r"(?u)\w+"},
    {"stopwords": None, "token_pattern": r"(?u)(\w)\w*"},
)


@pytest.mark.parametrize("settings", SETTINGS, ids=("defaults", "stemmed", "own-stopwords", "first-letters"))
@pytest.mark.parametrize("text", TEXTS)
def test_settings_of_bm25s_are_read_as_bm25s_reads_them(settings: dict[str, Any], text: str) -> None:
    analyser = as_analyser(functools.partial(bm25s.tokenize, **settings))
    assert isinstance(analyser, PatternAnalyser)
    placed = analyser.placed(text)
    assert [term for term, _ in placed] == bm25s.tokenize([text], return_ids=False, show_progress=False, **settings)[0]
    starts = [span[0] for _, span in placed if span is not None]
    assert starts == sorted(starts)
    if not settings:
        assert all(text[slice(*span)].lower() == term for term, span in placed if span is not None)


def test_a_letter_that_grows_when_it_is_small_moves_nothing() -> None:
    text = "İİ İzmir sokak"
    placed = as_analyser(functools.partial(bm25s.tokenize, stopwords=None)).placed(text)
    assert [text[slice(*span)] for _, span in placed if span is not None][-1] == "sokak"


def test_a_tokenizer_is_read_without_being_asked() -> None:
    tokenizer = Tokenizer(stemmer=STEMMER, splitter=lambda text: text.split("-"))
    placed = as_analyser(tokenizer).placed("Running-the-races")
    assert placed == [("run", (0, 17)), ("race", (0, 17))]
    assert not tokenizer.word_to_id


def stems(text: str) -> list[str]:
    words: list[str] = STEMMER.stemWords(
        [word for word in re.findall(r"\w+", text.lower()) if word not in ("the", "a")]
    )
    return words


def letters(text: str) -> list[str]:
    """As a segmenter of a language without blanks: parts of the text, in its order."""
    return [part for part in re.split(r"(東京|日本|首都)|\s", text) if part]


@pytest.mark.parametrize(
    ("analyser", "text", "wanted"),
    [
        (str.split, "Wi-Fi, is Fast.", ["Wi-Fi,", "is", "Fast."]),
        (lambda text: text.lower().split(), "Wi-Fi, is Fast.", ["Wi-Fi,", "is", "Fast."]),
        (stems, "The running races, a brunch running.", ["running", "races", "brunch", "running"]),
        (letters, "東京は日本の首都です Tokyo", ["東京", "は", "日本", "の", "首都", "です", "Tokyo"]),
        (lambda text: [text] if text else [], "One whole text", ["One whole text"]),
        (lambda text: (word for word in text.split()), "a generator", ["a", "generator"]),
        (lambda text: [text.split()], "a list of a list", ["a", "list", "of", "a", "list"]),
        (lambda text: bm25s.tokenize(text, show_progress=False), "Words by number", ["Words", "number"]),
        (lambda text: [], "nothing", []),
    ],
)
def test_a_function_is_followed_to_the_words_it_read(analyser: Any, text: str, wanted: list[str]) -> None:
    placed = as_analyser(analyser).placed(text)
    assert [text[slice(*span)] for _, span in placed if span is not None] == wanted
    assert len(placed) == len(wanted)


def pairs(text: str) -> list[str]:
    """Words, and each two neighbours together: the second kind stands in no one word."""
    words = text.lower().split()
    return [*words, *(f"{a} {b}" for a, b in pairwise(words))]


def test_terms_without_a_place_stand_by_themselves_and_are_told() -> None:
    texts = ["capital of France", "the capital of Spain", "France and Spain"]
    index = bm25s.BM25()
    index.index([pairs(text) for text in texts], show_progress=False)
    explanation = Explainer(index, analyser=pairs).explain("capital of France", texts[0])
    assert [(one.text, one.part) for one in explanation.document_tokens[:4]] == [
        *(("capital", "text"), ("of", "text"), ("France", "text")),
        ("", "special"),
    ]
    assert [one.piece for one in explanation.document_tokens[3:]] == ["capital of", "of france"]
    assert explanation.score == pytest.approx(float(index.get_scores(pairs("capital of France"))[0]))
    assert abs(explanation.gap or 0.0) < 1e-6
    assert "2 of 5 terms of the document" in " ".join(notice.text for notice in explanation.notices)
    assert explanation.by_word().unattributed > 0.1


def test_words_around_the_callers_text_are_metadata() -> None:
    whole = "title: Animals\n\nThe dog ran."
    index = bm25s.BM25()
    index.index(bm25s.tokenize([whole, "another one"], show_progress=False), show_progress=False)
    passage = Passage(whole, whole.index("The"), len(whole))
    explanation = Explainer(index, analyser=functools.partial(bm25s.tokenize)).explain(
        "animals and dogs, a dog", passage
    )
    assert explanation.document == "The dog ran."
    assert [(one.label, one.part) for one in explanation.document_tokens] == [
        *(("title", "metadata"), ("animals", "metadata"), ("The", "text"), ("dog", "text"), ("ran", "text")),
    ]
    assert [term.document for term in explanation.terms] == [("animals",), (), ("dog",)]
    assert explanation.by_word().unattributed == pytest.approx(explanation.terms[0].value, rel=1e-5)
