"""Why not that one? A planted case for every rung, in every kind of FAISS index."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
import torch

from rag_explain.errors import InvalidInput
from rag_explain.explainer import Explainer
from rag_explain.faiss import FaissRetriever
from rag_explain.results.why_not import WhyNot
from tests.support.embedders import Asked
from tests.support.models import CORPUS, tiny

QUERY = "why did the dog bark at the moon?"
WORDS = sorted({word for text in CORPUS for word in text.replace(",", " ").replace(".", " ").split()})


@cache
def explainer() -> Explainer:
    return Explainer(tiny("bert", dtype=torch.float32))


@cache
def texts() -> tuple[str, ...]:
    drawn = np.random.default_rng(0)
    return tuple(" ".join(drawn.choice(WORDS, 8)) for _ in range(120))


@cache
def vectors() -> Any:
    found = explainer().scorer.embed(texts(), "document")
    return found / np.linalg.norm(found, axis=1, keepdims=True)


IDS = [f"d{number}" for number in range(120)]


def retriever(index: Any = None, **options: Any) -> FaissRetriever:
    if index is None:
        index = faiss.IndexFlatIP(vectors().shape[1])
    if not index.is_trained:
        index.train(vectors())
    index.add(vectors())
    given = {"ids": IDS, "normalize": True, **options}
    return FaissRetriever(index, list(texts()), explainer(), **given)


def order() -> list[str]:
    """All ids, by exact search written out."""
    scores = explainer().scorer.score(QUERY, texts())
    return [IDS[at] for at in np.argsort(-scores, kind="stable")]


def names(found: WhyNot) -> list[str]:
    return [rung.name for rung in found.rungs]


def test_a_document_that_is_not_in_the_index() -> None:
    found = retriever().why_not(QUERY, "nobody")
    assert (found.reason.name, found.reason.explains, names(found)) == ("missing", True, ["missing"])
    assert "120 entries" in found.reason.text
    assert found.rank is None
    assert found.contrast is None


def test_a_document_that_is_there_in_other_chunks_one_of_which_was_returned() -> None:
    best, worst = order()[0], order()[-1]
    metadata = [{"source": "handbook.md" if name in (best, worst) else name} for name in IDS]
    searched = retriever(metadata=metadata)
    found = searched.why_not(QUERY, "handbook.md", k=3)
    assert names(found) == ["chunks"]
    assert f"{best} at rank 1" in found.reason.text
    sibling = searched.why_not(QUERY, worst, k=3)
    assert names(sibling) == ["chunks"]
    assert f"{best} at rank 1" in sibling.reason.text


def test_a_document_none_of_whose_chunks_was_returned_is_asked_about_by_the_best_of_them() -> None:
    chunks = [order()[at] for at in (40, 20, 60)]
    metadata = [{"source": "handbook.md" if name in chunks else name} for name in IDS]
    found = retriever(metadata=metadata).why_not(QUERY, "handbook.md", k=3)
    assert names(found) == ["chunks", "cut", "words"]
    assert f"the best of them is {order()[20]}" in found.rungs[0].text
    assert (found.reason.name, found.rank) == ("cut", 21)


def test_a_document_that_the_filter_leaves_out() -> None:
    metadata = [{"lang": "de" if name == order()[0] else "en"} for name in IDS]
    searched = retriever(metadata=metadata)
    found = searched.why_not(QUERY, order()[0], k=3, filter={"lang": "en"})
    assert names(found) == ["filter"]
    assert "its lang is 'de', where the filter asks for 'en'" in found.reason.text
    by_function = searched.why_not(QUERY, order()[0], k=3, filter=lambda data: data["lang"] == "en")
    assert names(by_function) == ["filter"]
    assert searched.why_not(QUERY, order()[5], k=3, filter={"lang": "en"}).reason.name == "cut"


def test_a_filter_leaves_k_documents_where_so_many_pass() -> None:
    metadata = [{"lang": "en" if name in order()[::10] else "de"} for name in IDS]
    searched = retriever(metadata=metadata)
    assert [hit.id for hit in searched.search(QUERY, 5, filter={"lang": "en"})] == order()[::10][:5]
    assert len(searched.search(QUERY, 50, filter={"lang": ["en"]})) == 12
    assert [hit.rank for hit in searched.search(QUERY, 3, filter={"lang": "en"})] == [1, 2, 3]
    with pytest.raises(InvalidInput, match="filter must be a mapping"):
        searched.search(QUERY, filter="lang=en")  # type: ignore[arg-type]


@pytest.mark.parametrize("metric", [faiss.METRIC_INNER_PRODUCT, faiss.METRIC_L2])
def test_a_least_score_is_in_the_unit_of_the_index(metric: int) -> None:
    searched = retriever(faiss.IndexFlat(vectors().shape[1], metric))
    hits = searched.search(QUERY, 5)
    assert hits[2].score is not None
    left = searched.search(QUERY, 5, min_score=hits[2].score)
    assert [hit.id for hit in left] == [hit.id for hit in hits[:3]]
    found = searched.why_not(QUERY, hits[3].id, k=5, min_score=hits[2].score)
    assert names(found) == ["threshold"]
    assert f"{hits[3].score:.4f}" in found.reason.text


def ivf() -> Any:
    flat = faiss.IndexFlatIP(vectors().shape[1])
    index = faiss.IndexIVFFlat(flat, vectors().shape[1], 16, faiss.METRIC_INNER_PRODUCT)
    index.nprobe = 1
    return index


def hnsw() -> Any:
    index = faiss.IndexHNSWFlat(vectors().shape[1], 2, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efSearch = 1
    return index


@pytest.mark.parametrize(("build", "setting"), [(ivf, "nprobe"), (hnsw, "efSearch")], ids=["ivf", "hnsw"])
def test_a_document_that_exact_search_finds_and_the_approximate_index_misses(build: Any, setting: str) -> None:
    searched = retriever(build())
    returned = [hit.id for hit in searched.search(QUERY, 10)]
    missed = [name for name in order()[: len(returned)] if name not in returned]
    assert missed, "the index was to be a bad one"
    found = searched.why_not(QUERY, missed[0], k=10)
    assert found.reason.name == "approximate"
    assert names(found) == ["approximate"]
    assert found.rank == order().index(missed[0]) + 1
    if setting in found.reason.text:  # what it says finds the document is what finds it
        value = int(found.reason.text.split(f"{setting}=")[1].split()[0])
        index = searched.index
        if setting == "nprobe":
            index.nprobe = value
        else:
            index.hnsw.efSearch = value
        assert missed[0] in [hit.id for hit in searched.search(QUERY, 10)]


def test_a_document_that_is_lost_by_what_an_index_makes_of_its_vector() -> None:
    searched = retriever(faiss.IndexPQ(vectors().shape[1], 2, 3, faiss.METRIC_INNER_PRODUCT))
    returned = [hit.id for hit in searched.search(QUERY, 5)]
    missed = next(name for name in order() if name not in returned)
    found = searched.why_not(QUERY, missed, k=5)
    assert found.reason.name == "approximate"
    assert "coded vectors" in found.reason.text
    last = searched.why_not(QUERY, order()[-1], k=5)
    assert last.reason.name == "cut"
    assert "by the coded vectors of the index" in last.reason.text
    exact = searched.why_not(QUERY, order()[-1], k=5, reencode=120)
    assert exact.rank == 120
    assert "coded" not in exact.reason.text


@pytest.mark.parametrize("build", [None, ivf, hnsw], ids=["flat", "ivf", "hnsw"])
def test_the_rank_of_a_document_that_k_cuts_off_is_that_of_exact_search(build: Any) -> None:
    searched = retriever(None if build is None else build())
    for at in (30, 119):
        found = searched.why_not(QUERY, order()[at], k=3)
        assert (found.reason.name, found.rank, found.total) == ("cut", at + 1, 120)
        assert found.contrast is not None
        score = explainer().scorer.score(QUERY, [texts()[IDS.index(order()[at])]])[0]
        assert found.contrast.wanted.score == pytest.approx(score, abs=1e-5)


def test_a_document_with_the_score_of_the_last_hit_was_not_missed() -> None:
    index = faiss.IndexFlatIP(vectors().shape[1])
    same = np.repeat(vectors()[:1], 6, axis=0)
    index.add(same)
    ids = [f"twin{number}" for number in range(6)]
    searched = FaissRetriever(index, [texts()[0]] * 6, explainer(), ids=ids, normalize=True)
    returned = {hit.id for hit in searched.search(QUERY, 2)}
    found = searched.why_not(QUERY, next(name for name in ids if name not in returned), k=2)
    assert found.reason.name == "cut"
    assert "rank 1 to 6 of 6, with others of the same score" in found.reason.text


def test_a_document_that_was_returned_is_said_to_be() -> None:
    searched = retriever()
    assert searched.why_not(QUERY, order()[0], k=3).reason.text == "it was returned, at rank 1"
    lower = searched.why_not(QUERY, order()[2], k=3)
    assert names(lower) == ["returned", "words"]
    assert lower.reason.name == "words"
    assert lower.got == order()[0]
    named = searched.why_not(QUERY, order()[2], got=order()[1], k=3)
    assert named.got == order()[1]
    with pytest.raises(InvalidInput, match="was not returned for this query: got must be one of"):
        searched.why_not(QUERY, order()[2], got=order()[50], k=3)


def test_a_document_that_was_never_read_to_its_end() -> None:
    best = texts()[IDS.index(order()[0])]
    long = " ".join([texts()[IDS.index(order()[-1])]] * 12) + ". " + best
    index = faiss.IndexFlatIP(vectors().shape[1])
    both = explainer().scorer.embed([*texts(), long], "document")
    index.add(both / np.linalg.norm(both, axis=1, keepdims=True))
    searched = FaissRetriever(index, [*texts(), long], explainer(), ids=[*IDS, "long"], normalize=True)
    found = searched.why_not(QUERY, "long", k=3)
    assert names(found)[-2:] == ["unread", "words"]
    unread = found.rungs[-2]
    assert unread.explains
    assert "by itself" in unread.text
    assert next(one.rank for one in found.suggestions if "chunks" in one.text) < (found.rank or 0)


def test_a_suggestion_was_tried_out() -> None:
    searched, tried = retriever(), 0
    for at in (4, 5, 6, 8, 10):
        found = searched.why_not(QUERY, order()[at], k=4)
        for one in found.suggestions:
            word = one.text.split("“")[1].split("”")[0]
            edited = " ".join(part for part in QUERY.replace("?", " ?").split() if part != word)
            first, second = (texts()[IDS.index(name)] for name in (order()[at], found.got))
            if QUERY.split().count(word) == 1:
                own, other = explainer().scorer.score(edited.replace(" ?", "?"), [first, second])
                assert own > other
                tried += 1
    assert tried


def test_a_rank_that_cannot_be_known_is_said_to_be_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = retriever()
    monkeypatch.setattr("rag_explain.retrieval.faiss_rows.FaissCorpus.ranking", lambda *given: None)
    found = searched.why_not(QUERY, order()[50], k=3)
    assert found.rank is None
    assert names(found) == ["unknown", "words"]
    assert "reencode=120" in found.rungs[0].text
    assert searched.why_not(QUERY, order()[50], k=3, reencode=120).rank == 51
    with pytest.raises(InvalidInput, match="reencode must be 0 or more"):
        searched.why_not(QUERY, order()[50], reencode=-1)


def test_what_half_of_an_index_is_from_is_no_document() -> None:
    searched = retriever(metadata=[{"source": "wiki"} for _ in IDS])
    found = searched.why_not(QUERY, order()[20], k=3)
    assert names(found) == ["chunks", "cut", "words"]
    assert found.reason.name == "cut"


def test_with_a_filter_a_rank_is_among_those_that_it_lets_through() -> None:
    metadata = [{"lang": "en" if name in order()[::10] else "de"} for name in IDS]
    found = retriever(metadata=metadata).why_not(QUERY, order()[50], k=3, filter={"lang": "en"})
    assert (found.reason.name, found.rank) == ("cut", 6)
    assert "rank 6 of the 12 that can be compared, and 3 were returned" in found.reason.text
    searched = retriever(ivf(), metadata=metadata)
    returned = [hit.id for hit in searched.search(QUERY, 5, filter={"lang": "en"})]
    missed = next(name for name in order()[::10][:5] if name not in returned)
    assert order().index(missed) >= 10  # by all documents it would stand after the last one returned
    assert searched.why_not(QUERY, missed, k=5, filter={"lang": "en"}).reason.name == "approximate"


def test_an_index_that_gives_fewer_than_were_asked_for_has_missed_the_others() -> None:
    searched = retriever(ivf())
    returned = [hit.id for hit in searched.search(QUERY, 40)]
    assert len(returned) < 30
    missed = next(name for name in order()[len(returned) : 40] if name not in returned)
    found = searched.why_not(QUERY, missed, k=40)
    assert found.reason.name == "approximate"
    assert found.rank == order().index(missed) + 1


def test_what_a_search_of_few_cells_of_coded_vectors_missed_is_not_said_to_be_exact() -> None:
    flat = faiss.IndexFlatIP(vectors().shape[1])
    index = faiss.IndexIVFPQ(flat, vectors().shape[1], 16, 2, 3, faiss.METRIC_INNER_PRODUCT)
    searched = retriever(index)
    searched.index.nprobe = 16
    whole = [hit.id for hit in searched.search(QUERY, 120)]
    searched.index.nprobe = 1
    returned = [hit.id for hit in searched.search(QUERY, 10)]
    scores = {hit.id: hit.score for hit in searched.search(QUERY, 120)}
    missed = next(name for name in whole[:5] if name not in returned and name not in scores)
    found = searched.why_not(QUERY, missed, k=10)
    assert found.reason.name == "approximate"
    assert "a comparison with all coded vectors has it at rank" in found.reason.text


def test_documents_that_are_no_list_cannot_be_asked_about() -> None:
    searched = retriever(ids=None)
    searched._documents = lambda row: texts()[row]
    with pytest.raises(InvalidInput, match="cannot be listed"):
        searched.why_not(QUERY, "7")


def test_an_id_is_a_string() -> None:
    with pytest.raises(InvalidInput, match="must be the id of a document"):
        retriever().why_not(QUERY, 7)  # type: ignore[arg-type]


def test_asking_changes_neither_index_nor_ranking() -> None:
    searched = retriever(ivf())
    before = [hit.id for hit in searched.search(QUERY, 10)]
    searched.why_not(QUERY, order()[40], k=3)
    assert searched.index.nprobe == 1
    assert [hit.id for hit in searched.search(QUERY, 10)] == before


def test_it_is_shown_and_written(tmp_path: Path) -> None:
    found = retriever().why_not(QUERY, order()[40], k=3)
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["reason"] == "cut"
    assert plain["rank"] == 41
    assert plain["contrast"]["format"] == "rag_explain.contrast"
    printed = str(found)
    places = [printed.index(part) for part in ("It stands at rank 41", "word of the query", "query · document")]
    assert places == sorted(places)
    page = found.to_html(tmp_path / "why.html")
    assert "It stands at rank 41" in page
    assert "<script" not in page
    assert "It stands" in found._repr_html_()


@pytest.mark.parametrize("metric", [faiss.METRIC_L1, faiss.METRIC_L2, faiss.METRIC_INNER_PRODUCT])
def test_a_rank_is_by_what_the_index_compares(metric: int) -> None:
    index = faiss.IndexFlat(vectors().shape[1], metric)
    searched = retriever(index)
    whole = [hit.id for hit in searched.search(QUERY, 120)]
    assert searched.why_not(QUERY, whole[70], k=5).rank == 71
    hits = searched.search(QUERY, 5)
    left = searched.search(QUERY, 5, min_score=hits[1].score)
    assert [hit.id for hit in left] == [hit.id for hit in hits[:2]]


def test_ids_of_an_idmap_may_be_negative() -> None:
    index = faiss.IndexIDMap(faiss.IndexFlatIP(vectors().shape[1]))
    rows = np.array([-50 - number for number in range(120)])
    index.add_with_ids(vectors(), rows)
    kept = dict(zip(rows.tolist(), texts(), strict=True))
    searched = FaissRetriever(index, kept, explainer(), normalize=True)
    wanted = order()[30]
    found = searched.why_not(QUERY, str(rows[IDS.index(wanted)]), k=3)
    assert (found.rank, found.total) == (31, 120)


def test_what_is_no_score_is_refused() -> None:
    for wrong in ("0.3", True, float("nan")):
        with pytest.raises(InvalidInput, match="min_score must be a number"):
            retriever().search(QUERY, min_score=wrong)  # type: ignore[arg-type]


def test_of_a_black_box_the_ladder_is_climbed_as_far_as_texts_may_be_sent() -> None:
    asked = Asked(tiny("bert", dtype=torch.float32))
    own = Explainer(asked)
    searched = FaissRetriever.from_texts(list(texts()), own, ids=IDS)
    scores = own.scorer.score(QUERY, texts())
    far = IDS[int(np.argsort(-scores)[40])]
    with own.scorer.at_most(5):  # type: ignore[attr-defined]
        found = searched.why_not(QUERY, far, k=3)
    assert (found.reason.name, found.rank) == ("cut", 41)
    assert "the words cannot be told: max_calls is spent" in found.rungs[-1].text
    whole = searched.why_not(QUERY, far, k=3)
    assert names(whole)[-1] == "words"
    assert whole.contrast is not None
    assert whole.contrast.wanted.method == "occlusion"
