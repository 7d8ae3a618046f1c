"""Qdrant, local: metrics by arithmetic, vectors by id, documents in pages, and what it is when it cannot be asked."""

from __future__ import annotations

from typing import Any
from uuid import NAMESPACE_URL, uuid5

import numpy as np
import pytest

from rag_explain.results.metric import UNKNOWN, Metric
from rag_explain.retrieval import Engine, Kept, Place, engine_of
from rag_explain.retrieval.engines import TOLERANCE

qdrant = pytest.importorskip("qdrant_client")
models = qdrant.models

VECTORS = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)
NAMES = [str(uuid5(NAMESPACE_URL, name)) for name in "abcde"]


def collection(distance: str = "Cosine", *, names: Any = NAMES, named: str | None = None, **settings: Any) -> Any:
    """A client with a collection of five points."""
    client = qdrant.QdrantClient(":memory:")
    vector = models.VectorParams(size=8, distance=models.Distance(distance), **settings)
    client.create_collection("kept", vectors_config=vector if named is None else {named: vector, "other": vector})
    rows = [row.tolist() if named is None else {named: row.tolist(), "other": [1.0] * 8} for row in VECTORS]
    payloads = [{"text": f"text {at}"} for at in range(5)]
    points = zip(names, rows, payloads, strict=True)
    client.upsert("kept", [models.PointStruct(id=one, vector=row, payload=more) for one, row, more in points])
    return client


def engine(client: Any, **place: Any) -> Engine:
    found = engine_of(client, Place(collection="kept", text="text", **place))
    assert found is not None
    return found


def test_the_metrics_of_qdrant_are_those_of_its_scores() -> None:
    one, other = VECTORS[0].astype(np.float64), VECTORS[1].astype(np.float64)
    for distance, metric, score in (
        ("Cosine", Metric("cosine"), one @ other / np.linalg.norm(one) / np.linalg.norm(other)),
        ("Dot", Metric("inner product"), one @ other),
        ("Euclid", Metric("L2"), np.linalg.norm(one - other)),
    ):
        client = collection(distance)
        found = {point.id: point.score for point in client.query_points("kept", VECTORS[0].tolist()).points}
        assert engine(client).metric == metric
        assert found[NAMES[1]] == pytest.approx(score, abs=1e-4)
    assert engine(collection("Manhattan")).metric == UNKNOWN


def test_vectors_come_by_their_ids_and_their_name() -> None:
    client = collection("Dot", named="dense")
    found = engine(client, vector="dense").vectors([NAMES[2], NAMES[0], NAMES[2]])
    assert set(found) == {NAMES[0], NAMES[2]}
    np.testing.assert_allclose(found[NAMES[2]], VECTORS[2], atol=1e-6)
    assert engine(client, vector="absent").vectors(NAMES) == {}
    assert engine(client, vector="absent").metric == UNKNOWN


def test_ids_may_be_numbers() -> None:
    found = engine(collection("Dot", names=range(5))).vectors(["3", "77"])
    assert set(found) == {"3"}
    np.testing.assert_allclose(found["3"], VECTORS[3], atol=1e-6)


def test_documents_are_listed_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rag_explain.retrieval.engines.qdrant._PAGE", 2)
    listed = engine(collection()).documents()
    assert listed is not None
    assert sorted(listed) == sorted(Kept(name, f"text {at}", {"text": f"text {at}"}) for at, name in enumerate(NAMES))


def test_scores_of_quantised_vectors_are_estimates() -> None:
    scalar = models.ScalarQuantization(scalar=models.ScalarQuantizationConfig(type=models.ScalarType.INT8))
    assert engine(collection()).tolerance == TOLERANCE
    assert engine(collection(quantization_config=scalar)).tolerance > TOLERANCE


def test_a_client_without_a_collection_is_no_engine_and_one_that_cannot_be_asked_knows_no_metric() -> None:
    client = qdrant.QdrantClient(":memory:")
    assert engine_of(client) is None
    assert engine(client).metric == UNKNOWN
    unreachable = qdrant.QdrantClient("http://127.0.0.1:9", check_compatibility=False)
    assert engine(unreachable).metric == UNKNOWN


def test_what_is_learnt_is_kept_from_search_to_search(monkeypatch: pytest.MonkeyPatch) -> None:
    client, asked = collection(), []
    get = client.get_collection
    monkeypatch.setattr(client, "get_collection", lambda name: asked.append(name) or get(name))
    known = engine(client)
    for _ in range(3):
        again = engine_of(client, Place(collection="kept", text="text"), known)
        assert again is known
        assert again.metric == Metric("cosine")
    assert asked == ["kept"]
    assert engine_of(client, Place(collection="other"), known) is not known
