"""What if: every score and rank is computed again, by the model's own calls and nothing else."""

from __future__ import annotations

import json
import math
import pickle
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rag_explain.errors import BudgetSpent, InvalidInput
from rag_explain.explainer import Explainer
from rag_explain.faiss import FaissRetriever
from rag_explain.results.comparison import rank_correlation
from rag_explain.results.what_if import WhatIf
from rag_explain.texts.passage import Passage
from rag_explain.what_if import occurrences
from tests.support.embedders import Asked
from tests.support.models import CORPUS, colbert, static, tiny

QUERY = "why did the dog bark at the moon?"
DOCUMENT = CORPUS[1]


@cache
def explainer(kind: str = "bert") -> Explainer:
    made: dict[str, Any] = {"colbert": colbert, "static": static, "black box": Asked}
    return Explainer(made[kind]() if kind in made else tiny(kind, dtype=torch.float32))


def change(found: WhatIf, text: str, role: str = "query") -> Any:
    return next(one for one in found.changes if one.text == text and one.role == role)


@pytest.mark.parametrize("kind", ["bert", "colbert", "static", "black box"])
def test_the_new_score_is_what_the_model_gives_for_the_edited_text(kind: str) -> None:
    found = explainer(kind).what_if(QUERY, DOCUMENT, without=["dog", "barking loudly"], replace={"moon": "sun"})
    score = explainer(kind).scorer.score
    assert found.score == pytest.approx(score(QUERY, [DOCUMENT])[0], abs=1e-5)
    query = score("why did the bark at the moon?", [DOCUMENT])[0]
    assert change(found, "dog").score == pytest.approx(query, abs=1e-5)
    assert change(found, "dog").change == pytest.approx(query - found.score, abs=1e-5)
    document = score(QUERY, ["a small ran over the old bridge, barking loudly!"])[0]
    assert change(found, "dog", "document").score == pytest.approx(document, abs=1e-5)
    phrase = score(QUERY, ["a small dog ran over the old bridge!"])[0]
    assert change(found, "barking loudly", "document").score == pytest.approx(phrase, abs=1e-5)
    replaced = score("why did the dog bark at the sun?", [DOCUMENT])[0]
    assert change(found, "moon").score == pytest.approx(replaced, abs=1e-5)
    assert change(found, "moon").replacement == "sun"


def test_another_query_may_be_tried() -> None:
    found = explainer().what_if(QUERY, DOCUMENT, replace="a barking dog")
    assert found.changes[0].score == pytest.approx(explainer().scorer.score("a barking dog", [DOCUMENT])[0], abs=1e-5)


def test_what_a_part_carries_is_what_its_explanation_says() -> None:
    found = explainer().what_if(QUERY, DOCUMENT)
    shown = explainer().explain(QUERY, DOCUMENT, unit="word")
    carried = {token.text: value for token, value in zip(shown.query_tokens, shown.query_saliency(), strict=True)}
    words = [one for one in found.changes if one.role == "query"]
    assert [one.text for one in words] == QUERY.rstrip("?").split()
    for one in words:
        if one.text != "the":  # it stands there twice
            assert one.carried == pytest.approx(carried[one.text], abs=1e-4)
    sentence = explainer().what_if(QUERY, "The dog ran. The cat sat on the mat.", without="The dog ran.").changes[0]
    grouped = explainer().explain(QUERY, "The dog ran. The cat sat on the mat.", unit="sentence")
    assert sentence.carried == pytest.approx(float(grouped.document_saliency()[0]), abs=1e-4)


def test_the_agreement_is_the_rank_correlation_of_what_is_carried_with_what_is_lost() -> None:
    found = explainer().what_if(QUERY, DOCUMENT)
    pairs = np.array([(one.carried, -one.change) for one in found.changes if one.kind == "without"])
    assert found.agreement == pytest.approx(rank_correlation(pairs[:, 0], pairs[:, 1]))
    assert math.isnan(explainer().what_if(QUERY, DOCUMENT, without="dog").agreement)


