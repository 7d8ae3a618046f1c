"""What every wrapped retriever shares: order, laziness, batches, failure, and time."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from rag_explain.errors import InvalidInput
from rag_explain.explainer import Explainer
from rag_explain.results.explanation import Explanation
from rag_explain.retrieval import HitExplainer, RetrievedDocument
from rag_explain.texts.passage import Passage
from rag_explain.texts.tokens import Unit
from tests.support.models import CORPUS, tiny
from tests.support.samples import explain as sample

QUERY = "where is the cat?"


@cache
def explainer() -> Explainer:
    return Explainer(tiny(dtype=torch.float32))


class Scripted(Explainer):
    """An Explainer that fails on a chosen text, waits for `gate` before all others but one, and notes its batches."""

    def __init__(self, *, fail: str | None = None, wait: bool = False, first: str | None = None) -> None:
        super().__init__(explainer().scorer)
        self.fail, self.first = fail, first
        self.batches: list[int] = []
        self.started, self.gate = threading.Event(), threading.Event()
        if not wait:
            self.gate.set()

    def explain_many(
        self,
        query: str,
        documents: Sequence[str | Passage],
        *,
        unit: Unit = "token",
        ids: Sequence[str | None] | None = None,
    ) -> list[Explanation]:
        self.batches.append(len(documents))
        self.started.set()
        if self.first not in documents:
            assert self.gate.wait(timeout=60), "the gate was never opened"
        if self.fail in documents:
            raise RuntimeError("the machine is on fire")
        return [sample(query, str(document)) for document in documents]

    def wait_until_idle(self) -> None:
        """Both of its threads meet: whatever they had begun has ended."""
        barrier = threading.Barrier(2)
        for future in [self.in_background(barrier.wait) for _ in range(2)]:
            future.result()


def found(texts: Sequence[str | None] = CORPUS, **more: Any) -> list[RetrievedDocument]:
    return [RetrievedDocument(id=f"d{i}", text=text, **more) for i, text in enumerate(texts)]


def test_hits_keep_order_ids_scores_and_metadata() -> None:
    documents = [
        RetrievedDocument(id=str(i), text=text, score=float(-i), metadata={"i": i})
        for i, text in enumerate(reversed(CORPUS))
    ]
    hits = HitExplainer(explainer(), metric="unknown").hits(QUERY, documents)
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
    assert scripted.batches == []
    first = hits[1].explanation
    assert first is hits[1].explanation
    assert scripted.batches == [1]
    assert [hit.status for hit in hits] == ["pending", "ready", "pending", "pending", "pending"]


@pytest.mark.parametrize(
    ("mode", "top", "wanted"),
    [
        ("lazy", None, 5),
        ("eager", None, 5),
        ("off", None, 0),
        ("lazy", 0, 0),
        ("lazy", 2, 2),
        ("eager", np.int64(2), 2),
        ("lazy", 99, 5),
        ("off", 2, 0),
    ],
)
def test_how_many_are_explained(mode: Any, top: int | None, wanted: int) -> None:
    for hits in (
        HitExplainer(Scripted()).hits(QUERY, found(), mode, top=top),
        HitExplainer(Scripted(), explain=mode, top=top).hits(QUERY, found()),
    ):
        ready = "ready" if mode == "eager" else "pending"
        assert [hit.status for hit in hits] == [ready] * wanted + ["skipped"] * (5 - wanted)
        assert {hit.reason for hit in hits[wanted:]} <= {"an explanation was not asked for"}


@pytest.mark.parametrize("mode", ["later", True, False, 1, 2.5, None, [1]])
def test_an_unknown_mode_is_refused(mode: Any) -> None:
    with pytest.raises(InvalidInput, match="explain must be 'lazy', 'eager' or 'off', not"):
        HitExplainer(Scripted(), explain=mode)


@pytest.mark.parametrize("top", [-1, 2.5, "3", True])
def test_a_top_that_is_no_number_of_hits_is_refused(top: Any) -> None:
    with pytest.raises(InvalidInput, match="top must be"):
        HitExplainer(Scripted()).hits(QUERY, found(), top=top)


def test_an_unknown_metric_is_refused() -> None:
    with pytest.raises(InvalidInput, match="there is no metric 'whatever': use one of cosine"):
        HitExplainer(Scripted(), metric="whatever")
    with pytest.raises(InvalidInput, match="there is no metric 'whatever'"):
        HitExplainer(Scripted()).hits(QUERY, found(), metric="whatever")


def test_a_time_limit_that_is_no_time_is_refused() -> None:
    with pytest.raises(InvalidInput, match="time_limit must be a number of seconds"):
        HitExplainer(Scripted(), time_limit=-1.0)


def test_all_pending_hits_of_a_query_are_explained_in_one_batch() -> None:
    scripted = Scripted()
    hits = HitExplainer(scripted).hits(QUERY, found())
    assert hits[1].explanation is not None
    hits.load("explanation")
    assert scripted.batches == [1, 4]
    assert [hit.status for hit in hits] == ["ready"] * 5
    assert [hit.explanation.document for hit in hits if hit.explanation] == list(CORPUS)
    hits.load("explanation")
    assert scripted.batches == [1, 4]


def test_eager_hits_the_first_hits_and_parts_of_them_are_one_batch_too() -> None:
    scripted = Scripted()
    HitExplainer(scripted).hits(QUERY, found(), "eager")
    HitExplainer(scripted).hits(QUERY, found(), "eager", top=3)
    HitExplainer(scripted).hits(QUERY, found([None, *CORPUS[1:]])).load()
    HitExplainer(scripted).hits(QUERY, found())[:2].load()
    assert scripted.batches == [5, 3, 4, 2]


def test_two_threads_that_load_the_same_hits_compute_them_once() -> None:
    scripted = Scripted(wait=True)
    hits = HitExplainer(scripted).hits(QUERY, found())
    threads = [threading.Thread(target=hits.load) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert scripted.started.wait(timeout=60)
    scripted.gate.set()
    for thread in threads:
        thread.join()
    assert scripted.batches == [5]
    assert [hit.status for hit in hits] == ["ready"] * 5


@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_one_document_that_spoils_the_batch_does_not_spoil_the_others(
    mode: Any, caplog: pytest.LogCaptureFixture
) -> None:
    scripted = Scripted(fail=CORPUS[2])
    hits = HitExplainer(scripted).hits(QUERY, found(), mode).load()
    assert scripted.batches == [5, 1, 1, 1, 1, 1]
    assert [hit.status for hit in hits] == ["ready", "ready", "failed", "ready", "ready"]
    (message,) = [record.getMessage() for record in caplog.records]
    assert message == "document 'd2' could not be explained: RuntimeError: the machine is on fire"


def test_eager_equals_lazy() -> None:
    retrieval = HitExplainer(explainer(), unit="word")
    lazy, eager = (retrieval.hits(QUERY, found(), mode) for mode in ("lazy", "eager"))
    for one, other in zip(lazy, eager, strict=True):
        assert one.explanation is not None
        assert other.explanation is not None
        np.testing.assert_allclose(one.explanation.matrix, other.explanation.matrix, atol=1e-6)


@pytest.mark.parametrize("mode", ["lazy", "eager"])
@pytest.mark.parametrize("time_limit", [None, 60.0])
def test_one_failing_document_is_a_warning_and_a_reason(
    mode: Any, time_limit: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    hits = HitExplainer(Scripted(fail=CORPUS[2]), time_limit=time_limit).hits(QUERY, found(), mode)
    assert [hit.explanation is not None for hit in hits] == [True, True, False, True, True]
    assert (hits[2].status, hits[2].reason) == ("failed", "RuntimeError: the machine is on fire")
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert {record.name for record in caplog.records} == {"rag_explain.retrieval"}


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


def test_what_does_not_fit_into_the_time_limit_is_skipped_and_says_so() -> None:
    scripted = Scripted(wait=True, first=CORPUS[0])
    hits = HitExplainer(scripted, time_limit=1.0).hits(QUERY, found(), "eager")
    expected = ["ready"] + ["skipped"] * 4
    assert [hit.status for hit in hits] == expected
    assert hits[-1].reason == "it did not fit into the time limit of 1 s per query"
    scripted.gate.set()
    scripted.wait_until_idle()
    assert [hit.status for hit in hits] == expected  # what was returned does not change afterwards


def test_a_stuck_explainer_does_not_hold_up_other_queries() -> None:
    stuck = Scripted(wait=True)
    retrieval = HitExplainer(stuck, time_limit=0.05)
    for _ in range(10):  # ends although the gate is shut
        assert {hit.status for hit in retrieval.hits(QUERY, found(), "eager")} == {"skipped"}
    assert len(stuck.batches) <= 2
    stuck.gate.set()


def test_an_explainer_ends_its_threads_when_it_is_closed_and_makes_new_ones_when_it_is_used_again() -> None:
    own, gate, met = Explainer(explainer().scorer), threading.Event(), threading.Barrier(3)

    def work() -> threading.Thread:
        met.wait()
        gate.wait()
        return threading.current_thread()

    begun = [own.in_background(work) for _ in range(2)]
    met.wait()
    waiting = own.in_background(work)
    own.close()
    assert waiting.cancelled()
    gate.set()
    for future in begun:
        thread = future.result()
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert own.in_background(threading.current_thread).result() not in [future.result() for future in begun]
    own.close()


def test_what_still_waits_when_the_explainer_is_closed_is_skipped() -> None:
    class Closed(Scripted):
        def in_background(self, call: Any, *arguments: Any) -> Future[Any]:
            future: Future[Any] = Future()
            future.cancel()
            return future

    hits = HitExplainer(Closed(), time_limit=60.0).hits(QUERY, found(), "eager")
    assert {hit.status for hit in hits} == {"skipped"}


def test_threads_and_async_calls_agree_with_one_by_one() -> None:
    retrieval = HitExplainer(explainer(), unit="word")
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
    async def ask() -> Any:
        scripted = Scripted(wait=True)
        task = asyncio.create_task(HitExplainer(scripted).ahits(QUERY, found(), "eager"))
        while not scripted.started.is_set():
            await asyncio.sleep(0.001)
        scripted.gate.set()  # only a loop that still runs gets here
        return await task

    assert [hit.status for hit in asyncio.run(ask())] == ["ready"] * 5


def test_a_model_is_enough_and_the_explainer_is_made_when_needed() -> None:
    made: list[Explainer] = []

    def make() -> Explainer:
        made.append(Explainer(tiny(dtype=torch.float32)))
        return made[0]

    retrieval = HitExplainer(make)
    (hit,) = retrieval.hits(QUERY, found(CORPUS[:1]))
    assert made == []
    assert hit.explanation is not None
    assert made == [retrieval.explainer]
    assert isinstance(HitExplainer(tiny(dtype=torch.float32)).explainer, Explainer)


def test_a_text_in_place_of_a_retrieved_document_is_named() -> None:
    with pytest.raises(InvalidInput, match="found must be RetrievedDocuments, not str"):
        HitExplainer(explainer).hits(QUERY, ["the cat sat on the mat."])  # type: ignore[list-item]
