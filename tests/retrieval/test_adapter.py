"""What every wrapped retriever shares: order, laziness, failure, time, and scores of another scorer."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rag_explain.errors import InvalidInput
from rag_explain.explainer import Explainer
from rag_explain.results.explanation import Explanation
from rag_explain.retrieval import HitExplainer, RetrievedDocument, find_model, wanted_hits
from rag_explain.texts.passage import Passage
from tests.support.models import CORPUS, tiny
from tests.support.samples import explain as sample

QUERY = "where is the cat?"


@cache
def explainer() -> Explainer:
    return Explainer(tiny(dtype=torch.float32))


class Scripted(Explainer):
    """Stands where an Explainer does; fails or dawdles on chosen texts, and counts."""

    def __init__(self, *, fail: str | None = None, seconds: float = 0.0) -> None:
        self.fail, self.seconds, self.calls = fail, seconds, 0

    def explain_many(
        self, query: str, documents: Sequence[str | Passage], *, ids: Sequence[str | None] | None = None
    ) -> list[Explanation]:
        self.calls += 1
        time.sleep(self.seconds * len(documents))
        if self.fail in documents:
            raise RuntimeError("the machine is on fire")
        return [sample(query, str(document)) for document in documents]


def found(texts: Sequence[str | None] = CORPUS, **more: Any) -> list[RetrievedDocument]:
    return [RetrievedDocument(id=f"d{i}", text=text, **more) for i, text in enumerate(texts)]


def test_hits_keep_order_ids_scores_and_metadata() -> None:
    documents = [
        RetrievedDocument(id=str(i), text=text, score=float(-i), metadata={"i": i})
        for i, text in enumerate(reversed(CORPUS))
    ]
    hits = HitExplainer(explainer(), metric="whatever").hits(QUERY, documents)
    assert [(hit.id, hit.text, hit.score, hit.metadata, hit.rank) for hit in hits] == [
        (one.id, one.text, one.score, one.metadata, rank) for rank, one in enumerate(documents, 1)
    ]
    assert [hit.gap for hit in hits] == [None] * len(hits)


def test_lazy_costs_nothing_until_looked_at_and_is_computed_once() -> None:
    scripted = Scripted()
    hits = HitExplainer(scripted).hits(QUERY, found())
    assert {hit.status for hit in hits} == {"pending"}
    assert json.dumps([hit.to_dict() for hit in hits])
    assert repr(hits)
    assert scripted.calls == 0
    first = hits[1].explanation
    assert first is hits[1].explanation
    assert scripted.calls == 1
    assert [hit.status for hit in hits] == ["pending", "ready", "pending", "pending", "pending"]


@pytest.mark.parametrize(
    ("mode", "wanted"), [(True, 5), ("lazy", 5), ("eager", 5), (False, 0), (0, 0), (2, 2), (99, 5)]
)
def test_how_many_are_explained(mode: Any, wanted: int) -> None:
    hits = HitExplainer(Scripted()).hits(QUERY, found(), mode)
    ready = "ready" if mode == "eager" else "pending"
    assert [hit.status for hit in hits] == [ready] * wanted + ["skipped"] * (5 - wanted)
    assert all(hit.reason for hit in hits[wanted:])
    assert wanted_hits(mode, 5) == wanted


@pytest.mark.parametrize("mode", ["later", -1, 2.5, None, [1]])
def test_an_unknown_mode_is_refused(mode: Any) -> None:
    with pytest.raises(InvalidInput, match="explain must be"):
        HitExplainer(Scripted(), explain=mode)


def test_eager_equals_lazy() -> None:
    retrieval = HitExplainer(explainer())
    lazy, eager = (retrieval.hits(QUERY, found(), mode) for mode in ("lazy", "eager"))
    for one, other in zip(lazy, eager, strict=True):
        assert one.explanation is not None
        assert other.explanation is not None
        np.testing.assert_allclose(one.explanation.matrix, other.explanation.matrix, atol=1e-6)


@pytest.mark.parametrize("mode", ["lazy", "eager"])
@pytest.mark.parametrize("budget", [None, 60.0])
def test_one_failing_document_is_a_warning_and_a_reason(
    mode: Any, budget: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    hits = HitExplainer(Scripted(fail=CORPUS[2]), budget=budget).hits(QUERY, found(), mode)
    with caplog.at_level(logging.WARNING):
        explained = [hit.explanation is not None for hit in hits]
    assert explained == [True, True, False, True, True]
    assert (hits[2].status, hits[2].reason) == ("failed", "RuntimeError: the machine is on fire")
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] or mode == "eager"


def test_a_failure_is_logged_once_per_document_without_the_texts(caplog: pytest.LogCaptureFixture) -> None:
    hits = HitExplainer(Scripted(fail=CORPUS[2])).hits(QUERY, found(), "eager")
    assert hits[2].status == "failed"
    (message,) = [record.getMessage() for record in caplog.records]
    assert message == "document 'd2' could not be explained: RuntimeError: the machine is on fire"


def test_a_model_that_cannot_be_explained_never_fails_the_search(caplog: pytest.LogCaptureFixture) -> None:
    retrieval = HitExplainer(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    for mode in ("lazy", "eager", "eager"):
        hits = retrieval.hits(QUERY, found(), mode)  # type: ignore[arg-type]
        assert [hit.explanation for hit in hits] == [None] * 5
        assert all(hit.status == "failed" and "Linear" in (hit.reason or "") for hit in hits)
    assert len([record for record in caplog.records if "without explanations" in record.getMessage()]) == 1


def test_no_text_empty_text_and_long_text() -> None:
    long = "the cat " * 6250
    hits = HitExplainer(explainer()).hits(QUERY, found([None, "", long]), "eager")
    assert (hits[0].status, hits[0].reason) == ("skipped", "the document has no text")
    assert [hit.status for hit in hits[1:]] == ["ready", "ready"]
    assert hits[2].explanation is not None
    assert hits[2].explanation.truncated == ("document",)
    assert hits[2].explanation.document == long


def test_what_does_not_fit_into_the_budget_is_skipped_and_says_so() -> None:
    retrieval = HitExplainer(Scripted(seconds=0.2), budget=0.5)
    start = time.monotonic()
    hits = retrieval.hits(QUERY, found(CORPUS * 4), "eager")
    assert time.monotonic() - start < 2.0
    statuses = [hit.status for hit in hits]
    assert statuses[0] == "ready"
    assert statuses[-1] == "skipped"
    assert hits[-1].reason == "it did not fit into the time budget of 0.5 s per query"
    time.sleep(0.5)
    assert [hit.status for hit in hits] == statuses  # what was returned does not change afterwards


def test_a_stuck_explainer_holds_nobody_up() -> None:
    stuck = Scripted(seconds=1.5)
    retrieval = HitExplainer(stuck, budget=0.05)
    start = time.monotonic()
    for _ in range(10):
        assert {hit.status for hit in retrieval.hits(QUERY, found(), "eager")} == {"skipped"}
    assert time.monotonic() - start < 1.4
    assert stuck.calls <= 2


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
        assert "another model's vectors" in (hit.explanation.surrogate or "")
        assert hit.gap == pytest.approx(-0.3, abs=1e-6)
    assert len(caplog.records) == 1


def test_distances_are_read_as_the_similarities_they_stand_for() -> None:
    (own,) = explainer().explain_many(QUERY, CORPUS[:1])
    for metric, score in (("squared L2", 2 - 2 * own.score), ("cosine distance", 1 - own.score)):
        (hit,) = HitExplainer(explainer(), metric=metric).hits(
            QUERY, [RetrievedDocument(id="a", text=CORPUS[0], score=score)], "eager"
        )
        assert hit.gap == pytest.approx(0.0, abs=1e-6)


def test_a_reranked_score_is_marked_and_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    retrieval = HitExplainer(explainer(), metric="cosine", surrogate="a reranker made the score")
    (hit,) = retrieval.hits(QUERY, [RetrievedDocument(id="a", text=CORPUS[0], score=12.0)], "eager")
    assert hit.explanation is not None
    assert hit.explanation.surrogate == "a reranker made the score"
    assert not caplog.records


def test_a_method_with_a_score_of_its_own_is_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    with Explainer(tiny(dtype=torch.float32), "alignment") as aligned:
        (hit,) = HitExplainer(aligned, metric="cosine").hits(
            QUERY, [RetrievedDocument(id="a", text=CORPUS[0], score=0.1)], "eager"
        )
    assert hit.explanation is not None
    assert "maxsim" in (hit.explanation.surrogate or "")
    assert (hit.similarity, hit.gap) == (None, None)
    assert not caplog.records


def test_threads_and_async_calls_agree_with_one_by_one() -> None:
    retrieval = HitExplainer(explainer())
    queries = [f"where is the {word}?" for word in ("cat", "dog", "moon", "bridge")]
    alone = {query: [hit.explanation.matrix for hit in retrieval.hits(query, found())] for query in queries}  # type: ignore[union-attr]
    results: list[tuple[str, list[Any]]] = []

    def work(query: str) -> None:
        results.append((query, [hit.explanation.matrix for hit in retrieval.hits(query, found(), "eager")]))  # type: ignore[union-attr]

    threads = [threading.Thread(target=work, args=(queries[i % 4],)) for i in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    async def many() -> list[Any]:
        return await asyncio.gather(*(retrieval.ahits(queries[i % 4], found(), "eager") for i in range(200)))

    for i, hits in enumerate(asyncio.run(many())):
        results.append((queries[i % 4], [hit.explanation.matrix for hit in hits]))
    assert len(results) == 232
    for query, matrices in results:
        for one, other in zip(matrices, alone[query], strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6)


def test_eager_async_leaves_the_loop_alone() -> None:
    async def ticks() -> int:
        task = asyncio.create_task(HitExplainer(Scripted(seconds=0.1)).ahits(QUERY, found(), "eager"))
        count = 0
        while not task.done():
            await asyncio.sleep(0.01)
            count += 1
        return count

    assert asyncio.run(ticks()) >= 10


def test_the_model_is_found_inside_what_holds_it() -> None:
    model = tiny(dtype=torch.float32)
    assert find_model(model) is model
    for name in ("client", "_client", "_model"):
        embeddings = SimpleNamespace(**{name: model})
        assert find_model(embeddings) is model
        assert find_model(SimpleNamespace(embeddings=embeddings)) is model
    assert find_model(SimpleNamespace(client="https://remote")) is None
    assert find_model(None) is None


def test_a_model_is_enough_and_the_explainer_is_made_when_needed() -> None:
    retrieval = HitExplainer(tiny(dtype=torch.float32))
    assert retrieval._made is None
    (hit,) = retrieval.hits(QUERY, found(CORPUS[:1]))
    assert retrieval._made is None
    assert hit.explanation is not None
    assert isinstance(retrieval.explainer, Explainer)