def test_compare_says_how_far_each_method_agrees_with_the_real_changes() -> None:
    compared = explainer().compare(QUERY, DOCUMENT, ["bilrp", "occlusion", "bti"])
    assert len(compared.losses) == 18
    assert compared.real[1] == pytest.approx(1.0)  # what is lost without a part is what occlusion says
    assert -1 <= compared.real[0] < 1
    assert "real: rank correlation" in str(compared)
    assert "+1.00" in str(compared)
    assert len(compared.to_dict()["losses"]) == 18


def test_compare_puts_the_split_and_the_real_loss_side_by_side() -> None:
    asked = explainer()
    compared = asked.compare(QUERY, DOCUMENT, ["bilrp", "occlusion", {"method": "bilrp", "layer": 99}])
    split = asked.explain(QUERY, DOCUMENT, unit="word")
    carried = {token.text: value for token, value in zip(split.document_tokens, split.document_saliency(), strict=True)}
    for one in compared.losses:
        assert one.lost is not None
        assert one.carried[1] == pytest.approx(one.lost, abs=1e-6)  # what occlusion says, by definition
        assert one.carried[2] is None  # which refused
        if one.role == "document" and DOCUMENT.split().count(one.text) == 1:
            assert one.carried[0] == pytest.approx(carried[one.text], abs=1e-6)
    most = max(compared.losses, key=lambda one: abs(one.lost or 0.0))
    assert f"{most.lost:+.4f}" in str(compared)
    assert str(compared).count("real loss") == 1


def test_what_was_not_read_is_tried_by_itself() -> None:
    long = "the cat sat on the mat. " * 14 + "a small dog barking loudly at the moon."
    found = explainer().what_if(QUERY, long)
    tail = next(one for one in found.changes if one.kind == "unread")
    assert "barking loudly at the moon" in tail.text
    assert tail.carried is None
    assert tail.score == pytest.approx(explainer().scorer.score(QUERY, [tail.text])[0], abs=1e-5)
    start, end = tail.spans[0]
    assert long[start:end] == tail.text
    with pytest.raises(InvalidInput, match="was not read"):
        explainer().what_if(QUERY, long, without="barking loudly")


def test_leaving_out_a_sentence_of_a_text_that_was_cut_off_brings_in_no_other_one() -> None:
    long = "the dog ran. " + "the cat sat on the mat. " * 14
    found = explainer().what_if(QUERY, long, without="the dog ran.")
    read = max(token.end for token in explainer().explain(QUERY, long).document_tokens)
    edited = long[:read].removeprefix("the dog ran. ")
    assert found.changes[0].score == pytest.approx(explainer().scorer.score(QUERY, [edited])[0], abs=1e-5)


def test_metadata_around_a_text_stay() -> None:
    passage = Passage("lang: en\n\n" + DOCUMENT, len("lang: en\n\n"))
    found = explainer().what_if(QUERY, passage, without="old")
    edited = "lang: en\n\na small dog ran over the bridge, barking loudly!"
    assert found.changes[0].score == pytest.approx(explainer().scorer.score(QUERY, [edited])[0], abs=1e-5)


