"""What each part adds on the average over orders: equal to all orders where there are few, and an honest error else."""

from __future__ import annotations

import hashlib
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rag_explain import Explainer
from rag_explain.errors import InvalidInput
from rag_explain.scorers import BlackBox
from rag_explain.texts.segments import sentence_spans
from tests.support.embedders import Asked
from tests.support.models import tiny
from tests.support.references_occlusion import shapley

QUERY = "the cat saw a dog"
DOCUMENT = "The cat looked at the moon. Paris is old! A dog (small) barked."
LONG = "The cat looked at the moon and a small dog barked at the old bridge over the sun"


def meanings(texts: list[str]) -> Any:
    """Which words a text has, however often: what is said twice counts once."""
    found = np.zeros((len(texts), 32))
    for row, text in zip(found, texts, strict=True):
        for word in text.lower().replace(".", "").split():
            row[hashlib.sha256(word.encode()).digest()[0] % 32] = 1.0
        row[0] = 0.5
    return found


def test_few_parts_are_explained_by_all_orders() -> None:
    model = tiny("bert")
    (factors,) = Explainer(model, "shapley").factor([DOCUMENT], unit="sentence")
    spans = sentence_spans(DOCUMENT)
    values = {frozenset[int](): np.zeros(16)}
    for size in (1, 2, 3):
        for chosen in combinations(range(3), size):
            text = " ".join(DOCUMENT[a:b] for at, (a, b) in enumerate(spans) if at in chosen)
            vector = model.encode_document(text, show_progress_bar=False).astype(float)
            values[frozenset(chosen)] = vector / np.linalg.norm(vector)
    np.testing.assert_allclose(factors.rows, shapley(values, 3), atol=2e-6)
    assert factors.references == {"standard error": 0.0}


def all_subsets(text: str) -> dict[frozenset[int], Any]:
    """The vector of each subset of a text's words, of length one and in double precision."""
    words = text.split()
    values: dict[frozenset[int], Any] = {frozenset(): np.zeros(32)}
    for size in range(1, len(words) + 1):
        for chosen in combinations(range(len(words)), size):
            (vector,) = meanings([" ".join(words[at] for at in chosen)])
            values[frozenset(chosen)] = vector / np.linalg.norm(vector)
    return values


def test_words_that_are_few_are_explained_by_all_orders_too() -> None:
    text = "cat moon cat sun dog"
    (factors,) = Explainer(meanings, "shapley").factor([text], unit="word")
    np.testing.assert_allclose(factors.rows, shapley(all_subsets(text), 5), atol=1e-6)


def test_orders_that_are_drawn_come_to_the_mean_of_all_orders() -> None:
    text = "cat moon cat sun dog moon bridge"
    wanted = shapley(all_subsets(text), 7)
    box = BlackBox(meanings)
    drawn = [Explainer(box, "shapley", samples=4, seed=seed).factor([text], unit="word")[0].rows for seed in range(200)]
    error = np.std(drawn, axis=0, ddof=1) / np.sqrt(len(drawn))
    assert error.max() > 1e-4  # they are drawn, and differ
    assert np.abs(np.mean(drawn, axis=0) - wanted).max() < 5 * error.max()
    assert np.abs(drawn[0] - wanted).max() > 5 * error.max()  # one alone is further off


def test_what_is_said_twice_is_shared_where_leaving_it_out_once_shows_nothing() -> None:
    document = "The cat sat. The cat sat. A moon rose."
    query = "the cat sat"
    once = Explainer(meanings, "occlusion").explain(query, document).document_saliency()
    shared = Explainer(meanings, "shapley").explain(query, document).document_saliency()
    assert once[:2] == pytest.approx([0.0, 0.0], abs=1e-6)
    assert shared[0] == pytest.approx(shared[1], abs=1e-6)
    assert shared[0] > 0.2 > abs(shared[2])


def test_values_sum_to_the_score_whatever_was_drawn_and_are_drawn_alike() -> None:
    explainer = Explainer(meanings, "shapley", samples=4)
    explanation = explainer.explain(QUERY, LONG, unit="word")
    assert float(explanation.document_saliency().sum()) == pytest.approx(explanation.score, abs=1e-5)
    assert abs(explanation.gap or 0.0) < 1e-6
    again = Explainer(meanings, "shapley", samples=4).explain(QUERY, LONG, unit="word")
    np.testing.assert_array_equal(explanation.matrix, again.matrix)
    other = Explainer(meanings, "shapley", samples=4, seed=1).explain(QUERY, LONG, unit="word")
    assert not np.allclose(explanation.matrix, other.matrix, atol=1e-4)
    assert "on the average over 4 orders" in " ".join(notice.text for notice in explanation.notices)


def test_the_standard_error_is_what_values_are_off_by_and_shrinks_with_samples() -> None:
    """Against many samples; the error is that of the worst query, so a query's own is smaller, but not by far."""
    best = Explainer(meanings, "shapley", samples=2000, seed=99).explain(QUERY, LONG, unit="word").document_saliency()
    sizes = {}
    for samples in (8, 32):
        off, told = [], []
        for seed in range(12):
            explainer = Explainer(meanings, "shapley", samples=samples, seed=seed)
            explanation = explainer.explain(QUERY, LONG, unit="word")
            off.append(np.mean((explanation.document_saliency() - best) ** 2))
            told.append((explanation.references or {})["document standard error"])
        sizes[samples] = (np.sqrt(np.mean(off)), np.mean(told))
    for real, shown in sizes.values():
        assert 0.8 * real < shown < 8 * real
    assert sizes[32][0] < 0.75 * sizes[8][0]
    assert sizes[32][1] < 0.75 * sizes[8][1]


def test_it_is_kept_planned_and_stopped_like_occlusion(tmp_path: Path) -> None:
    asked = Asked()
    with Explainer(asked, "shapley", samples=4, store=tmp_path) as explainer:
        plan = explainer.plan([LONG], query=QUERY, unit="word")
        sent = len(asked.texts)
        built = explainer.explain(QUERY, LONG, unit="word")
        assert len(asked.texts) - sent == plan.embeddings <= 4 * (len(built.document_tokens) + 5)
    with Explainer(asked, "shapley", samples=4, store=tmp_path) as explainer:
        kept = explainer.explain(QUERY, LONG, unit="word")
        assert kept.provenance["path"] == "disk"
        assert kept.references == built.references
    with Explainer(asked, "shapley", samples=6, store=tmp_path) as explainer:
        assert explainer.explain(QUERY, LONG, unit="word").provenance["path"] == "built"
    explainer = Explainer(Asked(), "shapley", samples=4, max_calls=9 + 75)
    assert explainer.explain(QUERY, LONG, unit="word").provenance["path"] == "partial"


@pytest.mark.parametrize("samples", [0, 2, 5, "8"])
def test_samples_that_give_no_error_are_refused(samples: Any) -> None:
    with pytest.raises(InvalidInput, match="samples must be"):
        Explainer(meanings, "shapley", samples=samples)
