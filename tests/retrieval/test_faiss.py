"""Every kind of FAISS index, and what it takes to trust its scores."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from functools import cache
from typing import Any

import faiss
import numpy as np
import pytest
import torch
from sentence_transformers.sentence_transformer.modules import Normalize

from rag_explain.errors import InvalidInput
from rag_explain.explainer import Explainer
from rag_explain.faiss import FaissRetriever
from rag_explain.results.hits import Hits
from rag_explain.retrieval import Embedder
from tests.support.models import CORPUS, tiny

QUERY = "why did the dog bark at the moon?"
TEXTS = [f"{text} ({number})" for number in range(20) for text in CORPUS]


@cache
def explainer(*, normalize: bool = True, similarity: str = "cosine") -> Explainer:
    after = (lambda: [Normalize()]) if normalize else None
    return Explainer(tiny(after=after, dtype=torch.float32, similarity_fn_name=similarity))


@cache
def vectors() -> Any:
    return explainer().scorer.embed(TEXTS, "document")


def width() -> int:
    return int(vectors().shape[1])


def ivf(metric: int) -> Any:
    index = faiss.IndexIVFFlat(faiss.IndexFlat(width(), metric), width(), 2, metric)
    index.nprobe = 2
    return index


INDEXES: dict[str, Callable[[], Any]] = {
    "flat-ip": lambda: faiss.IndexFlatIP(width()),
    "flat-l2": lambda: faiss.IndexFlatL2(width()),
    "hnsw-l2": lambda: faiss.IndexHNSWFlat(width(), 8),
    "hnsw-ip": lambda: faiss.IndexHNSWFlat(width(), 8, faiss.METRIC_INNER_PRODUCT),
    "ivf-l2": lambda: ivf(faiss.METRIC_L2),
    "ivf-ip": lambda: ivf(faiss.METRIC_INNER_PRODUCT),
    "idmap-ip": lambda: faiss.IndexIDMap(faiss.IndexFlatIP(width())),
    "idmap2-l2": lambda: faiss.IndexIDMap2(faiss.IndexFlatL2(width())),
    "pq": lambda: faiss.IndexPQ(width(), 4, 4),
    "sq8": lambda: faiss.IndexScalarQuantizer(width(), faiss.ScalarQuantizer.QT_8bit),
    "factory": lambda: faiss.index_factory(width(), "IDMap,Flat", faiss.METRIC_INNER_PRODUCT),
}


def build(name: str) -> tuple[Any, list[int]]:
    """The index filled with TEXTS, and the ids of its rows."""
    index = INDEXES[name]()
    ids = list(range(len(TEXTS)))
    if not index.is_trained:
        index.train(vectors())
    if "idmap" in name or name == "factory":
        ids = [7 * i + 1000 for i in ids]
        index.add_with_ids(vectors(), np.array(ids))
    else:
        index.add(vectors())
    return index, ids


@pytest.mark.filterwarnings("ignore:WARNING clustering")
@pytest.mark.parametrize("explain", ["lazy", "eager"])
@pytest.mark.parametrize("name", INDEXES)
def test_the_same_rows_in_the_same_order_with_the_same_scores(name: str, explain: Any) -> None:
    index, ids = build(name)
    documents = dict(zip(ids, TEXTS, strict=True))
    before = index.ntotal
    hits = FaissRetriever(index, documents, explainer()).search(QUERY, 5, explain)
    scores, rows = index.search(explainer().scorer.embed([QUERY], "query"), 5)
    assert [hit.id for hit in hits] == [str(row) for row in rows[0]]
    assert [hit.score for hit in hits] == scores[0].tolist()
    assert [hit.text for hit in hits] == [documents[row] for row in rows[0].tolist()]
    assert {hit.metric for hit in hits} == {
        "cosine" if index.metric_type == faiss.METRIC_INNER_PRODUCT else "squared L2"
    }
    exact = name not in ("pq", "sq8")
    for hit in hits:
        assert isinstance(hit.score, float)
        assert hit.explanation is not None
        assert hit.explanation.surrogate is None
        assert hit.similarity == pytest.approx(hit.explanation.score)
        assert hit.gap is not None
        assert abs(hit.gap) < (1e-5 if exact else 0.2)
        json.dumps(hit.to_dict())
    assert index.ntotal == before


def test_embedding_is_what_the_model_says() -> None:
    model = tiny(
        after=lambda: [Normalize()], dtype=torch.float32, prompts={"query": "query: ", "document": "passage: "}
    )
    encoder = Explainer(model).scorer
    texts = [*CORPUS, "a", "the cat " * 100]
    np.testing.assert_allclose(encoder.embed(texts, "query"), model.encode_query(texts), atol=1e-6)
    np.testing.assert_allclose(encoder.embed(texts, "document"), model.encode_document(texts), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("normalize", [True, False])
def test_a_query_that_is_explained_is_searched_with_the_same_vector_to_the_last_bit(
    dtype: torch.dtype, normalize: bool
) -> None:
    model = tiny(after=(lambda: [Normalize()]) if normalize else None, dtype=dtype)
    own = Explainer(model)
    for query in (QUERY, "a", "moon"):
        np.testing.assert_array_equal(own.query_vector(query), own.scorer.embed([query], "query")[0])
        expected = model.encode_query([query], convert_to_tensor=True)[0].float().numpy()
        np.testing.assert_array_equal(own.query_vector(query), expected)


def test_one_forward_pass_serves_search_and_explanation(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Explainer(tiny(after=lambda: [Normalize()], dtype=torch.float32))
    retriever = FaissRetriever.from_texts(TEXTS, own)
    retriever.precompute(progress=False)
    runs: list[int] = []
    run = own.scorer.encoder.run
    monkeypatch.setattr(own.scorer.encoder, "run", lambda *args: runs.append(1) or run(*args))
    assert all(hit.explanation for hit in retriever.search(QUERY, 3, explain="eager"))
    assert len(runs) == 1


def test_a_query_whose_factors_fail_is_searched_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Explainer(tiny(after=lambda: [Normalize()], dtype=torch.float32))
    retriever = FaissRetriever.from_texts(TEXTS, own)
    before = retriever.search(QUERY, 3, explain="off")
    monkeypatch.setattr(own.method, "factor", lambda *arguments: 1 / 0)
    hits = retriever.search(QUERY, 3, explain="eager")
    assert [(hit.id, hit.score) for hit in hits] == [(hit.id, hit.score) for hit in before]
    assert [hit.handle.status for hit in hits] == ["failed"] * 3


def test_fewer_than_k_and_an_empty_index() -> None:
    index = faiss.IndexFlatIP(width())
    retriever = FaissRetriever(index, TEXTS, explainer())
    assert retriever.search(QUERY, 5) == Hits()
    index.add(vectors()[:3])
    hits = retriever.search(QUERY, 10)
    assert len(hits) == 3
    assert all(hit.score is not None and hit.score > -1.1 for hit in hits)


def test_only_minus_one_means_nothing_found() -> None:
    index = faiss.IndexIDMap(faiss.IndexFlatIP(width()))
    ids = [-7, -2, 0, 5]
    index.add_with_ids(vectors()[:4], np.array(ids))
    named = dict(zip(ids, TEXTS, strict=False))
    hits = FaissRetriever(index, named, explainer()).search(QUERY, 10)
    assert sorted(hit.id for hit in hits) == sorted(map(str, ids))
    assert {hit.id: hit.text for hit in hits} == {str(row): text for row, text in named.items()}
    listed = FaissRetriever(index, TEXTS, explainer()).search(QUERY, 10)  # a list has no text of a negative id
    assert {hit.id: hit.text for hit in listed} == {"-7": None, "-2": None, "0": TEXTS[0], "5": TEXTS[5]}


def test_k_may_be_a_number_of_numpy() -> None:
    retriever = FaissRetriever.from_texts(TEXTS, explainer())
    assert [hit.id for hit in retriever.search(QUERY, k=np.int64(2))] == [hit.id for hit in retriever.search(QUERY, 2)]
    with pytest.raises(InvalidInput, match=r"k must be a whole number, not 2\.5"):
        retriever.search(QUERY, 2.5)  # type: ignore[arg-type]


def test_documents_as_sequence_mapping_or_function_with_ids_and_metadata() -> None:
    index, _ = build("flat-ip")
    names = [f"doc-{i}" for i in range(len(TEXTS))]
    expected = None
    for documents in (TEXTS, dict(enumerate(TEXTS)), lambda row: TEXTS[row]):
        retriever = FaissRetriever(index, documents, explainer(), ids=names, metadata=lambda row: {"row": row})
        found = [(hit.id, hit.text, hit.metadata, hit.score) for hit in retriever.search(QUERY, 4)]
        expected = expected or found
        assert found == expected
        assert found[0][0] == f"doc-{found[0][2]['row']}"


def test_a_document_that_is_not_there_is_a_hit_without_text() -> None:
    def broken(row: int) -> str:
        raise ConnectionError("no database")

    index, _ = build("flat-ip")
    for documents in ({}, [], broken):
        hits = FaissRetriever(index, documents, explainer()).search(QUERY, 3, explain="eager")
        assert [(hit.text, hit.status, hit.reason) for hit in hits] == [
            (None, "skipped", "the document has no text")
        ] * 3


def test_explain_modes() -> None:
    retriever = FaissRetriever.from_texts(TEXTS, explainer())
    assert [hit.status for hit in retriever.search(QUERY, 3)] == ["pending"] * 3
    assert [hit.status for hit in retriever.search(QUERY, 3, top=2)] == ["pending", "pending", "skipped"]
    assert [hit.status for hit in retriever.search(QUERY, 3, explain="off")] == ["skipped"] * 3
    assert [hit.status for hit in retriever.search(QUERY, 3, explain="eager")] == ["ready"] * 3
    assert [hit.status for hit in retriever.search(QUERY, 3, explain="eager", top=1)] == ["ready"] + ["skipped"] * 2
    first = FaissRetriever.from_texts(TEXTS, explainer(), top=1)
    assert [hit.status for hit in first.search_many([QUERY], 2)[0]] == ["pending", "skipped"]
    with pytest.raises(InvalidInput, match="explain must be 'lazy', 'eager' or 'off', not True"):
        retriever.search(QUERY, 3, explain=True)  # type: ignore[arg-type]


def test_search_many_is_search_for_each() -> None:
    retriever = FaissRetriever.from_texts(TEXTS, explainer())
    queries = [QUERY, "paris", "the sun"]
    together = retriever.search_many(queries, 4)
    for query, hits in zip(queries, together, strict=True):
        alone = retriever.search(query, 4)
        assert [hit.id for hit in hits] == [hit.id for hit in alone]
        np.testing.assert_allclose([hit.score for hit in hits], [hit.score for hit in alone], atol=1e-5)
    assert retriever.search_many([], 3) == []


def test_bad_arguments_are_refused_with_advice() -> None:
    retriever = FaissRetriever.from_texts(TEXTS, explainer())
    with pytest.raises(InvalidInput, match="at least 1"):
        retriever.search(QUERY, 0)
    with pytest.raises(InvalidInput, match="use search"):
        retriever.search_many(QUERY)
    with pytest.raises(InvalidInput, match="at least one text"):
        FaissRetriever.from_texts([], explainer())
    with pytest.raises(InvalidInput, match="ids must have one entry per text: 1 for 100"):
        FaissRetriever.from_texts(TEXTS, explainer(), ids=["a"])
    with pytest.raises(InvalidInput, match="FAISS index"):
        FaissRetriever(faiss.IndexBinaryFlat(8), TEXTS, explainer())
    with pytest.raises(InvalidInput, match=r"8 dimensions and .* gives 16"):
        FaissRetriever(faiss.IndexFlatIP(8), TEXTS, explainer()).search(QUERY)


@pytest.mark.parametrize("metric", [faiss.METRIC_INNER_PRODUCT, faiss.METRIC_L2])
def test_unnormalised_vectors_are_surrogates_unless_the_model_compares_by_dot(metric: int) -> None:
    for similarity in ("cosine", "dot"):
        mine = explainer(normalize=False, similarity=similarity)
        index = faiss.IndexFlat(width(), metric)
        index.add(mine.scorer.embed(TEXTS, "document"))
        hit = FaissRetriever(index, TEXTS, mine).search(QUERY, 1)[0]
        assert hit.explanation is not None
        if metric == faiss.METRIC_INNER_PRODUCT and similarity == "dot":
            assert hit.explanation.surrogate is None
            assert hit.gap == pytest.approx(0.0, abs=1e-3)
        else:
            assert "not normalised" in (hit.explanation.surrogate or "")
            assert hit.gap is None  # such a score tells no similarity


def test_vectors_that_the_user_normalised() -> None:
    mine = explainer(normalize=False)
    index = faiss.IndexFlatIP(width())
    raw = mine.scorer.embed(TEXTS, "document")
    index.add(raw / np.linalg.norm(raw, axis=1, keepdims=True))
    hit = FaissRetriever(index, TEXTS, mine, normalize=True).search(QUERY, 1)[0]
    assert hit.explanation is not None
    assert hit.explanation.surrogate is None
    assert (hit.metric, hit.gap) == ("cosine", pytest.approx(0.0, abs=1e-5))


def test_an_index_of_another_model_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    index = faiss.IndexFlatIP(width())
    other = np.random.default_rng(0).normal(size=vectors().shape).astype(np.float32)
    index.add(other / np.linalg.norm(other, axis=1, keepdims=True))
    hit = FaissRetriever(index, TEXTS, explainer()).search(QUERY, 1)[0]
    assert hit.explanation is not None
    assert "another model" in (hit.explanation.surrogate or "")
    assert "another model" in caplog.text


@pytest.mark.parametrize("name", ["flat-ip", "flat-l2", "hnsw-l2", "ivf-ip", "idmap2-l2"])
def test_every_document_whose_vector_is_of_another_text_is_noticed_though_the_scores_are_alike(name: str) -> None:
    index, ids = build(name)
    if name == "ivf-ip":
        index.make_direct_map()  # as an index that keeps its vectors within reach
    index.reset()
    other = explainer().scorer.embed([f"the old bridge: {text}" for text in TEXTS], "document")
    index.add_with_ids(other, np.array(ids)) if "idmap" in name else index.add(other)
    hits = FaissRetriever(index, dict(zip(ids, TEXTS, strict=True)), explainer()).search(QUERY, 20, explain="eager")
    assert len(hits) == 20
    for hit in hits:
        assert hit.explanation is not None
        assert "the index's vector of this document is not the one" in (hit.explanation.surrogate or "")


def test_rows_of_one_id_are_told_apart() -> None:
    index, _ = build("flat-ip")
    retriever = FaissRetriever(index, TEXTS, explainer(), ids=["one name"] * len(TEXTS))
    rows, hits = retriever.search_rows(QUERY, 100)
    assert rows == index.search(explainer().scorer.embed([QUERY], "query"), 100)[1][0].tolist()
    assert [hit.text for hit in hits] == [TEXTS[row] for row in rows]
    assert [hit.explanation.surrogate for hit in hits.load() if hit.explanation] == [None] * 100


def test_an_embedder_embeds_the_queries_and_its_model_is_explained_as_it_uses_it() -> None:
    model = tiny(after=lambda: [Normalize()], dtype=torch.float32, prompts={"question": "paris? "})
    index = faiss.IndexFlatIP(width())
    index.add(model.encode(TEXTS))
    calls: dict[Any, Any] = {
        "query": lambda holder, text: holder.encode(text, prompt_name="question"),
        "document": lambda holder, text: holder.encode(text),
    }
    retriever = FaissRetriever(index, TEXTS, Embedder(model, calls))
    scores, rows = index.search(model.encode([QUERY], prompt_name="question"), 5)
    hits = retriever.search(QUERY, 5)
    assert [int(hit.id) for hit in hits] == rows[0].tolist()
    assert [hit.score for hit in hits] == pytest.approx(scores[0].tolist(), abs=1e-6)
    for hit in hits:
        assert hit.explanation is not None
        assert (hit.explanation.surrogate, hit.gap) == (None, pytest.approx(0.0, abs=1e-5))
    beside = FaissRetriever(index, TEXTS, explainer(), embedder=Embedder(model, calls))
    assert [hit.score for hit in beside.search(QUERY, 5)] == [hit.score for hit in hits]
    assert repr(retriever) == "FaissRetriever(IndexFlatIP, 100 vectors, 'SentenceTransformer')"


def test_precomputed_documents_are_explained_by_one_product_and_can_be_forgotten() -> None:
    with Explainer(tiny(after=lambda: [Normalize()], dtype=torch.float32)) as mine:
        names = [f"doc-{i}" for i in range(len(TEXTS))]
        retriever = FaissRetriever.from_texts(TEXTS, mine, ids=names)
        assert retriever.precompute(progress=False).built == len(TEXTS)
        hits = retriever.search(QUERY, 3, explain="eager")
        assert [hit.explanation.provenance["path"] for hit in hits if hit.explanation] == ["memory"] * 3
        mine.store.forget([hits[0].id])
        again = retriever.search(QUERY, 3, explain="eager")
        assert again[0].explanation is not None
        assert again[0].explanation.provenance["path"] != "memory"


def test_numbers_of_numpy_and_numbers_that_are_too_large() -> None:
    retriever = FaissRetriever.from_texts(CORPUS, explainer())
    hits = retriever.search(QUERY, np.int64(3), top=np.int32(1))  # type: ignore[arg-type]  # as numpy gives them
    assert [hit.status for hit in hits] == ["pending", "skipped", "skipped"]
    assert [hit.id for hit in retriever.search(QUERY, 10**30)] == [hit.id for hit in retriever.search(QUERY, 5)]
    for wrong in (2.0, "2", True, None, np.array([1, 2])):
        with pytest.raises(InvalidInput, match="k must be a whole number"):
            retriever.search(QUERY, wrong)  # type: ignore[arg-type]  # the mistake under test


def test_ids_that_are_no_strings_are_refused_before_anything_is_embedded() -> None:
    index = FaissRetriever.from_texts(CORPUS[:2], explainer()).index
    for ids in ([1, 2], ["a", 2], {0: 1}, np.array([1, 2])):
        with pytest.raises(InvalidInput, match=r"id must be a string, not .*: give str\(id\)"):
            FaissRetriever(index, CORPUS[:2], explainer(), ids=ids)  # type: ignore[arg-type]  # the mistake under test
    with pytest.raises(InvalidInput, match="id must be a string"):
        FaissRetriever.from_texts([None, None], explainer(), ids=[1, 2])  # type: ignore[list-item]  # not even read


def test_copies_and_pickles_of_a_retriever_and_its_hits() -> None:
    retriever = FaissRetriever.from_texts(CORPUS, explainer())
    assert copy.deepcopy(retriever) is copy.copy(retriever) is retriever
    with pytest.raises(InvalidInput, match=r"cannot be pickled: use save\(folder\)"):
        pickle.dumps(retriever)
    hits = retriever.search(QUERY, 2)
    assert copy.deepcopy(hits)[0].explanation is hits[0].explanation is not None
    again = pickle.loads(pickle.dumps(hits))
    assert type(again) is Hits
    assert [hit.status for hit in again] == ["ready", "skipped"]
    assert again[0].explanation.to_dict() == hits[0].explanation.to_dict()
    assert again[1].reason == "it was not computed before the hit was pickled"


@pytest.mark.parametrize("kind", ["SQfp16", "SQ8", "SQ4,RFlat", "RR16,Flat", "IDMap,SQfp16", "HNSW8_SQ8", "Flat"])
@pytest.mark.parametrize("header", ["", "the old bridge: paris, "])
def test_an_index_of_other_texts_is_noticed_whatever_it_keeps_of_their_vectors(kind: str, header: str) -> None:
    own = explainer().scorer.embed([header + text for text in TEXTS], "document")
    own /= np.linalg.norm(own, axis=1, keepdims=True)
    index = faiss.index_factory(own.shape[1], kind, faiss.METRIC_INNER_PRODUCT)
    index.train(own)
    index.add_with_ids(own, np.arange(len(own))) if "IDMap" in kind else index.add(own)
    retriever = FaissRetriever(index, TEXTS, explainer(), normalize=True)
    found = [hit.explanation.surrogate for hit in retriever.search(QUERY, 5, explain="eager") if hit.explanation]
    assert len(found) == 5
    assert any(found) == bool(header), found
    assert all("another model, another prompt or header" in reason for reason in found if reason)


def test_an_explainer_or_index_that_was_exchanged_is_the_one_that_explains() -> None:
    retriever = FaissRetriever.from_texts(CORPUS, explainer())
    other = Explainer(tiny("roberta", dtype=torch.float32))
    replaced = FaissRetriever.from_texts(CORPUS, other)
    retriever.explainer, retriever.index = other, replaced.index
    for hit in retriever.search(QUERY, 3, explain="eager"):
        assert hit.explanation is not None
        assert hit.explanation.surrogate is None
        assert hit.gap == pytest.approx(0.0, abs=1e-5)