def test_where_no_text_is_left_there_is_no_score() -> None:
    found = explainer().what_if("moon", DOCUMENT, without="moon")
    assert found.changes[0].score is None
    assert found.changes[0].change is None
    assert "no text" in str(found)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"without": "slo"}, "stands neither in the query nor in the document"),
        ({"without": "og"}, "stands neither"),
        ({"without": ""}, "takes words or sentences"),
        ({"without": 7}, "takes words or sentences"),
        ({"without": []}, "nothing is to be left out"),
        ({"replace": "  "}, "another query with words in it"),
        ({"replace": {"dog": 7}}, "strings in place of strings"),
        ({"replace": 7}, "another query, or {words: other words}"),
    ],
)
def test_what_cannot_be_tried_is_refused_in_words(asked: Any, told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        explainer().what_if(QUERY, DOCUMENT, **asked)


def test_a_word_is_found_in_any_case_and_not_inside_another() -> None:
    assert occurrences("Dog, dogs and the DOG", "dog") == ((0, 3), (18, 21))
    assert occurrences("他今天去了北京", "今天") == ((1, 3),)
    assert occurrences("DOG İstanbul dog", "dog") == ((0, 3), (13, 16))


def test_a_piece_of_the_document_is_left_out_where_it_stands() -> None:
    twice = "the dog and the dog"
    piece = next(one for one in explainer().highlight(QUERY, twice) if one.start == 16)
    found = explainer().what_if(QUERY, twice, without=piece)
    assert found.changes[0].score == pytest.approx(explainer().scorer.score(QUERY, ["the dog and the"])[0], abs=1e-5)


def test_a_black_box_is_asked_for_what_was_named_and_no_more() -> None:
    asked = Asked()
    own = Explainer(asked)
    before = len(asked.texts)
    found = own.what_if(QUERY, DOCUMENT, without="dog")
    assert len(asked.texts) - before == 4  # both texts as they are, and each of them edited
    assert found.method == ""
    with own.scorer.at_most(1), pytest.raises(BudgetSpent):  # type: ignore[attr-defined]
        own.what_if("a cat on a bridge", "another text about a cat", without="cat")
    planned = own.plan(["The cat sat. The dog ran."], query="old bridge")
    before = len(asked.texts)
    own.what_if("old bridge", "The cat sat. The dog ran.")
    assert len(asked.texts) - before == planned.embeddings


def test_a_rank_is_that_of_exact_search_over_the_whole_index() -> None:
    texts = [f"{text} {other}" for text in CORPUS for other in CORPUS]
    retriever = FaissRetriever.from_texts(texts, explainer(), ids=[str(at) for at in range(25)])
    scores = explainer().scorer.score(QUERY, texts)
    found = retriever.what_if(QUERY, "7", without="dog")
    assert (found.rank, found.total) == (1 + sum(scores > scores[7] + 1e-6), 25)
    query, document = change(found, "dog"), change(found, "dog", "document")
    again = explainer().scorer.score("why did the bark at the moon?", texts)
    assert query.rank == 1 + sum(again > again[7] + 1e-6)
    assert document.rank == 1 + sum(np.delete(scores, 7) > document.score + 1e-6)
    with pytest.raises(InvalidInput, match="no document 'x'"):
        retriever.what_if(QUERY, "x")
    best, worst = int(np.argmax(scores)), int(np.argmin(scores))
    twice = FaissRetriever.from_texts([texts[worst], texts[best]], explainer(), ids=["twice", "twice"])
    assert twice.what_if(QUERY, "twice", without="dog").document == texts[best]


def test_a_hit_is_asked_and_its_page_shows_what_was_found(tmp_path: Path) -> None:
    retriever = FaissRetriever.from_texts(CORPUS, explainer())
    hits = retriever.search(QUERY, 3)
    assert hits[0].peek_what_if() is None
    assert "without it the score" not in hits.to_html()
    hits.load("what_if")
    found = hits[0].peek_what_if()
    assert found is hits[0].what_if()
    assert found.rank == 1
    page = hits.to_html(tmp_path / "page.html")
    assert f"without it the score is {found.changes[0].score:.4f}" in page
    assert hits[0].what_if(without="dog").changes[0].rank is not None
    again = pickle.loads(pickle.dumps(hits[0]))
    assert again.peek_what_if().score == found.score
    with pytest.raises(InvalidInput, match="use Explainer"):
        again.what_if(without="dog")
    with pytest.raises(InvalidInput, match="cannot be asked what if"):
        retriever.search(QUERY, 3, explain="off")[0].what_if()


def test_it_is_shown_and_written(tmp_path: Path) -> None:
    found = explainer().what_if(QUERY, DOCUMENT, without="dog", replace={"moon": "<b>sun</b>"})
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["format"] == "rag_explain.what_if"
    assert plain["changes"][0]["change"] == pytest.approx(found.changes[0].change)
    assert "without “dog”" in str(found)
    page = found.to_html(tmp_path / "what-if.html")
    assert "&lt;b&gt;sun" in page
    assert "<b>sun" not in page
