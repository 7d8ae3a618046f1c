"""Hits after a search: what a list of documents and scores tells of the stage that returned it."""

from dataclasses import replace

import pytest

from rag_explain.results.stages import Stage
from rag_explain.retrieval.stages import StagedHits, after, same_score, scored
from rag_explain.types import Hit


def found(*scores: float | None) -> list[Hit]:
    """What a search found."""
    return [
        Hit(
            id=f"d{rank}",
            text="t",
            rank=rank,
            score=score,
            metric="cosine",
            stages=(Stage("index", "search", rank, None, score, "cosine"),),
        )
        for rank, score in enumerate(scores, 1)
    ]


def test_what_changed_nothing_is_no_stage():
    hits = found(0.9, 0.8, 0.7)
    assert after("x", hits, [0.9, 0.8, 0.7]) == hits
    assert after("x", hits[:2]) == hits[:2]  # a cut at the end
    assert after("x", []) == after("x", [], []) == []
    assert after("x", [None, None], [1.0, 2.0]) == [None, None]


def test_other_scores_are_the_stages_own():
    one, other = after("x", found(0.9, 0.8), [0.9, 3.0])
    assert [one.stages[-1], other.stages[-1]] == [Stage("x", "rerank", 1, 1, 0.9), Stage("x", "rerank", 2, 2, 3.0)]
    assert (one.metric, other.metric) == ("unknown", "unknown")
    (dropped,) = after("x", found(0.9), [None])
    assert (dropped.score, dropped.stages[-1].kind) == (None, "rerank")


def test_another_order_is_a_reranking_and_keeps_only_scores_that_the_documents_carry():
    a, b, c = found(0.9, 0.8, 0.7)
    carrying = after("x", [b, a, c], [0.8, 0.9, 0.7])
    assert [(hit.rank, hit.score, hit.metric) for hit in carrying] == [
        (1, 0.8, "cosine"),
        (2, 0.9, "cosine"),
        (3, 0.7, "cosine"),
    ]
    assert {(hit.stages[-1].kind, hit.stages[-1].score) for hit in carrying} == {("rerank", None)}
    bare = after("x", [b, a, c])
    assert {(hit.score, hit.metric) for hit in bare} == {(None, "unknown")}


def test_documents_left_out_are_a_filter_and_documents_mixed_in_are_a_reranking():
    a, b, c = found(0.9, 0.8, 0.7)
    filtered = after("x", [b, c])
    assert [(hit.rank, hit.score, hit.metric) for hit in filtered] == [(1, 0.8, "cosine"), (2, 0.7, "cosine")]
    assert [hit.stages[-1] for hit in filtered] == [Stage("x", "filter", 1, 2), Stage("x", "filter", 2, 3)]
    _, mixed = after("x", [None, a])
    assert mixed.stages[-1] == Stage("x", "rerank", 2, 1)
    assert [hit.stages[-1].kind for hit in after("x", [a, replace(a), b])] == ["rerank"] * 3


def test_hits_are_never_changed():
    hits = found(0.9, 0.8)
    after("x", hits[::-1], [5.0, 4.0])
    scored(hits[0], "x", 5.0)
    assert [(hit.rank, hit.score, len(hit.stages)) for hit in hits] == [(1, 0.9, 1), (2, 0.8, 1)]


def test_a_score_without_a_place_leaves_the_rank_of_the_search():
    hit = scored(found(0.9)[0], "x", 5.0)
    assert (hit.rank, hit.score, hit.metric) == (1, 5.0, "unknown")
    assert hit.stages[-1] == Stage("x", "rerank", None, 1, 5.0)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [(1.0, 1.0, True), (1.0, 1.1, False), (None, None, True), (None, 0.0, False), (float("nan"), float("nan"), True)],
)
def test_the_same_score(one, other, same):
    assert same_score(one, other) is same


def test_copies_without_a_hit_are_known_only_inside_the_retriever_they_were_returned_to():
    staged = StagedHits()
    a, b = found(0.9, 0.8)
    staged.enter("outer")
    staged.enter("inner")
    staged.pass_through("inner", [(("a",), a), (("b",), b)], run="inner", outer="outer")
    assert staged.pass_through("other", [(("a",), None)], run=None) == [None]
    moved = staged.pass_through("outer", [(("b",), None), (("a",), None)], run="outer")
    assert [hit.id for hit in moved] == ["d2", "d1"]
    assert [stage.name for stage in moved[0].stages] == ["index", "outer"]
    assert staged.find(("x",), a) is moved[1]
    assert staged.innermost(["chain", "inner", "outer"]) == "inner"


def test_a_stage_that_was_seen_is_named_once_even_where_it_changed_nothing():
    staged = StagedHits()
    (a,) = found(0.9)
    documents = [(("a",), a)]
    assert staged.pass_through("search", documents) == [a]  # it is what the search found
    for _ in range(2):
        (kept,) = staged.pass_through("x", documents)
        assert kept.stages[1:] == (Stage("x", "filter", 1, 1),)
    assert staged.pass_through("y", documents, is_seen=False) == [kept]
