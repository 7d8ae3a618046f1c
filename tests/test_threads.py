"""Eight threads at once, for a minute: what each one sees is what a single thread would."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from rag_explain import Explainer
from tests.support.models import CORPUS, tiny

SECONDS = 60.0


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
