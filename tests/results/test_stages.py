"""Stages: which are legs of which, what they sum to, and how they are written, shown and contrasted."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from rag_explain.errors import InvalidInput
from rag_explain.render.notebook import draw
from rag_explain.render.sentences import place, ranked
from rag_explain.render.terminal import plain_text
from rag_explain.render.views import view_of
from rag_explain.results.deferred import Deferred
from rag_explain.results.stages import Stage, depths, expanded, fused, legs_of, ranking_notices
from rag_explain.types import Hit
from tests.support.samples import DOCUMENT, OTHER, QUERY, explain

WORDS = Stage("BM25", "search", 2, None, 7.5, "bm25", weight=0.4, contribution=0.2)
VECTORS = Stage("Vectors", "search", 41, None, 0.3, "cosine")
CUT = Stage("Cut", "filter", 40, 41, weight=0.6, contribution=0.05)
INNER = Stage("Inner", "fusion", 3, score=0.25, metric="rrf", legs=2, contribution=0.7)
THIRD = Stage("Third", "search", None, contribution=0.0)
OUTER = Stage("Outer", "fusion", 1, score=0.7, metric="relative score", legs=2)
RERANK = Stage("CrossEncoder", "rerank", 4, 1, 0.9, note="it is tiny")
ALL = (THIRD, WORDS, VECTORS, CUT, INNER, OUTER, RERANK)


def hit(*stages: Stage, document: str = DOCUMENT, name: str = "d1") -> Hit:
    why = Deferred.ready(explain(document=document))
    return Hit(id=name, text=document, rank=4, score=0.9, metric="unknown", stages=stages, handle=why, query=QUERY)


def test_the_legs_of_a_stage_are_the_ends_of_the_branches_before_it():
    assert [legs_of(ALL, index) for index in range(len(ALL))] == [[], [], [], [], [1, 3], [0, 4], []]
    assert depths(ALL) == [1, 2, 2, 2, 1, 0, 0]
    assert [fused(ALL, index) for index in (3, 4, 5, 6)] == [None, pytest.approx(0.25), pytest.approx(0.7), None]
    assert fused((replace(WORDS, contribution=None), CUT, INNER), 2) is None


def test_stages_of_which_a_part_was_lost_still_show():
    lost = (INNER, OUTER)
    assert [legs_of(lost, index) for index in (0, 1)] == [[], [0]]
    assert fused(lost, 1) is None
    assert "Outer" in plain_text(view_of(hit(*lost)))


def test_stages_come_back_from_plain_data():
    plain = json.loads(json.dumps([stage.to_dict() for stage in ALL]))
    assert tuple(map(Stage.from_dict, plain)) == ALL
    assert Stage.from_dict(plain[0] | {"of a later version": 1}) == THIRD


def test_only_what_ran_after_the_search_that_is_explained_is_a_notice():
    (notice,) = ranking_notices(ALL)
    assert "Inner and then Outer and then CrossEncoder" in notice.text
    assert ranking_notices(replace(stage, is_inside=True) for stage in ALL) == ()


def test_every_stage_is_in_every_view():
    shown = hit(*ALL)
    text, page, cell = plain_text(view_of(shown), 120), shown.to_html(), draw(view_of(shown))
    for drawn in (text, cell):
        for stage in ALL:
            assert stage.name in drawn
        for said in ("not found", "41 → 40", "7.5000 bm25", "0.2500 rrf", "+0.7000", "Note: it is tiny"):
            assert said in drawn
    assert all(f'"{chr(0x2003) * depth}{stage.name}"' in page for stage, depth in zip(ALL, depths(ALL), strict=True))
    assert '"stages":null' in hit(VECTORS).to_html()


def test_what_explains_a_stage_is_computed_when_it_is_shown_and_named():
    asked = []

    def why() -> object:
        asked.append(1)
        return explain(document=OTHER)

    lazy = replace(WORDS, handle=Deferred(why))  # type: ignore[arg-type]
    shown = hit(lazy, CUT, INNER)
    assert repr(shown)
    assert shown.to_dict()["stages"][0]["explanation"] is None
    assert not asked
    assert "bank +" in plain_text(view_of(shown), 140)
    assert asked == [1]
    assert shown.to_dict()["stages"][0]["explanation"]["document"] == OTHER


def test_a_stage_in_one_sentence():
    assert ranked((VECTORS,)) == ""
    said = ranked(ALL)
    assert said.startswith("rank 4 by CrossEncoder (0.9000); before that rank 1 by Outer (0.7000 relative score), of [")
    assert "not found by Third" in said
    assert "rank 2 by BM25 (7.5000 bm25, adds 0.2000)" in said
    unscored = (WORDS, VECTORS, CUT, replace(INNER, score=None))
    assert ranked(unscored).startswith("rank 3 by Inner (sum 0.2500 rrf, adds 0.7000), of [")


def test_the_terms_of_a_stage_stand_before_it_once_they_are_known():
    terms = (Stage("relevance", "term", None, score=0.9, contribution=0.45),)
    lazy = Stage("mmr", "mmr", 1, split=Deferred(lambda: terms))
    assert expanded((lazy,)) == (lazy,)
    assert lazy.terms == terms
    assert expanded((lazy,)) == (*terms, replace(lazy, legs=1))
    assert fused(expanded((lazy,)), 1) == 0.45
    failed = Stage("mmr", "mmr", 1, split=Deferred(lambda: 1 / 0))  # type: ignore[arg-type,return-value]
    assert failed.terms == ()
    assert expanded((failed,))[0].note == "ZeroDivisionError: division by zero"


def test_two_hits_are_contrasted_stage_by_stage():
    ranks = [(2, 1), (41, 1), (5, 1)]
    sides = []
    for side, document in ((0, OTHER), (1, DOCUMENT)):
        why = Deferred.ready(explain(document=document))
        sides.append(
            hit(
                Stage("BM25", "search", ranks[0][side], contribution=0.2),
                Stage("Vectors", "search", ranks[1][side], score=0.5, contribution=0.1 * (1 + side)),
                Stage("Fusion", "fusion", 2 - side, score=0.3, legs=2),
                Stage("CrossEncoder", "rerank", ranks[2][side], 2 - side, handle=why),
                document=document,
                name=f"d{side}",
            )
        )
    contrast = sides[0].contrast(sides[1])
    assert [one.name for one in contrast.stages] == ["BM25", "Vectors", "Fusion", "CrossEncoder"]
    assert contrast.stages[0].contrast is None
    assert contrast.stages[3].contrast.difference == contrast.got.score - contrast.wanted.score
    text = " ".join(plain_text(view_of(contrast), 120).split())
    assert "wanted was 2nd for BM25 and 41st for Vectors got was 1st for BM25 and 1st for Vectors" in text
    assert "CrossEncoder put wanted 5th, below got (1st), for " in text
    assert "41st · 0.5000 1st · 0.5000 +0.1000" in text
    plain = json.loads(json.dumps(contrast.to_dict()))
    assert [one["wanted"]["rank"] for one in plain["stages"]] == [2, 41, 2, 5]
    assert "above got" in plain_text(view_of(sides[1].contrast(sides[0])), 120)


def test_a_hit_is_contrasted_with_another_hit_of_its_query():
    one = hit(WORDS)
    for other, said in (
        ("text", "another Hit, not str"),
        (replace(one, handle=Deferred.skipped("not asked for")), "has no explanation to contrast: not asked for"),
        (replace(one, handle=Deferred.ready(explain("another query"))), "two explanations of the same query"),
    ):
        with pytest.raises(InvalidInput, match=said):
            one.contrast(other)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rank", "said"),
    [(1, "1st"), (2, "2nd"), (3, "3rd"), (4, "4th"), (11, "11th"), (112, "112th"), (21, "21st"), (None, "not found")],
)
def test_a_rank_in_words(rank, said):
    assert place(rank) == said
