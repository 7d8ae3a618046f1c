"""How sure? The background of unrelated pairs: measured, kept with the index, and tied to the encoder."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
import torch

from rag_explain.errors import FormatError, InvalidInput
from rag_explain.explainer import Explainer
from rag_explain.faiss import FaissRetriever
from rag_explain.results.calibration import Calibration
from tests.support.embedders import Asked
from tests.support.models import CORPUS, tiny

QUERY = "why did the dog bark at the moon?"
WORDS = sorted({word for text in CORPUS for word in text.replace(",", " ").replace(".", " ").split()})


@cache
def explainer() -> Explainer:
    return Explainer(tiny("bert", dtype=torch.float32))


@cache
def texts() -> list[str]:
    drawn = np.random.default_rng(0)
    return [" ".join(drawn.choice(WORDS, 9)) + "." for _ in range(150)]


def retriever(own: Explainer | None = None, **options: Any) -> FaissRetriever:
    return FaissRetriever.from_texts(texts(), own or explainer(), **options)


def queries() -> list[str]:
    drawn = np.random.default_rng(1)
    return [" ".join(drawn.choice(WORDS, 6)) for _ in range(60)]


def test_with_queries_of_ones_own_the_distribution_is_that_of_all_pairs() -> None:
    found = retriever().calibrate(queries())
    scores = explainer().scorer.scores(queries(), texts()).ravel()
    assert (found.source, found.queries, found.documents, found.pairs) == ("queries", 60, 150, 9000)
    for share in (0.1, 0.5, 0.9, 0.99):
        assert found.line(share) == pytest.approx(np.quantile(scores, share), abs=1e-3)
        assert found.standing(found.line(share)) == pytest.approx(share, abs=1e-6)
    assert found.standing(-1.0) == 0.0
    assert found.standing(1.1) == 1.0


def test_the_stated_share_of_pairs_of_other_queries_is_below_the_line_within_its_error() -> None:
    found = retriever().calibrate(queries()[:30])
    scores = explainer().scorer.scores(queries()[30:], texts())
    for share in (0.5, 0.9, 0.99):
        below = (scores < found.line(share)).mean(axis=1)
        error = np.hypot(found.error(share), below.std(ddof=1) / np.sqrt(len(below)))
        assert abs(below.mean() - share) < 3 * error + 1e-3


def test_without_queries_sentences_are_compared_with_all_documents_but_their_own() -> None:
    found = retriever().calibrate()
    assert found.source == "sentences"
    assert found.pairs == 150 * 149
    assert found.line(1.0) < 0.9999  # a sentence and its own document are the same text here
    assert "sentences of other documents" in str(found)


def test_a_hit_says_where_it_stands_and_views_draw_the_line() -> None:
    searched = retriever()
    assert searched.search(QUERY, 3)[0].standing is None
    found = searched.calibrate(queries())
    hits = searched.search(QUERY, 150)
    similarities = explainer().scorer.score(QUERY, [hit.text or "" for hit in hits])
    for hit, similarity in zip(hits, similarities, strict=True):
        assert hit.standing == pytest.approx(found.standing(similarity), abs=1e-4)
        assert hit.to_dict()["standing"] == hit.standing
    shown = str(hits[-2:]._view())
    assert "background begins here" in shown
    assert "no better than chance" in shown
    above = [hit for hit in hits if (hit.standing or 0) >= 0.99]
    below = [hit for hit in hits if (hit.standing or 0) < 0.99]
    assert above
    page = type(hits)((*above[:1], *below[:1])).to_html()
    data = page[page.index("rag-explain-data") :]
    assert data.index("above 99") < data.index("background begins here")
    assert "no better than chance" in data


@pytest.mark.parametrize("metric", [faiss.METRIC_INNER_PRODUCT, faiss.METRIC_L2])
def test_the_threshold_is_in_the_unit_of_the_index(metric: int) -> None:
    vectors = explainer().scorer.embed(texts(), "document")
    vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    index = faiss.IndexFlat(vectors.shape[1], metric)
    index.add(vectors)
    searched = FaissRetriever(index, texts(), explainer(), normalize=True)
    found = searched.calibrate(queries())
    hits = searched.search(QUERY, 150, min_score=found.threshold(0.9))
    assert all(hit.standing is not None and hit.standing >= 0.9 - 1e-6 for hit in hits)
    left = {hit.id for hit in searched.search(QUERY, 150)} - {hit.id for hit in hits}
    others = [hit for hit in searched.search(QUERY, 150) if hit.id in left]
    assert all(hit.standing is not None and hit.standing <= 0.9 + 1e-6 for hit in others)


def test_it_is_kept_beside_the_index_and_goes_with_it(tmp_path: Path) -> None:
    searched = retriever()
    found = searched.calibrate(queries())
    searched.save(tmp_path / "index")
    loaded = FaissRetriever.load(tmp_path / "index", explainer())
    assert loaded.calibration == found
    assert loaded.search(QUERY, 1)[0].standing == pytest.approx(searched.search(QUERY, 1)[0].standing)
    retriever().save(tmp_path / "index")  # another one in its place, which was not calibrated
    assert FaissRetriever.load(tmp_path / "index", explainer()).calibration is None


def test_it_is_tied_to_the_identity_of_the_encoder() -> None:
    found = retriever().calibrate(queries())
    other = Explainer(tiny("bert", "cls", dtype=torch.float32))
    searched = FaissRetriever.from_texts(texts(), other)
    with pytest.raises(InvalidInput, match="calibrate again"):
        searched.calibration = found
    model = tiny("bert", dtype=torch.float32)
    changing = FaissRetriever.from_texts(texts(), Explainer(model))
    changing.calibrate(queries())
    assert changing.search(QUERY, 1)[0].standing is not None
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert changing.search(QUERY, 1)[0].standing is None


def test_a_black_box_is_sent_the_queries_and_no_document() -> None:
    asked = Asked()
    searched = retriever(Explainer(asked))
    before = len(asked.texts)
    searched.calibrate(queries()[:20])
    assert len(asked.texts) - before <= 21  # and now and then a probe


@pytest.mark.parametrize("wrong", ["a query", [7]])
def test_what_are_no_queries_is_refused_in_words(wrong: Any) -> None:
    with pytest.raises(InvalidInput, match="queries must be a list"):
        retriever().calibrate(wrong)


def test_an_index_of_one_text_has_no_unrelated_pair() -> None:
    with pytest.raises(InvalidInput, match="fewer than two"):
        FaissRetriever.from_texts(["a cat"], explainer()).calibrate()
    with pytest.raises(InvalidInput, match="no unrelated pair"):
        FaissRetriever.from_texts(["a cat sat on the mat."] * 3, explainer()).calibrate()


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    found = retriever().calibrate(queries())
    path = tmp_path / "calibration.json"
    found.save(path)
    assert Calibration.load(path) == found
    data = json.loads(path.read_text())
    for wrong in ({**data, "version": 9}, {**data, "scores": data["scores"][:-1]}, {**data, "levels": ["a"]}, []):
        path.write_text(json.dumps(wrong))
        with pytest.raises(FormatError):
            Calibration.load(path)
    path.write_text("{")
    with pytest.raises(FormatError, match="damaged"):
        Calibration.load(path)
    with pytest.raises(InvalidInput, match="there is no calibration"):
        Calibration.load(tmp_path / "nowhere.json")


def test_a_share_is_between_zero_and_one() -> None:
    found = retriever().calibrate(queries())
    with pytest.raises(InvalidInput, match="between 0 and 1"):
        found.threshold(99)
