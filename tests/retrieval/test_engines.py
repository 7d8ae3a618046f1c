"""Engines tell their metric, the vectors they keep and their documents, whatever framework holds their handle."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import numpy as np
import pytest

from rag_explain.results.metric import UNKNOWN, Metric
from rag_explain.retrieval import Kept, Place, engine_of
from rag_explain.retrieval.engines import TOLERANCE

VECTORS = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)
IDS = ["a", "b", "c", "d", "e"]


def collection(space: str | None = None, **settings: Any) -> Any:
    chromadb = pytest.importorskip("chromadb")
    metadata = None if space is None else {"hnsw:space": space}
    made = chromadb.EphemeralClient().create_collection(uuid4().hex, metadata=metadata, **settings)
    made.add(ids=IDS, embeddings=VECTORS.tolist(), documents=[f"text {name}" for name in IDS])
    return made


def test_the_metrics_of_chroma_are_those_of_its_distances() -> None:
    def distances(space: str) -> tuple[Metric, float]:
        made = collection(space)
        engine = engine_of(made)
        assert engine is not None
        found = made.query(query_embeddings=[VECTORS[0].tolist()], n_results=5)
        return engine.metric, dict(zip(found["ids"][0], found["distances"][0], strict=True))["b"]

    one, other = VECTORS[0].astype(np.float64), VECTORS[1].astype(np.float64)
    cosine = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
    assert distances("l2") == (Metric("squared L2"), pytest.approx(float(((one - other) ** 2).sum()), rel=1e-4))
    assert distances("cosine") == (Metric("cosine distance"), pytest.approx(1 - cosine, abs=1e-5))
    assert distances("ip") == (Metric("1 - inner product"), pytest.approx(1 - one @ other, abs=1e-4))
    default, configured = engine_of(collection()), engine_of(collection(configuration={"hnsw": {"space": "ip"}}))
    assert default is not None
    assert configured is not None
    assert (default.metric, configured.metric) == (Metric("squared L2"), Metric("1 - inner product"))


def test_chroma_gives_vectors_by_id_and_all_documents_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(SimpleNamespace(whatever=3, kept=collection("cosine")))
    assert engine is not None
    found = engine.vectors(["c", "nowhere", "a", "c"])
    assert set(found) == {"a", "c"}
    np.testing.assert_allclose(found["c"], VECTORS[2], atol=1e-6)
    monkeypatch.setattr("rag_explain.retrieval.engines.chroma._PAGE", 2)
    assert sorted(engine.documents() or []) == [Kept(name, f"text {name}", {}) for name in IDS]


@pytest.mark.parametrize(
    ("kind", "metric", "is_exact"),
    [("Flat", 0, True), ("HNSW8", 1, True), ("SQ8", 1, False), ("PQ4x4", 0, False), ("IDMap,Flat", 0, True)],
)
def test_a_faiss_index_gives_its_metric_and_the_vectors_that_it_keeps(kind: str, metric: int, is_exact: bool) -> None:
    faiss = pytest.importorskip("faiss")
    index = faiss.index_factory(8, kind, metric)
    rows = np.random.default_rng(1).normal(size=(300, 8)).astype(np.float32)
    index.train(rows)
    index.add_with_ids(rows, np.arange(300)) if "IDMap" in kind else index.add(rows)
    place = Place(rows=lambda ids: {name: int(name) for name in ids if name.isdecimal()})
    engine = engine_of(SimpleNamespace(index=index), place)
    assert engine is not None
    assert engine.metric == (Metric("squared L2") if metric else Metric("inner product"))
    assert (engine.tolerance == TOLERANCE) == is_exact
    assert engine.documents() is None
    found = engine.vectors(["7", "nowhere"])
    if "IDMap" in kind:
        assert found == {}
    else:
        np.testing.assert_array_equal(found["7"], engine.coded(rows)[7])
    assert np.array_equal(engine.coded(rows), rows) == is_exact
    plain = engine_of(index)
    assert plain is not None
    assert plain.vectors(["7"]) == {}
    other = engine_of(faiss.IndexFlat(8, faiss.METRIC_L1))
    assert other is not None
    assert other.metric == UNKNOWN


@pytest.mark.parametrize("metric", [0, 1])
@pytest.mark.parametrize(
    ("kind", "most"),
    [
        *[("Flat", 1e-6), ("SQfp16", 1e-3), ("IDMap2,SQfp16", 1e-3), ("SQ8", 2e-2), ("HNSW8_SQ8", 2e-2), ("PQ8x4", 1)],
        *[("SQ4,RFlat", 1e-6), ("SQ4,Refine(SQfp16)", 1e-3), ("RR8,Flat", 1e-5), ("RR8,SQfp16", 1e-3)],
        *[("IVF2,Flat", 1e-6), ("IVF2,SQ8", 2e-2), ("L2norm,Flat", 1e-6), ("Pad16,Flat", 1e-6), ("NSG8,Flat", 1e-6)],
    ],
)
def test_what_an_index_loses_of_a_vector_bounds_what_its_scores_are_off_by(kind: str, most: float, metric: int) -> None:
    faiss = pytest.importorskip("faiss")
    rows = np.random.default_rng(1).normal(size=(700, 8)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    index = faiss.index_factory(8, kind, metric)
    index.train(rows)
    index.add_with_ids(rows, np.arange(len(rows))) if "IDMap" in kind else index.add(rows)
    engine = engine_of(index)
    assert engine is not None
    loss = np.linalg.norm(engine.coded(rows) - rows, axis=1)
    scores, found = index.search(rows[:5] + 0, 20)
    claimed = np.vectorize(engine.metric.similarity)(scores)
    own = np.einsum("qe,qde->qd", rows[:5], rows[found])
    is_found = found >= 0
    assert (np.abs(claimed - own) <= loss[found] + 1e-5)[is_found].all()
    assert loss.max() <= most


def test_an_index_that_does_not_say_what_it_loses_has_a_tolerance_of_its_own() -> None:
    faiss = pytest.importorskip("faiss")
    shards = faiss.IndexShards(8)
    engine = engine_of(shards)
    assert engine is not None
    assert engine.coded(VECTORS) is None
    assert engine.tolerance > TOLERANCE


def test_other_handles_are_no_engine_and_no_property_is_called_to_find_one() -> None:
    class Lazy:
        @property
        def client(self) -> Any:
            raise ConnectionError("nobody asked for a connection")

    assert [engine_of(one) for one in (None, 3, "text", object(), Lazy(), {"index": 1})] == [None] * 6


def test_looking_for_an_engine_imports_none() -> None:
    code = (
        "import sys; from rag_explain.retrieval import engine_of; engine_of(object()); "
        "sys.exit(bool({'chromadb', 'faiss', 'lancedb', 'pymilvus'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
