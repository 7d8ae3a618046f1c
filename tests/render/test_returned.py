"""What the model returned stands beside the logit that is split, wherever people see it, and beside no other score."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rag_explain.results.explanation import Explanation
from rag_explain.results.highlights import Highlights
from tests.support.samples import explain

TOLD = "the model returned 0.8176, made of this logit"


def of_a_reranker() -> Explanation:
    return replace(explain(), measure="logit", score=1.5, returned=0.81757)


def test_it_is_told_in_the_terminal_the_notebook_and_the_page() -> None:
    explanation = of_a_reranker()
    for shown in (str(explanation), explanation._repr_html_(), explanation.to_html()):
        assert TOLD in " ".join(shown.split())
        assert "logit" in shown
    for shown in (str(Highlights.of(explanation)), Highlights.of(explanation).to_html()):
        assert TOLD in " ".join(shown.split())


def test_it_is_told_below_a_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = of_a_reranker().plot("heatmap", tmp_path / "figure.png")
    assert any(TOLD in " ".join(text.get_text().split()) for text in figure.texts)


@pytest.mark.parametrize("returned", [None, 1.5, 1.5 + 1e-7])
def test_it_is_not_told_where_it_is_the_score_itself(returned: float | None) -> None:
    explanation = replace(of_a_reranker(), returned=returned)
    for shown in (explanation, Highlights.of(explanation)):
        assert "the model returned" not in str(shown)
    assert "score" not in str(explanation).split("logit")[0]


def test_highlights_keep_it_and_older_ones_are_read() -> None:
    found = Highlights.of(of_a_reranker())
    data = json.loads(found.to_json())
    assert Highlights.from_dict(data).returned == pytest.approx(0.81757)
    del data["returned"]
    assert Highlights.from_dict(data).returned is None
