"""Is what is explained what was scored? Reasons of scorer, method, retriever and measurement, none hiding another."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rag_explain.explainer import Explainer
from rag_explain.results.hits import Hit
from rag_explain.results.metric import UNKNOWN, Metric
from rag_explain.results.notices import MISMATCH, OTHER_RANKING, OTHER_SCORE
from rag_explain.retrieval import HitExplainer, RetrievedDocument, faiss_metric, retriever_reason
from tests.support.models import CORPUS, tiny

QUERY = "where is the cat?"


@cache
def explainer() -> Explainer:
    return Explainer(tiny(dtype=torch.float32))


def hit_of(score: float, source: Explainer | None = None, *, reason: str | None = None, **options: Any) -> Hit:
    """The one hit of a search that gave this score; `reason` is the call's own."""
    document = RetrievedDocument(id="a", text=CORPUS[0], score=score)
    (hit,) = HitExplainer(source or explainer(), **options).hits(QUERY, [document], "eager", surrogate=reason)
    return hit


def codes(hit: Hit) -> list[str]:
    assert hit.explanation is not None
    return [notice.code for notice in hit.explanation.notices]


def test_a_score_of_another_encoder_is_noticed_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    own = [one.score for one in explainer().explain_many(QUERY, CORPUS)]
    right = [RetrievedDocument(id=str(i), text=text, score=own[i]) for i, text in enumerate(CORPUS)]
    wrong = [RetrievedDocument(id=str(i), text=text, score=own[i] - 0.3) for i, text in enumerate(CORPUS)]
    retrieval = HitExplainer(explainer(), metric="cosine")
    for hit in retrieval.hits(QUERY, right, "eager"):
        assert hit.explanation is not None
        assert hit.explanation.surrogate is None
        assert hit.gap == pytest.approx(0.0, abs=1e-6)
    assert not caplog.records
    for hit in retrieval.hits(QUERY, wrong, "eager"):
        assert hit.explanation is not None
        assert "built with another model" in (hit.explanation.surrogate or "")
        assert hit.gap == pytest.approx(-0.3, abs=1e-6)
    assert len(caplog.records) == 1


def test_distances_are_read_as_the_similarities_they_stand_for() -> None:
    (own,) = explainer().explain_many(QUERY, CORPUS[:1])
    for metric, score in (("squared L2", 2 - 2 * own.score), ("cosine distance", 1 - own.score)):
        assert hit_of(score, metric=metric).gap == pytest.approx(0.0, abs=1e-6)


def test_a_reason_that_was_declared_does_not_switch_the_measurement_off(caplog: pytest.LogCaptureFixture) -> None:
    hit = hit_of(12.0, metric="cosine", surrogate="a reranker made the score")
    assert codes(hit) == [OTHER_RANKING, MISMATCH]
    assert hit.explanation is not None
    assert hit.explanation.surrogate == (
        "a reranker made the score; the index's score implies a similarity of 12.0000, but this encoder computes "
        f"{hit.explanation.score:.4f}"
    )
    assert not caplog.records  # a user who declared the reason is not warned


def test_reasons_of_the_retriever_and_of_the_call_are_both_said() -> None:
    (own,) = explainer().explain_many(QUERY, CORPUS[:1])
    hit = hit_of(own.score, metric="cosine", surrogate="reranked", reason="the mean of two queries")
    assert codes(hit) == [OTHER_RANKING, OTHER_RANKING]
    assert hit.explanation is not None
    assert hit.explanation.surrogate == "reranked; the mean of two queries"


def test_a_score_that_tells_no_similarity_is_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    assert codes(hit_of(12.0)) == []
    assert codes(hit_of(12.0, metric=Metric("inner product", is_normalised=False))) == []
    assert not caplog.records


def test_a_method_with_a_score_of_its_own_is_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    with Explainer(tiny(dtype=torch.float32), "alignment") as aligned:
        hit = hit_of(0.1, aligned, metric="cosine", surrogate="reranked")
    assert codes(hit) == [OTHER_SCORE, OTHER_RANKING]
    assert hit.explanation is not None
    assert "maxsim" in (hit.explanation.surrogate or "")
    assert (hit.similarity, hit.gap) == (None, None)
    assert not caplog.records


def test_what_the_user_declares_goes_before_what_was_found_out() -> None:
    assert retriever_reason(None, "found out") == "found out"
    assert retriever_reason("declared", "found out") == "declared"
    assert retriever_reason(False, "found out") is None


def test_the_metrics_of_faiss() -> None:
    assert faiss_metric(SimpleNamespace(metric_type=0)) == Metric("inner product")
    assert faiss_metric(SimpleNamespace(metric_type=1)) == Metric("squared L2")
    assert faiss_metric(SimpleNamespace(metric_type=23)) == faiss_metric(None) == UNKNOWN
