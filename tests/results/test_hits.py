"""Hits: which stages set rank and score, and what that means for similarity, gap and explanation."""

import json
from dataclasses import replace

import pytest

from rag_explain.results.deferred import Deferred
from rag_explain.results.notices import OTHER_RANKING
from rag_explain.results.stages import Stage
from rag_explain.types import Hit
from tests.support.answers import explanation, hit, reranked


def test_a_stage_is_named_in_the_explanation_whether_it_is_computed_or_not():
    pending = Deferred(explanation)
    one = hit(handle=pending)
    moved = reranked(one)
    assert moved.peek() is None
    assert [notice.code for notice in moved.notices] == [OTHER_RANKING]
    assert one.notices == ()
    reason = "the documents were ranked by Reranker, not by this encoder's similarity alone"
    assert moved.explanation.surrogate == moved.peek().surrogate == reason
    assert moved.notices == moved.explanation.notices
    assert one.explanation.surrogate is None  # the hit that shares the explanation went through no such stage
    assert moved.to_dict()["explanation"]["surrogate"] == reason


def test_the_gap_is_between_the_search_and_the_encoder_and_never_a_rerankers():
    one = hit()
    assert reranked(one).gap == one.gap
    unscored = replace(reranked(one), stages=(Stage("index", "search", 1), *reranked(one).stages[1:]))
    assert unscored.gap is None
    assert unscored.similarity == one.similarity


def test_a_filter_is_no_other_ranking():
    one = hit()
    kept = replace(one, rank=1, stages=(Stage("index", "search", 2), Stage("Filter", "filter", 1, 2)))
    assert kept.notices == ()
    assert kept.explanation is one.explanation


def test_stages_are_plain_data_in_json():
    plain = json.loads(json.dumps(reranked(hit()).to_dict()))
    assert [stage["name"] for stage in plain["stages"]] == ["VectorIndexRetriever", "Reranker"]
    second = {"name": "Reranker", "kind": "rerank", "rank": 1, "rank_before": 3, "score": 2.0, "metric": "unknown"}
    assert {name: plain["stages"][1][name] for name in second} == second
    assert plain["stages"][1]["explanation"] is None
    assert Hit(id="a", text=None, rank=1, score=0.5, metric="cosine").to_dict()["stages"] == []


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_score_that_is_no_number_stays_out_of_json(number):
    json.dumps(reranked(hit(), score=number).to_dict(), allow_nan=False)
