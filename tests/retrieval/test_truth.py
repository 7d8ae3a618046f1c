"""Is what is explained what was scored? Reasons of scorer, method, retriever and measurement, none hiding another."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers.base.modules import Dense
from sentence_transformers.sentence_transformer.modules import Normalize

from rag_explain.explainer import Explainer
from rag_explain.results.hits import Hit
from rag_explain.results.metric import Metric
from rag_explain.results.notices import MISMATCH, OTHER_RANKING, OTHER_SCORE, UNCHECKED
from rag_explain.retrieval import Engine, HitExplainer, Place, RetrievedDocument, retriever_reason
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
    for metric, score in (
        ("squared L2", 2 - 2 * own.score),
        ("cosine distance", 1 - own.score),
        ("(1 + cosine) / 2", (1 + own.score) / 2),
        ("sigmoid(inner product / 100)", 1 / (1 + np.exp(-own.score / 100))),
    ):
        assert hit_of(score, metric=metric).gap == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("score", [0.0, 1.0, -0.1, None])
def test_a_score_that_no_sigmoid_gives_tells_no_similarity(score: float | None) -> None:
    assert Metric("sigmoid(inner product / 100)").similarity(score) is None


def test_vectors_that_are_given_with_the_documents_and_the_query_are_compared() -> None:
    own, query = explainer().document_vectors(CORPUS[:2]), explainer().query_vector(QUERY)
    other = np.flip(own[1])

    def noticed(first: Any, second: Any, searched_with: Any) -> list[list[str]]:
        found = [
            RetrievedDocument(id=name, text=text, vector=vector)
            for name, text, vector in zip("ab", CORPUS, (first, second), strict=False)
        ]
        hits = HitExplainer(explainer()).hits(QUERY, found, query_vector=searched_with)
        return [codes(hit) for hit in hits]

    assert noticed(own[0], own[1], query) == [[], []]
    assert noticed(own[0].tolist(), 3.0 * own[1], query[None].tolist()) == [[], []]  # a cosine knows no lengths
    assert noticed(own[0], other, query) == [[], [MISMATCH]]
    assert noticed(own[0], own[1][:8], query) == [[], [MISMATCH]]
    assert noticed(own[0], None, None) == [[], [UNCHECKED]]
    assert noticed(own[0], None, query) == [[], [UNCHECKED]]
    assert noticed(own[0], own[1], np.flip(query)) == [[MISMATCH], [MISMATCH]]


def test_a_query_vector_of_another_encoder_is_named_with_what_to_pass() -> None:
    found = [RetrievedDocument(id="a", text=CORPUS[0])]
    (hit,) = HitExplainer(explainer(), name="the pgvector table").hits(QUERY, found, query_vector=[1.0] * 3)
    assert hit.explanation is not None
    assert hit.explanation.surrogate == (
        "the pgvector table gives the query a vector of 3 dimensions, and this encoder has 16: "
        'pass explainer=Explainer(SentenceTransformer(..., prompts={"query": ..., "document": ...})) '
        "of the model that it uses"
    )


def test_vectors_beside_an_inner_product_tell_what_it_ranked_by() -> None:
    own = explainer().document_vectors(CORPUS[:1])[0]
    for length, expected in ((3.0, [OTHER_RANKING]), (1.0, [])):
        kept = own / np.linalg.norm(own) * length
        document = RetrievedDocument(id="a", text=CORPUS[0], vector=kept)
        (hit,) = HitExplainer(explainer(), metric="inner product").hits(QUERY, [document])
        assert codes(hit) == expected


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


def test_where_nothing_can_be_compared_that_is_said_and_is_no_stand_in(caplog: pytest.LogCaptureFixture) -> None:
    for hit in (hit_of(12.0), hit_of(12.0, metric=Metric("inner product", is_normalised=False))):
        assert codes(hit) == [UNCHECKED]
        assert hit.explanation is not None
        assert hit.explanation.surrogate is None
        assert hit.explanation.notices[-1].level == "note"
    assert codes(hit_of(12.0, surrogate="reranked")) == [OTHER_RANKING]
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


class OneVector(Engine):
    """An engine that keeps one vector for every document, or fails."""

    def __init__(self, vector: Any, metric: str = "cosine") -> None:
        super().__init__(vector)
        self._metric = Metric(metric)

    @classmethod
    def of(cls, handle: object, place: Place) -> None:
        return None

    def told_metric(self) -> Metric:
        return self._metric

    def vectors(self, ids: Sequence[str]) -> dict[str, Any]:
        if self.handle is None:
            raise ConnectionError("no route to host")
        return dict.fromkeys(ids, self.handle)


def test_the_vector_that_an_index_keeps_is_compared_by_its_direction_or_with_its_length() -> None:
    by_dot = Explainer(tiny(dtype=torch.float32, similarity_fn_name="dot"))
    own = explainer().document_vectors(CORPUS[:1])[0]
    moved = own + 5e-3 * np.linalg.norm(own) * np.eye(len(own))[0]
    for source, vector, metric, expected in (
        (explainer(), own, "cosine", []),
        (explainer(), 2 * own, "cosine distance", []),
        (explainer(), moved, "cosine", [MISMATCH]),
        (explainer(), own[:8], "cosine", [MISMATCH]),
        (explainer(), own, "squared L2", [OTHER_RANKING]),
        (explainer(), own, "1 - inner product", [OTHER_RANKING]),
        (explainer(), own / np.linalg.norm(own), "squared L2", []),
        (explainer(), own, "unknown", [UNCHECKED]),
        (by_dot, own, "inner product", []),
        (by_dot, 2 * own, "inner product", [MISMATCH]),
        (by_dot, own, "cosine", [OTHER_RANKING]),
        (explainer(), None, "cosine", [UNCHECKED]),
    ):
        assert codes(hit_of(0.0, source, engine=partial(OneVector, vector, metric))) == expected, (metric, vector)


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_inner_products_are_compared_by_the_lengths_of_their_vectors(size: float) -> None:
    def after() -> list[torch.nn.Module]:
        scale = Dense(16, 16, bias=False, activation_function=torch.nn.Identity())
        torch.nn.init.eye_(scale.linear.weight).data.mul_(size)
        return [Normalize(), scale]

    by_dot = Explainer(tiny(after=after, dtype=torch.float32, similarity_fn_name="dot"))
    (own,) = by_dot.explain_many(QUERY, CORPUS[:1])
    assert own.score < 1.01 * size**2
    for off, expected in ((1e-4, []), (5e-3, [MISMATCH]), (0.5, [MISMATCH])):
        assert codes(hit_of(own.score - off * size**2, by_dot, metric="inner product")) == expected


def test_half_precision_may_round_more() -> None:
    half = Explainer(tiny(dtype=torch.bfloat16))
    (own,) = half.explain_many(QUERY, CORPUS[:1])
    for off, source, expected in ((0.01, half, []), (0.01, explainer(), [MISMATCH]), (0.1, half, [MISMATCH])):
        score = source.explain(QUERY, CORPUS[0]).score - off
        assert codes(hit_of(score, source, metric="cosine")) == expected
    assert own.score < 1.01


def test_vectors_of_documents_come_from_the_store_where_it_has_them() -> None:
    with Explainer(tiny(after=lambda: [Normalize()], dtype=torch.float32)) as own:
        fresh = own.document_vectors(CORPUS)
        assert own.precompute(CORPUS[:2], progress=False).built == 2
        np.testing.assert_allclose(own.document_vectors(CORPUS), fresh, atol=1e-6)


def test_right_vectors_do_not_tell_by_what_they_are_compared() -> None:
    (own,) = explainer().document_vectors(CORPUS[:1])

    def noticed(score: float | None, told: str, **options: Any) -> list[str]:
        retrieval = HitExplainer(explainer(), engine=partial(OneVector, own, told))
        return codes(retrieval.hits(QUERY, [RetrievedDocument(id="a", text=CORPUS[0], score=score)], **options)[0])

    right = explainer().explain(QUERY, CORPUS[0]).score
    assert noticed(5.8, "unknown") == noticed(None, "unknown") == [UNCHECKED]
    assert noticed(5.8, "unknown", surrogate="mixed with another") == [OTHER_RANKING]
    assert noticed(None, "cosine") == noticed(right, "unknown", metric="cosine") == []
