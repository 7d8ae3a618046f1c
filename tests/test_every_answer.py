"""What runs on every answer: with sentences kept, eager explanations and the log encode no document."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rag_explain import Explainer, Hits
from rag_explain.faiss import FaissRetriever
from rag_explain.log import ExplanationLog
from tests.support.models import CORPUS, tiny

QUERY = "where did the small dog look at the moon?"


@pytest.fixture
def retriever() -> FaissRetriever:
    made = FaissRetriever.from_texts(CORPUS, Explainer(tiny(dtype=torch.float32)))
    assert made.precompute(progress=False).built == len(CORPUS)
    return made


@pytest.fixture
def encoded(retriever: FaissRetriever, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The documents that the model reads from now on."""
    scorer, found = retriever.explainer.scorer, list[str]()

    def counted(call: Any) -> Any:
        def run(passages: Any, role: str) -> Any:
            found.extend(str(one) for one in passages if role == "document")
            return call(passages, role)

        return run

    monkeypatch.setattr(scorer, "read", counted(scorer.read))
    monkeypatch.setattr(scorer, "embed", counted(scorer.embed))
    return found


def test_eager_explanations_are_by_sentence_and_encode_nothing(retriever: FaissRetriever, encoded: list[str]) -> None:
    hits = retriever.search(QUERY, 3, "eager")
    assert encoded == []
    for hit in hits:
        assert hit.explanation is not None
        assert (hit.explanation.unit, hit.explanation.provenance["path"]) == ("sentence", "memory")
        assert hit.explanation.gap == pytest.approx(0.0, abs=1e-5)


def test_the_log_explains_pending_hits_by_sentence_and_leaves_them_pending(
    retriever: FaissRetriever, encoded: list[str], tmp_path: Path
) -> None:
    hits = retriever.search(QUERY, 3)
    with ExplanationLog(tmp_path) as log:
        log.record(query=QUERY, answer="there", hits=hits)
    assert encoded == []
    (record,) = ExplanationLog(tmp_path).records()
    for hit, logged in zip(hits, record.hits, strict=True):
        assert hit.status == "pending"
        assert logged.explanation is not None
        assert logged.explanation.unit == "sentence"
        assert logged.similarity == pytest.approx(hit.similarity, abs=1e-5)
    looked_at = hits[0].explanation  # by words: these are computed now
    assert looked_at is not None
    assert looked_at.unit == "word"
    assert encoded != []


def test_a_logged_hit_is_tinted_as_it_was(retriever: FaissRetriever, tmp_path: Path) -> None:
    hits = retriever.search(QUERY, 3).load()
    with ExplanationLog(tmp_path, top=2) as log:
        log.record(query=QUERY, hits=hits)
    (record,) = ExplanationLog(tmp_path).records()
    for hit, logged in zip(hits, record.hits, strict=True):
        assert hit.explanation is not None
        assert logged.explanation is not None
        assert len(logged.explanation.document_tokens) == len(hit.explanation.document_tokens)
        kept, original = (one.document_saliency() for one in (logged.explanation, hit.explanation))
        np.testing.assert_allclose(kept, original, atol=1e-5)
        assert logged.explanation.gap == pytest.approx(hit.explanation.gap, abs=1e-5)


def test_every_part_of_all_hits_is_one_batch(retriever: FaissRetriever, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    for name in ("highlight_many", "evidence_many", "explain_many"):
        call = getattr(retriever.explainer, name)

        def counted(query: str, documents: Any, *rest: Any, call: Any = call, **options: Any) -> Any:
            calls.append(len(documents))
            return call(query, documents, *rest, **options)

        monkeypatch.setattr(retriever.explainer, name, counted)
    hits = retriever.search(QUERY, 4)
    for part in ("highlights", "evidence", "sentences"):
        assert hits.load(part) is hits  # type: ignore[arg-type]
    assert calls == [4, 4, 4]
    assert all(hit.status == "pending" for hit in hits)  # no pairs of words were paid for
    for hit in hits:
        assert hit.highlights is not None
        assert hit.evidence is not None
        assert hit.highlights.score == pytest.approx(hit.score, abs=1e-5)
        assert hit.similarity == pytest.approx(hit.score, abs=1e-5)
    assert calls == [4, 4, 4]
    before = [one.value for one in hits[0].highlights or ()]
    hits.load()
    after = [one.value for one in hits[0].highlights or ()]  # from the pairs, now that they are there
    assert after == pytest.approx(before, abs=1e-5)
    assert isinstance(hits[:2], Hits)
    assert calls == [4, 4, 4, 4]
