"""The overview of hits: which words met, why the first came first, and where that sentence would be a naive one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from rag_explain.render.notebook import draw as draw_notebook
from rag_explain.render.terminal import plain_text
from rag_explain.render.views import view_of
from rag_explain.results.deferred import Deferred
from rag_explain.results.explanation import Explanation
from rag_explain.results.hits import Hit, Hits
from rag_explain.results.notices import MISMATCH, TRUNCATED, UNKNOWN, Notice
from rag_explain.results.overview import Overview
from rag_explain.texts.segments import word_spans
from rag_explain.texts.tokens import Token

QUERY = "my laptop is slow"


def words(text: str) -> tuple[Token, ...]:
    return tuple(Token(text[start:end], start, end) for start, end in word_spans(text))


def pair(document: str, carried: Mapping[tuple[str, str], float], rest: float = 0.0, query: str = QUERY) -> Explanation:
    """An explanation by words whose pairs carry just these values, and no word the rest."""
    left, right = words(query), words(document)
    matrix = np.zeros((len(left) + 1, len(right) + 1), np.float32)
    matrix[-1, -1] = rest
    for (one, other), value in carried.items():
        matrix[[w.text for w in left].index(one), [w.text for w in right].index(other)] = value
    score = float(matrix.sum(dtype=np.float64))
    return Explanation(
        query=query,
        document=document,
        query_tokens=left,
        document_tokens=right,
        matrix=matrix,
        score=score,
        method="bilrp",
        unit="word",
    )


def of(*found: Explanation, itself: Explanation | None = None) -> Overview:
    return Overview.of(hits(found), itself)


def hits(found: Sequence[Explanation | None]) -> Hits:
    names = "abcdef"
    made = (
        Hit(
            id=names[at], text="", rank=at + 1, score=None if one is None else one.score, metric="cosine", handle=handle
        )
        for at, one in enumerate(found)
        for handle in [Deferred.skipped("not asked for") if one is None else Deferred.ready(one)]
    )
    return Hits(made)


FIRST = pair("a sluggish notebook", {("slow", "sluggish"): 0.3, ("laptop", "notebook"): 0.2, ("my", "a"): 0.01})


def test_the_first_came_first_because_of_the_words_that_carry_its_lead() -> None:
    found = of(FIRST, pair("a fast battery", {("slow", "fast"): 0.05, ("laptop", "battery"): 0.04, ("my", "a"): 0.02}))
    assert found.reason == "a came first because “slow” met sluggish and “laptop” met notebook; no word in common."
    assert found.margin == "0.4000 ahead of b; of that “slow” +0.2500, “laptop” +0.1600, no query word +0.0000"


def test_a_word_that_both_hits_met_alike_is_no_reason() -> None:
    """The naive sentence names the strongest pair, which the second hit has too."""
    second = pair("another notebook", {("laptop", "notebook"): 0.5, ("slow", "another"): 0.01})
    first = pair("a sluggish notebook", {("laptop", "notebook"): 0.5, ("slow", "sluggish"): 0.1})
    assert of(first, second).reason == "a came first because “slow” met sluggish; no word in common."


def test_the_same_word_met_more_strongly_is_said_so() -> None:
    first, second = (
        pair(f"{which} notebook", {("laptop", "notebook"): v}) for which, v in (("one", 0.5), ("two", 0.2))
    )
    assert "“laptop” met notebook more strongly than in b" in of(first, second).reason


def test_a_lead_that_no_word_carries_is_said_so() -> None:
    """The naive sentence says that slow met sluggish, in a hit that came first for its biases."""
    first = pair("a sluggish one", {("slow", "sluggish"): 0.2}, rest=0.3)
    found = of(first, pair("a lazy one", {("slow", "lazy"): 0.19}))
    assert found.reason == "a came first mostly by what no word of the query carries; no word in common."
    assert found.margin.endswith("no query word +0.3000")


def test_a_lead_in_many_words_names_none() -> None:
    query = "one two three four five six seven eight nine ten eleven twelve"
    first = pair(query, {(word, word): 0.1 for word in query.split()}, query=query)
    second = pair("nothing", {}, query=query)
    assert of(first, second).reason.startswith("a came first by many small differences; in common: one, two")


def test_half_of_a_lead_is_most_of_it_and_not_all() -> None:
    first = pair("slow my laptop is", {("slow", "slow"): 0.2, **{(w, w): 0.05 for w in ("my", "laptop", "is")}}, 0.1)
    assert of(first, pair("b", {})).reason.startswith("a came first mostly because “slow” met slow")


def test_a_word_without_one_counterpart_counted_over_the_whole_text() -> None:
    text = "a b c d e f g h"
    first = pair(text, {("slow", letter): 0.05 for letter in text.split()})
    assert of(first, pair("b", {})).reason == (
        "a came first because “slow” counted over the whole text; no word in common."
    )


def test_a_word_that_leads_by_counting_against_the_second_hit_met_nothing() -> None:
    first = pair("a tea pot", {("slow", "tea"): 0.02, ("slow", "pot"): -0.05, ("laptop", "pot"): 0.01})
    second = pair("a fast car", {("slow", "fast"): -0.5})
    assert of(first, second).reason == "a came first because “slow” counts against b; no word in common."


def test_a_pair_that_the_second_hit_has_stronger_is_no_reason() -> None:
    first = pair("slow and sluggish", {("slow", "slow"): 0.3, ("slow", "sluggish"): 0.28})
    second = pair("slow cooker", {("slow", "slow"): 0.35})
    assert of(first, second).reason == "a came first because “slow” counted over the whole text; in common: slow."


def test_a_word_that_stands_twice_in_the_query_is_named_once() -> None:
    carried = {("slow", "sluggish"): 0.3}
    twice = pair("a sluggish one", carried, query="slow so slow")
    twice.matrix.setflags(write=True)
    twice.matrix[2] = twice.matrix[0]
    first = replace(twice, score=0.6)
    second = pair("a car", {}, query="slow so slow")
    assert of(first, second).reason == "a came first because “slow” met sluggish; no word in common."


def test_a_lead_by_one_word_that_nothing_speaks_to_is_not_many_differences() -> None:
    itself = pair(QUERY, {("slow", "slow"): 1.0, ("laptop", "laptop"): 1.0}, query=QUERY)
    first, second = pair("a tea pot", {("slow", "tea"): 0.1}), pair("a car", {})
    found = of(first, second, itself=itself)
    assert "slow" in (found.silent or ())
    assert found.reason == "a came first by words that nothing here speaks to; no word in common."


def test_hits_that_do_not_begin_with_the_first_say_before_which_one_stands() -> None:
    found = Overview.of(hits((FIRST, FIRST, pair("a fast car", {})))[1:])
    assert found.reason.startswith("b came before c because “slow” met sluggish")


def test_a_word_in_what_was_embedded_around_a_text_is_a_word_in_common() -> None:
    (hit,) = hits((FIRST,))
    found = Overview.of(Hits([replace(hit, around=("title: laptop\n\n", ""))]))
    assert found.reason == "a was found: in common only with what was embedded around it: laptop."


def test_what_the_sentence_says_holds_for_any_numbers() -> None:
    drawn = np.random.default_rng(0)
    because = 0
    for _ in range(400):
        scale = drawn.choice([0.01, 0.3])
        documents = ["one two three", "two four five six"]
        first, second = (
            pair(
                text,
                {(q.text, d.text): float(drawn.normal(0, scale)) for q in words(QUERY) for d in words(text)},
                rest=float(drawn.normal(0, 0.1)),
            )
            for text in documents
        )
        if first.score < second.score:
            first, second = second, first
        reason = of(first, second).reason
        if "because" not in reason:
            continue
        because += 1
        lead = first.score - second.score
        sums = [dict(zip(QUERY.split(), one.pairs.sum(axis=1), strict=True)) for one in (first, second)]
        named = [word for word in QUERY.split() if f"“{word}”" in reason]
        gained = sum(sums[0][word] - sums[1][word] for word in named)
        assert gained >= (0.5 if "mostly because" in reason else 0.9) * lead - 1e-6
        for word in named:
            row, other = (one.pairs[QUERY.split().index(word)] for one in (first, second))
            if f"“{word}” met " in reason:
                assert row.max() > max(other.max(), 0)
                assert f"“{word}” met {words(str(first.document))[int(row.argmax())].text}" in reason
            if f"“{word}” counts against b" in reason:
                assert sums[1][word] < 0
    assert because > 50


def test_hits_that_are_level_or_the_wrong_way_round_are_not_explained_away() -> None:
    assert of(FIRST, FIRST).reason.startswith("a and b are level")
    lower = pair("lower", {("slow", "lower"): 0.1})
    assert of(lower, FIRST).reason == ("a came first in the index, and by the exact similarity b is 0.4100 ahead.")


@pytest.mark.parametrize("changed", [{"additive": False}, {"notices": (Notice(MISMATCH, "the index has others"),)}])
@pytest.mark.parametrize("which", [0, 1])
def test_no_reason_is_given_for_a_ranking_that_was_not_computed_here(changed: dict[str, object], which: int) -> None:
    found = [FIRST, pair("lower", {("slow", "lower"): 0.1})]
    found[which] = replace(found[which], **changed)  # type: ignore[arg-type]
    assert "because" not in of(*found).reason


def test_words_that_the_encoder_takes_for_one_another_are_no_reason() -> None:
    """The naive sentence says that one unknown word met another: to the encoder all of them are one."""
    unknown = replace(FIRST, notices=(Notice(UNKNOWN, "3 of 4 words are unknown", side="query"),))
    assert of(unknown, pair("lower", {("slow", "lower"): 0.1})).reason == (
        "a was found for words that this encoder does not know: it takes them for one another."
    )


def test_words_in_common_are_those_of_what_was_read() -> None:
    cut = replace(FIRST, notices=(Notice(TRUNCATED, "cut", side="document"),))
    assert of(cut).reason == "a was found: no word in common in what was read."
    assert of(pair("My slow thing", {("slow", "slow"): 0.1})).reason == "a was found: in common: my, slow."


def test_a_word_that_nothing_speaks_to_is_named_and_is_no_reason() -> None:
    query = "slow refund"
    itself = pair(query, {("slow", "slow"): 0.4, ("refund", "refund"): 0.6}, query=query)
    first = pair("sluggish bank", {("slow", "sluggish"): 0.2, ("refund", "bank"): 0.08}, query=query)
    second = pair("c d", {("slow", "c"): 0.05, ("refund", "d"): 0.02}, query=query)
    found = of(first, second, itself=itself)
    assert found.silent == ("refund",)
    assert "refund" not in found.reason
    spoken = pair("reimbursement d", {("refund", "reimbursement"): 0.13}, query=query)
    assert of(first, spoken, itself=itself).silent == ()


def test_a_word_that_stands_in_a_hit_is_not_said_to_be_missed() -> None:
    itself = pair(QUERY, {("slow", "slow"): 1.0, ("laptop", "laptop"): 1.0}, query=QUERY)
    hit = pair("a slow notebook", {("laptop", "notebook"): 0.5, ("slow", "slow"): 0.01})
    assert of(hit, itself=itself).silent == ()
    assert of(pair("a late notebook", {("laptop", "notebook"): 0.5}), itself=itself).silent == ("slow",)


def test_cells_and_what_no_word_carries_sum_to_the_score() -> None:
    """The naive sum leaves out what a word of the query carries with no word of the document."""
    one = pair("a sluggish notebook", {("slow", "sluggish"): 0.3}, rest=0.1)
    matrix = one.matrix.copy()
    matrix[3, -1] = 0.05  # slow, with no word
    one = replace(one, matrix=matrix, score=one.score + 0.05)
    (row,) = of(one).rows
    assert row.unattributed is not None
    assert sum(met.carried for met in row.meetings) + row.unattributed == pytest.approx(one.score, abs=1e-6)
    assert row.meetings[3].carried == pytest.approx(float(one.query_saliency()[3]))


def test_the_line_where_background_begins_is_drawn_above_the_hits_below_it() -> None:
    overview = of(FIRST, pair("a b", {("slow", "a"): 0.1}), pair("c d", {("slow", "c"): 0.05}))
    rows = tuple(replace(row, standing=share) for row, share in zip(overview.rows, (0.999, 0.5, 0.4), strict=True))
    said = "background begins here"
    html = draw_notebook(view_of(replace(overview, rows=rows)))
    assert html.count(said) == 1
    assert html.index(">a<") < html.index(said) < html.index(">b<")
    assert said not in draw_notebook(view_of(overview))


def test_a_word_of_little_weight_is_never_missed() -> None:
    itself = pair(QUERY, {("slow", "slow"): 0.5, ("laptop", "laptop"): 0.5, ("my", "my"): 0.05})
    assert of(FIRST, itself=itself).silent == ()
    assert of(FIRST).silent is None


def test_a_hit_without_explanation_keeps_its_row() -> None:
    found = Overview.of(hits([FIRST, None, pair("lower", {("slow", "lower"): 0.1})]))
    assert [bool(row.meetings) for row in found.rows] == [True, False, True]
    assert found.reason == "a was found: no word in common."
    assert "no explanation" in plain_text(view_of(found))


def test_the_grid_shows_the_words_that_carry_most_and_sums_the_others() -> None:
    found = of(FIRST, pair("a fast battery", {("slow", "fast"): 0.05, ("laptop", "battery"): 0.04}, rest=0.02))
    assert found.columns(6) == (1, 3)
    assert found.columns(1) == (3,)
    lines = str(found).splitlines()
    (head,) = [line for line in lines if "score" in line]
    assert head.split() == ["score", "laptop", "slow", "other", "words", "no", "query", "word"]
    assert lines[-1].split() == ["2", "b", "0.1100", "battery", "+0.04", "fast", "+0.05", "+0.0000", "+0.0200"]
    assert "sluggish" in draw_notebook(view_of(found))


@pytest.mark.parametrize("width", [24, 40, 60, 80, 160])
def test_where_there_is_no_room_words_stay_and_numbers_go(width: int) -> None:
    shown = plain_text(view_of(of(FIRST, pair("a fast battery", {("slow", "fast"): 0.05}))), width)
    assert all(len(line) <= width for line in shown.splitlines())
    assert "sluggish" in shown
    assert ("+0.30" in shown) == (width >= 60)
