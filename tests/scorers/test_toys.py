"""A new kind of scorer needs one file: two toys go all the way, from the Explainer to hits, views and the log."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rag_explain import Explainer
from rag_explain.errors import InvalidInput
from rag_explain.faiss import FaissRetriever
from rag_explain.log import ExplanationLog, records
from rag_explain.retrieval import HitExplainer, RetrievedDocument
from tests.support.bag_scorer import BagOfVectors, vector
from tests.support.pair_scorer import BIAS, LIMIT, PairReader, weight

QUERY = "the cat sat"
DOCUMENTS = ["The cat sat on the mat. Dogs bark.", "a moon", "sat sat SAT"]


def test_a_bag_of_vectors_is_explained_exactly() -> None:
    explainer = Explainer(BagOfVectors())
    explanations = explainer.explain_many(QUERY, DOCUMENTS)
    scores = BagOfVectors().score(QUERY, DOCUMENTS)
    for explanation, document, score in zip(explanations, DOCUMENTS, scores, strict=True):
        words = [token.text for token in explanation.document_tokens]
        wanted = [[float(vector(left) @ vector(right)) for right in words] for left in QUERY.split()]
        np.testing.assert_allclose(explanation.pairs, wanted, rtol=1e-5, atol=1e-5)
        assert explanation.score == pytest.approx(score, abs=1e-4)
        assert abs(explanation.gap or 0.0) < 1e-4
        assert (explanation.method, explanation.measure, explanation.document) == ("words", "dot", document)


def test_a_bag_of_vectors_is_kept_grouped_and_searched(tmp_path: Path) -> None:
    explainer = Explainer(BagOfVectors(), store=tmp_path)
    cold = explainer.explain(QUERY, DOCUMENTS[0])
    assert explainer.precompute(DOCUMENTS, unit="token", progress=False).built == 3
    warm = explainer.explain(QUERY, DOCUMENTS[0])
    assert (cold.provenance["path"], warm.provenance["path"]) == ("cold", "memory")
    np.testing.assert_allclose(warm.matrix, cold.matrix, rtol=2e-3, atol=2e-3)  # rows are kept in half precision
    sentences = explainer.explain(QUERY, DOCUMENTS[0], unit="sentence")
    assert [token.text for token in sentences.document_tokens] == ["The cat sat on the mat.", "Dogs bark."]
    # Cold, or built and kept in half precision: which of the two depends on what cold looks have cost so far.
    np.testing.assert_allclose(sentences.matrix, cold.by_sentence().matrix, atol=2e-2)
    hits = FaissRetriever.from_texts(DOCUMENTS, explainer).search(QUERY, k=3)
    order = np.argsort(-BagOfVectors().score(QUERY, DOCUMENTS))
    assert [hit.text for hit in hits] == [DOCUMENTS[index] for index in order]
    assert all(abs(hit.gap or 0.0) < 0.02 for hit in hits.load("explanation"))


def test_a_scorer_that_reads_the_pair_is_explained_by_its_logit() -> None:
    explainer = Explainer(PairReader())
    long = " ".join(["cat"] * 2 * LIMIT)
    for document in (*DOCUMENTS, long):
        explanation = explainer.explain(QUERY, document)
        assert explanation.score == pytest.approx(float(PairReader().score(QUERY, [document])[0]))
        assert explanation.returned == pytest.approx(1 / (1 + np.exp(-explanation.score)))
        assert explanation.matrix[-1, -1] == pytest.approx(BIAS)
        assert abs(explanation.gap or 0.0) < 1e-5
        assert explanation.measure == "logit"
        first = explanation.document_tokens[0].text
        assert explanation.pairs[0, 0] == pytest.approx(weight("the", first))
    assert explanation.truncated == ("document",)
    assert len(explanation.document_tokens) == LIMIT - 3
    assert explainer.explain(QUERY, DOCUMENTS[0], unit="sentence").unit == "sentence"


def test_what_a_pair_reader_cannot_do_is_refused_in_words() -> None:
    explainer = Explainer(PairReader())
    with pytest.raises(InvalidInput, match="no vector per text"):
        FaissRetriever.from_texts(DOCUMENTS, explainer)
    with pytest.raises(InvalidInput, match="nothing to precompute"):
        explainer.precompute(DOCUMENTS)
    with pytest.raises(InvalidInput, match="no embedding to be taken apart: use terms"):
        Explainer(PairReader(), "bilrp")
    with pytest.raises(InvalidInput, match="no vectors of tokens"):
        Explainer(PairReader(), "alignment").explain(QUERY, DOCUMENTS[0])
    with pytest.raises(InvalidInput, match="not in pairs"):
        BagOfVectors().read_pair(*[BagOfVectors().read((), "query")] * 2)  # type: ignore[arg-type]  # refused before


@pytest.mark.parametrize("scorer", [BagOfVectors(), PairReader()], ids=lambda scorer: str(scorer.name))
def test_hits_views_and_the_log_work_for_any_scorer(scorer: BagOfVectors | PairReader, tmp_path: Path) -> None:
    found = [RetrievedDocument(id=str(index), text=text) for index, text in enumerate(DOCUMENTS)]
    hits = HitExplainer(Explainer(scorer)).hits(QUERY, found)
    assert "cat" in hits.to_html()
    assert "cat" in hits._repr_html_()
    assert "cat" in str(hits[0].explanation)
    with ExplanationLog(tmp_path) as log:
        log.record(query=QUERY, answer="yes", hits=hits)
    (record,) = records(tmp_path)
    explanation = record.hits[0].explanation
    assert explanation is not None
    assert explanation.measure == scorer.measure
    assert len(Explainer(scorer).compare(QUERY, DOCUMENTS[0]).rows) == 1
