"""Milvus's scores by arithmetic, and what a collection tells of its vectors and documents: with Milvus Lite."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tenacity

from rag_explain.results.metric import UNKNOWN, Metric
from rag_explain.retrieval import Engine, Kept, Place, engine_of
from rag_explain.retrieval.engines import TOLERANCE, MilvusEngine
from tests.support.stacks.milvus_lite import milvus_file

ROWS = 300
VECTORS = np.random.default_rng(0).normal(size=(ROWS, 8)).astype(np.float32)
IDS = ["it's", 'so "called"', "back\\slash", "Zoë 猫\t", "a, b'] or true", *map(str, range(5, ROWS))]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    pymilvus = pytest.importorskip("pymilvus")
    pytest.importorskip("milvus_lite")
    with milvus_file(tmp_path_factory.mktemp("milvus")) as uri:
        client = pymilvus.MilvusClient(uri)
        yield client
        client.close()
    assert [one.name for one in threading.enumerate() if "milvus" in one.name] == []


def filled(
    client: Any, metric: str = "COSINE", kind: str = "FLAT", key: str = "VARCHAR", rows: int = ROWS, **options: Any
) -> str:
    """The name of a new collection; one by "sparse" has an index of words beside its vectors."""
    types, name = pytest.importorskip("pymilvus").DataType, f"c{len(client.list_collections())}"
    schema = client.create_schema(auto_id=False, enable_dynamic_field=True)
    schema.add_field("key", types[key], is_primary=True, **({"max_length": 100} if key == "VARCHAR" else {}))
    schema.add_field("dense", types.FLOAT_VECTOR, dim=8)
    if metric == "sparse":
        schema.add_field("words", types.SPARSE_FLOAT_VECTOR)
    schema.add_field("content", types.VARCHAR, max_length=1000)
    indexes = client.prepare_index_params()
    if metric == "sparse":
        indexes.add_index("words", index_type="SPARSE_INVERTED_INDEX", metric_type="IP")
    else:
        indexes.add_index("dense", index_type=kind, metric_type=metric, params=options)
    client.create_collection(name, schema=schema, index_params=indexes)
    ids = IDS if key == "VARCHAR" else [at - 3 for at in range(ROWS)]
    made = [{"key": ids[at], "dense": VECTORS[at], "content": f"text {ids[at]}", "chapter": at} for at in range(rows)]
    if metric == "sparse":
        made = [{**one, "words": {at: 1.0}} for at, one in enumerate(made)]
    if made:
        client.insert(name, made)
    return name


def known(client: Any, collection: str, **place: Any) -> Engine:
    engine = engine_of(client, Place(collection=collection, key="key", **place))
    assert isinstance(engine, MilvusEngine)
    return engine


def said_by_pymilvus(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [one for one in caplog.records if one.name.startswith("pymilvus") and one.levelno >= logging.WARNING]
    return [one.getMessage() for one in found]


def scores(client: Any, collection: str, **options: Any) -> dict[Any, float]:
    (found,) = client.search(collection, [VECTORS[0]], anns_field="dense", limit=ROWS, **options)
    return {one["key"]: one["distance"] for one in found}


@pytest.mark.parametrize(("name", "metric"), [("COSINE", "cosine"), ("IP", "inner product"), ("L2", "squared L2")])
def test_the_metrics_of_milvus_are_those_of_its_scores(client: Any, name: str, metric: str) -> None:
    one, other = VECTORS[0].astype(np.float64), VECTORS[1].astype(np.float64)
    cosine = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
    expected = {"COSINE": cosine, "IP": one @ other, "L2": ((one - other) ** 2).sum()}[name]
    collection = filled(client, name)
    assert scores(client, collection)[IDS[1]] == pytest.approx(float(expected), abs=1e-4)
    assert known(client, collection).metric == Metric(metric)


def loaded_again(client: Any, collection: str) -> None:
    """With its index: Milvus Lite writes that in the background, and refuses one that is not written to its end."""
    unwritten = pytest.importorskip("pymilvus").MilvusException
    client.release_collection(collection)
    for attempt in tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(unwritten),
        stop=tenacity.stop_after_attempt(100),
        wait=tenacity.wait_fixed(0.1),
        reraise=True,
    ):
        with attempt:
            client.load_collection(collection)


@pytest.mark.parametrize(
    ("kind", "options", "is_exact"),
    [
        ("AUTOINDEX", {}, True),
        ("HNSW", {"M": 8, "efConstruction": 50}, True),
        ("IVF_FLAT", {"nlist": 1}, True),
        ("IVF_SQ8", {"nlist": 1}, False),
        ("HNSW_SQ", {"M": 8, "efConstruction": 50, "sq_type": "SQ8"}, False),
    ],
)
def test_scores_of_coded_vectors_are_estimates_and_the_vectors_are_kept(
    client: Any, kind: str, options: dict[str, Any], is_exact: bool
) -> None:
    collection = filled(client, "IP", kind, **options)
    client.flush(collection)  # until then rows are compared as they are
    loaded_again(client, collection)
    own = dict(zip(IDS, VECTORS @ VECTORS[0], strict=True))
    off = max(abs(score - own[name]) for name, score in scores(client, collection).items())
    engine = known(client, collection)
    assert (off < 1e-4) == is_exact == (engine.tolerance == TOLERANCE)
    np.testing.assert_array_equal(engine.vectors(["7"])["7"], VECTORS[7])


def test_vectors_are_found_by_any_id(client: Any, caplog: pytest.LogCaptureFixture) -> None:
    engine = known(client, filled(client))
    found = engine.vectors([*IDS[:6], "nowhere", IDS[0]])
    assert set(found) == set(IDS[:6])
    for at, name in enumerate(IDS[:6]):
        np.testing.assert_array_equal(found[name], VECTORS[at])
    assert engine.vectors([]) == {}
    assert said_by_pymilvus(caplog) == []


def test_ids_may_be_numbers(client: Any) -> None:
    engine = known(client, filled(client, key="INT64"))
    found = engine.vectors(["-3", "5", "1000", "doc-5", "5.0"])
    assert set(found) == {"-3", "5"}
    np.testing.assert_array_equal(found["5"], VECTORS[8])
    assert [one.id for one in engine.documents() or []] == [str(at - 3) for at in range(ROWS)]


def test_documents_are_listed_in_pages_without_their_vectors(
    client: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = known(client, filled(client, rows=20), text="content")
    for page in (1, 7, 500):
        monkeypatch.setattr("rag_explain.retrieval.engines.milvus._PAGE", page)
        listed = list(engine.documents() or [])
        assert {one.id for one in listed} == set(IDS[:20])
        assert len(listed) == 20
        fields = {"key": "7", "content": "text 7", "chapter": 7}
        assert Kept("7", "text 7", fields) in listed
    assert said_by_pymilvus(caplog) == []


def test_sparse_vectors_have_no_metric_and_are_not_compared(client: Any) -> None:
    engine = known(client, filled(client, "sparse"), vector="words")
    assert engine.metric == UNKNOWN
    with pytest.raises(ValueError, match="unpack"):
        engine.vectors(["7"])


def test_a_collection_that_comes_later_is_seen_and_its_absence_is_not_logged(
    client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    later = f"c{len(client.list_collections())}"
    engine = known(client, later)
    assert engine.metric == UNKNOWN
    assert said_by_pymilvus(caplog) == []
    assert filled(client, "IP", rows=0) == later
    assert engine.metric == Metric("inner product")
    assert engine.vectors(IDS) == {}
    assert list(engine.documents() or []) == []


def test_a_client_without_the_name_of_a_collection_is_no_engine(client: Any) -> None:
    assert engine_of(client) is None


def test_a_server_that_is_gone_fails_no_search(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pymilvus = pytest.importorskip("pymilvus")
    pytest.importorskip("milvus_lite")
    with milvus_file(tmp_path) as uri:
        client = pymilvus.MilvusClient(uri)
        engine = known(client, filled(client))
        assert engine.metric == Metric("cosine")
    assert engine.metric == Metric("cosine")
    assert known(client, "c0").metric == UNKNOWN
    with pytest.raises(pymilvus.MilvusException):
        engine.vectors(["7"])
    assert any("RPC error" in one for one in said_by_pymilvus(caplog))  # so it is heard in the tests above too
    client.close()
