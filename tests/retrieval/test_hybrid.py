"""Words and vectors, fused and reranked: the ranking that the rules say, with every stage explained."""

from __future__ import annotations

import json
from functools import cache

import bm25s
import pytest
from sentence_transformers import CrossEncoder

from rag_explain import Explainer
from rag_explain.errors import InvalidInput
from rag_explain.faiss import FaissRetriever
from rag_explain.results.stages import fused
from rag_explain.retrieval.hybrid import HybridRetriever
from tests.support.models import CORPUS, cross_encoder_folder, tiny

QUERY = "why did the dog look at the moon?"
IDS = [f"doc-{number}" for number in range(len(CORPUS))]


@cache
def vectors() -> FaissRetriever:
    return FaissRetriever.from_texts(CORPUS, Explainer(tiny("bert")), ids=IDS)


@cache
def reranker() -> CrossEncoder:
    return CrossEncoder(str(cross_encoder_folder()), device="cpu")


def test_the_ranking_is_reciprocal_rank_fusion_of_both_indexes():
    index = bm25s.BM25()
    index.index(bm25s.tokenize(CORPUS, stopwords="en", show_progress=False), show_progress=False)
    asked = bm25s.tokenize([QUERY], stopwords="en", return_ids=False, show_progress=False)
    rows, scores = index.retrieve(asked, k=len(CORPUS), show_progress=False)
    words = [IDS[row] for row, score in zip(rows[0], scores[0], strict=True) if score > 0]
    near = [hit.id for hit in vectors().search(QUERY, len(CORPUS))]
    assert 0 < len(words) < len(near)
    totals = {name: sum(1 / (60 + one.index(name) + 1) for one in (words, near) if name in one) for name in near}
    hits = HybridRetriever(vectors()).search(QUERY, 3)
    assert [hit.score for hit in hits] == pytest.approx(sorted(totals.values(), reverse=True)[:3], abs=1e-12)
    for hit in hits:
        word, vector, last = hit.stages
        assert hit.score == last.score == pytest.approx(totals[hit.id], abs=1e-12) == fused(hit.stages, 2)
        assert word.rank == (words.index(hit.id) + 1 if hit.id in words else None)
        assert vector.rank == near.index(hit.id) + 1


def test_every_stage_is_explained_by_its_scorer():
    hits = HybridRetriever(vectors(), reranker=reranker()).search(QUERY, 5)
    own = dict(zip(CORPUS, reranker().predict([(QUERY, text) for text in CORPUS]).tolist(), strict=True))
    assert [hit.text for hit in hits] == sorted(own, key=lambda text: -own[text])
    before = [hit.id for hit in HybridRetriever(vectors()).search(QUERY, 5)]
    for rank, hit in enumerate(hits, 1):
        word, vector, fusion, last = hit.stages
        assert (last.name, last.kind, last.rank, last.rank_before) == (
            "CrossEncoder",
            "rerank",
            rank,
            before.index(hit.id) + 1,
        )
        assert hit.score == last.score == pytest.approx(own[hit.text], abs=1e-6)
        assert last.explanation.returned == pytest.approx(last.score, abs=1e-5)
        assert vector.handle is hit.handle
        assert vector.explanation.score == pytest.approx(vector.score, abs=1e-5)
        assert hit.gap == pytest.approx(0.0, abs=1e-5)
        assert word.is_missed or word.explanation.score == pytest.approx(word.score, rel=1e-6)
        assert fusion.handle.get() is None
        assert "chosen by CrossEncoder" in hit.explanation.surrogate
        json.dumps(hit.to_dict())


@pytest.mark.parametrize("query", ["zzz", "", "the", "moon " * 300])
def test_queries_of_which_no_word_is_known_are_searched_by_vectors_alone(query):
    hits = HybridRetriever(vectors()).search(query, 2)
    assert len(hits) == 2
    if "moon" not in query:
        assert all(hit.stages[0].is_missed for hit in hits)


def test_documents_without_a_known_word_and_without_a_name():
    few = FaissRetriever.from_texts(["the", "and of", "moon"], vectors().explainer)
    hits = HybridRetriever(few, depth=2).search("the moon", 9, top=1)
    assert {hit.id for hit in hits} <= {"0", "1", "2"}
    assert [hit.status for hit in hits] == ["pending", *["skipped"] * (len(hits) - 1)]


def test_what_it_cannot_be_asked_is_said():
    with pytest.raises(InvalidInput, match="depth must be at least 1"):
        HybridRetriever(vectors(), depth=0)
    with pytest.raises(InvalidInput, match="no document has a word that BM25 could look for"):
        HybridRetriever(FaissRetriever.from_texts(["the", "of"], vectors().explainer))
    with pytest.raises(InvalidInput, match="k must be at least 1"):
        HybridRetriever(vectors()).search(QUERY, 0)


def test_why_not_tells_what_each_stage_made_of_a_document_that_was_not_returned():
    hybrid = HybridRetriever(vectors(), reranker=reranker())
    hits = hybrid.search(QUERY, len(CORPUS))
    wanted, first = hits[3], hits[0]
    found = hybrid.why_not(QUERY, wanted.id, k=2)
    assert [rung.name for rung in found.rungs] == ["stage"]
    word, vector, fusion, last = wanted.stages
    told = "BM25 did not find it" if word.is_missed else f"BM25 has it at rank {word.rank}"
    told += f", FAISS has it at rank {vector.rank}, HybridRetriever has it at rank {fusion.rank}"
    assert found.reason.text == f"{told}, CrossEncoder has it at rank {last.rank}, and 2 were returned"
    assert found.got == hits[1].id
    assert [stage.name for stage in found.contrast.stages] == ["BM25", "FAISS", "HybridRetriever", "CrossEncoder"]
    assert found.contrast.stages[-1].contrast.wanted.returned == pytest.approx(last.score, abs=1e-5)
    lower = hybrid.why_not(QUERY, hits[1].id, k=2)
    assert lower.reason.name == "stage"
    assert lower.reason.text.startswith(f"it was returned, at rank 2, after {first.id} at rank 1: BM25")
    assert lower.contrast.stages
    assert hybrid.why_not(QUERY, first.id, k=2).reason.text == "it was returned, at rank 1"
    for shown in (str(found), found.to_html(), found._repr_html_(), json.dumps(found.to_dict())):
        assert "HybridRetriever has it at rank" in " ".join(shown.split())


def test_why_not_of_what_no_search_brought_and_of_what_the_reranker_never_read():
    order = [hit.id for hit in vectors().search(QUERY, len(CORPUS))]
    narrow = HybridRetriever(vectors(), depth=1)
    brought = {hit.id for hit in narrow.search(QUERY, len(CORPUS))}
    far = next(name for name in reversed(order) if name not in brought)
    found = narrow.why_not(QUERY, far, k=5)
    place = order.index(far) + 1
    assert found.rungs[0].name == "cut"
    stands = f"by similarity it stands at rank {place} of {len(CORPUS)}"
    assert found.rungs[0].text == f"no search inside found it: BM25 gave 1, FAISS gave 1; {stands}"
    read = HybridRetriever(vectors(), reranker=reranker(), depth=1)
    fused = [hit.id for hit in narrow.search(QUERY, len(CORPUS))]
    assert len(fused) == 2
    unread = read.why_not(QUERY, fused[1], k=5)
    assert unread.reason.name == "stage"
    assert "HybridRetriever has it at rank 2: CrossEncoder, which returned 1, left it out" in unread.reason.text
    assert read.why_not(QUERY, "nobody").reason.name == "missing"
