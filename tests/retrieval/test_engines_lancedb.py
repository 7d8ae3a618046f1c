"""LanceDB's scores by arithmetic, and what a table tells of its vectors and documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rag_explain.results.metric import Metric
from rag_explain.retrieval import Engine, Kept, Place, engine_of
from rag_explain.retrieval.engines import TOLERANCE, LanceDBEngine

ROWS = 300  # an index that codes vectors is trained on 256 at least
VECTORS = np.random.default_rng(0).normal(size=(ROWS, 8)).astype(np.float32)
IDS = ["it's", 'so "called"', "back\\slash", "Zoë 猫", "a, b'); --", *map(str, range(5, ROWS))]


@pytest.fixture
def table(tmp_path: Path) -> Any:
    connection = pytest.importorskip("lancedb").connect(tmp_path)
    rows = [
        {"id": name, "vector": vector, "text": f"text {name}", "chapter": at}
        for at, (name, vector) in enumerate(zip(IDS, VECTORS, strict=True))
    ]
    return connection.create_table("documents", rows)


def index(table: Any, kind: str, distance: str, **settings: Any) -> None:
    made = getattr(pytest.importorskip("lancedb.index"), kind)
    table.create_index("vector", config=made(distance_type=distance, num_partitions=1, **settings))


def known(handle: Any, place: Place | None = None) -> Engine:
    engine = engine_of(handle, place)
    assert isinstance(engine, LanceDBEngine)
    return engine


@pytest.mark.parametrize(
    ("distance", "metric"),
    [("l2", "squared L2"), ("cosine", "cosine distance"), ("dot", "1 - inner product")],
)
def test_the_metrics_of_lancedb_are_those_of_its_distances(table: Any, distance: str, metric: str) -> None:
    index(table, "IvfFlat", distance)
    one, other = VECTORS[0].astype(np.float64), VECTORS[1].astype(np.float64)
    cosine = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
    expected = {"l2": ((one - other) ** 2).sum(), "cosine": 1 - cosine, "dot": 1 - one @ other}[distance]
    found = {row["id"]: row["_distance"] for row in table.search(VECTORS[0]).limit(ROWS).to_list()}
    assert found[IDS[1]] == pytest.approx(float(expected), abs=1e-4)
    assert known(table).metric == Metric(metric)


def test_an_index_that_is_made_later_is_seen(table: Any) -> None:
    engine = known(table)
    assert (engine.metric, engine.tolerance) == (Metric("squared L2"), TOLERANCE)
    table.create_index("id", config=pytest.importorskip("lancedb.index").BTree())  # says nothing of vectors
    index(table, "IvfPq", "cosine", num_sub_vectors=4)
    assert engine.metric == Metric("twice the cosine distance")
    assert engine.tolerance > TOLERANCE
    table.drop_index("vector_idx")
    assert (engine.metric, engine.tolerance) == (Metric("squared L2"), TOLERANCE)


@pytest.mark.parametrize(
    ("kind", "is_exact"),
    [("IvfFlat", True), ("HnswFlat", True), ("IvfSq", False), ("HnswSq", False), ("HnswPq", False), ("IvfRq", False)],
)
def test_scores_of_coded_vectors_are_estimates_and_the_vectors_are_kept(table: Any, kind: str, is_exact: bool) -> None:
    index(table, kind, "dot")
    engine = known(table)
    found = table.search(VECTORS[0]).limit(ROWS).to_list()
    off = max(abs(1 - row["_distance"] - float(np.dot(row["vector"], VECTORS[0]))) for row in found)
    assert (off < 1e-4) == is_exact == (engine.tolerance == TOLERANCE)
    np.testing.assert_array_equal(engine.vectors(["7"])["7"], VECTORS[7])
    refined = table.search(VECTORS[0]).limit(10).refine_factor(5).to_list()
    assert max(abs(1 - row["_distance"] - float(np.dot(row["vector"], VECTORS[0]))) for row in refined) < 1e-4


def test_an_index_by_cosine_that_codes_vectors_gives_twice_the_distance_until_a_row_is_new(table: Any) -> None:
    index(table, "IvfSq", "cosine")
    engine, refined = known(table), known(table, Place(is_refined=True))

    def differs(metric: Metric, search: Any) -> float:
        """How far the similarity that scores tell is off at most."""
        rows = [(row["_distance"], row["vector"]) for row in search.limit(50).to_list()]
        own = [float(np.dot(one, VECTORS[0]) / np.linalg.norm(one) / np.linalg.norm(VECTORS[0])) for _, one in rows]
        told = [metric.similarity(score) for score, _ in rows]
        return max(abs((claimed or 0.0) - cosine) for claimed, cosine in zip(told, own, strict=True))

    assert engine.metric == Metric("twice the cosine distance")
    assert 1e-4 < differs(engine.metric, table.search(VECTORS[0])) < engine.tolerance
    assert refined.metric == Metric("cosine distance")
    assert differs(refined.metric, table.search(VECTORS[0]).refine_factor(2)) < 1e-4
    table.add([{"id": "new", "vector": VECTORS[0], "text": "new", "chapter": 0}])
    assert engine.metric == Metric("cosine distance")
    assert differs(engine.metric, table.search(VECTORS[0])) < 1e-4


def test_vectors_are_found_by_any_id_and_only_where_it_is_one_row(table: Any) -> None:
    engine = known(table)
    found = engine.vectors([*IDS[:5], "nowhere", IDS[0]])
    assert list(found) == IDS[:5]
    for at, name in enumerate(IDS[:5]):
        np.testing.assert_array_equal(found[name], VECTORS[at])
    table.add([{"id": "7", "vector": VECTORS[0], "text": "another text of that id", "chapter": 0}])
    assert set(engine.vectors(["7", "8"])) == {"8"}


def test_documents_are_listed_in_pages_without_their_vectors(table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rag_explain.retrieval.engines.lancedb._PAGE", 7)
    listed = list(known(table).documents() or [])
    fields = {"id": IDS[0], "text": f"text {IDS[0]}", "chapter": 0}
    assert listed[0] == Kept(IDS[0], f"text {IDS[0]}", fields)
    assert [one.id for one in listed] == IDS


def test_columns_may_have_other_names_and_a_table_several_vectors(tmp_path: Path) -> None:
    connection = pytest.importorskip("lancedb").connect(tmp_path)
    row = {"key": 7, "title": VECTORS[0], "body": VECTORS[1], "content": "the cat"}
    table = connection.create_table("documents", [row])
    engine = known(table, Place(key="key", vector="body", text="content"))
    np.testing.assert_array_equal(engine.vectors(["7"])["7"], VECTORS[1])
    assert [(one.id, one.text) for one in engine.documents() or []] == [("7", "the cat")]
    with pytest.raises(ValueError, match="unpack"):  # which of the two is searched is not known
        known(table, Place(key="key")).vectors(["7"])


def test_an_empty_table_has_a_metric_and_no_documents(table: Any) -> None:
    table.delete("true")
    engine = known(table)
    assert engine.metric == Metric("squared L2")
    assert engine.vectors(IDS[:2]) == {}
    assert list(engine.documents() or []) == []


def test_a_table_that_is_gone_fails_no_search(table: Any, tmp_path: Path) -> None:
    engine = known(table)
    pytest.importorskip("lancedb").connect(tmp_path).drop_table("documents")
    assert engine.metric in (Metric("squared L2"), Metric("unknown"))
