"""Eight threads at once: what each one sees is what a single thread would."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rag_explain import Explainer, Hits
from rag_explain.faiss import FaissRetriever
from rag_explain.log import ExplanationLog
from rag_explain.store import Store
from rag_explain.texts.tokens import Unit
from tests.support.models import CORPUS, tiny

SECONDS = 60.0
QUERY = "where did the small dog look at the moon?"
TEXTS = [f"{one} {other}" for one in CORPUS for other in CORPUS[:2]][:6]
IDS = [f"document {number}" for number in range(len(TEXTS))]
UNITS: tuple[Unit, ...] = ("token", "word", "sentence")


@pytest.mark.slow
def test_eight_threads_explain_and_encode_for_a_minute():
    model = tiny("bert", dtype=torch.float32)
    explainers = [Explainer(model), Explainer(model, "hxp"), Explainer(model, layer=1)]
    queries = ["Where did the cat look?", "the capital of france", "why bees"]
    expected = {
        (which, query): [explanation.matrix for explanation in explainer.explain_many(query, CORPUS)]
        for which, explainer in enumerate(explainers)
        for query in queries
    }
    embeddings = model.encode(CORPUS)
    deadline = time.monotonic() + SECONDS
    failures: list[str] = []
    done = [0] * 8

    def explain(thread: int) -> None:
        random = np.random.default_rng(thread)
        while time.monotonic() < deadline and not failures:
            which, query = int(random.integers(3)), queries[int(random.integers(3))]
            found = explainers[which].explain_many(query, CORPUS)
            for explanation, matrix in zip(found, expected[which, query], strict=True):
                # Documents move from cold to kept while this runs, and the two round differently.
                if not np.allclose(explanation.matrix, matrix, atol=1e-5):
                    failures.append(f"thread {thread}: {explainers[which]} on {query!r}")
            if thread % 3 == 0:
                explainers[which].close()  # forget what is kept, so that everything is computed again
            done[thread] += 1

    def encode(thread: int) -> None:
        while time.monotonic() < deadline and not failures:
            if not np.array_equal(model.encode(CORPUS), embeddings):
                failures.append(f"thread {thread}: encode")
            done[thread] += 1

    threads = [threading.Thread(target=encode if i >= 6 else explain, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert min(done) > 0


def test_eight_threads_make_every_call_over_one_store(tmp_path: Path) -> None:
    """Building, keeping, forgetting, explaining and logging at once: nothing but what one thread alone is told."""
    store = Store(tmp_path / "factors", precision="fp32")
    explainer = Explainer(tiny("bert", dtype=torch.float32), store=store)
    retriever = FaissRetriever.from_texts(TEXTS, explainer, ids=IDS)
    log = ExplanationLog(tmp_path / "log")
    calls: dict[str, Callable[[], Any]] = {
        **{f"pairs by {unit}": partial(pairs, explainer, unit) for unit in UNITS},
        **{f"factors by {unit}": partial(rows, explainer, unit) for unit in UNITS},
        "highlights": lambda: [one.score for one in explainer.highlight_many(QUERY, TEXTS, ids=IDS)],
        "highlighted": lambda: [span.value for one in explainer.highlight_many(QUERY, TEXTS) for span in one.spans],
        "evidence": lambda: [span.value for one in explainer.evidence_many(QUERY, TEXTS) for span in one.spans],
        "contrast": lambda: explainer.contrast(QUERY, TEXTS[0], TEXTS[1]).difference,
        "x-ray": lambda: [span.value for span in explainer.x_ray(TEXTS[0], unit="word").words],
        "vectors": lambda: explainer.document_vectors(TEXTS),
        "hits": lambda: [hit.similarity for hit in retriever.search(QUERY, 3, "eager")],
        "loaded": lambda: looked_at(retriever.search(QUERY, 3)),
    }
    wanted = {name: flat(call()) for name, call in calls.items()}
    shared = retriever.search(QUERY, 3)  # looked at by all threads, none of which computes it again
    barrier = threading.Barrier(8)

    def work(thread: int) -> list[str]:
        random, wrong = np.random.default_rng(thread), list[str]()
        barrier.wait()
        looked_at(shared)
        for turn, at in enumerate(random.permutation(len(calls))):
            name = list(calls)[at]
            if not np.allclose(flat(calls[name]()), wanted[name], atol=1e-5):
                wrong.append(f"{name} in thread {thread}")
            if turn % 4 == thread % 4:
                explainer.precompute(TEXTS, unit=UNITS[turn % 3], ids=IDS, progress=False)
            elif turn % 4 == (thread + 1) % 4:
                store.forget(IDS[turn % 2 :: 2])
            log.record(query=f"{thread} {turn}", hits=retriever.search(QUERY, 2))
        return wrong

    with log, ThreadPoolExecutor(8) as pool:
        found = [wrong for each in pool.map(work, range(8)) for wrong in each]
    assert found == []
    records = list(log.records())
    assert len({record.query for record in records}) == len(records) == 8 * len(calls)
    for record in records:
        logged = [one.explanation for one in record.hits]
        assert all(one is not None and abs(one.gap or 0.0) < 1e-5 for one in logged)
    store.forget(IDS)
    assert store.info()["disk"]["rows"] == 0
    explainer.close()
    store.close()


def pairs(explainer: Explainer, unit: Unit) -> list[Any]:
    return [one.matrix for one in explainer.explain_many(QUERY, TEXTS, unit=unit, ids=IDS)]


def rows(explainer: Explainer, unit: Unit) -> list[Any]:
    return [one.rows for one in explainer.factor(TEXTS, unit=unit)]


def looked_at(hits: Hits) -> list[float]:
    for part in ("highlights", "evidence", "sentences", "explanation"):
        hits.load(part)  # type: ignore[arg-type]
    return [hit.highlights.score for hit in hits]  # type: ignore[union-attr]


def flat(values: Any) -> np.ndarray[Any, Any]:
    return np.concatenate([np.ravel(value) for value in values]) if isinstance(values, list) else np.ravel(values)
