"""Why this document and not that one: the differences sum, and shared words meet."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from rag_explain import Contrast, Explainer
from rag_explain.errors import InvalidInput
from rag_explain.render.views.contrast import decided
from rag_explain.results.contrast import NO_WORD
from tests.support.models import CORPUS, tiny
from tests.support.samples import DOCUMENT, HOSTILE, OTHER, QUERY, explain


def test_pairs_and_unattributed_sum_to_the_difference() -> None:
    with Explainer(tiny(dtype=torch.float32)) as explainer:
        contrast = explainer.contrast("where is the cat?", CORPUS[0], CORPUS[2])
    assert contrast.got.score == pytest.approx(explainer.explain("where is the cat?", CORPUS[2]).score, abs=1e-6)
    assert contrast.difference == contrast.got.score - contrast.wanted.score
    pairs, words = (sum(item.value for item in items) for items in (contrast.pairs(), contrast.query_words()))
    assert pairs + contrast.unattributed == pytest.approx(contrast.difference, abs=1e-5)
    assert words == pytest.approx(contrast.difference, abs=1e-5)
    last = contrast.query_words()[-1]
    assert last.query == "no word"
    for explanation, value in ((contrast.wanted, last.wanted), (contrast.got, last.got)):
        assert value == pytest.approx(explanation.score - explanation.query_saliency().sum(), abs=1e-6)


def test_a_word_of_both_documents_is_one_pair() -> None:
    contrast = Contrast(explain(QUERY, "The bank. A bank!"), explain(QUERY, "the Bank of the river"))
    pairs = {(item.query, item.document): item for item in contrast.pairs()}
    assert len(pairs) == len(contrast.pairs())
    bank = pairs["bank", "bank"]
    assert bank.wanted != 0.0
    assert bank.got != 0.0
    wanted = contrast.wanted
    row = [token.label for token in wanted.query_tokens].index("bank")
    columns = [i for i, token in enumerate(wanted.document_tokens) if token.label == "bank"]
    assert bank.wanted == pytest.approx(float(wanted.pairs[row, columns].sum()), abs=1e-6)
    assert pairs["bank", "river"].wanted == 0.0
    sizes = [abs(item.value) for item in contrast.pairs()]
    assert sizes == sorted(sizes, reverse=True)
    assert len(contrast.pairs(3)) == 3


def test_it_shows_itself_and_serialises() -> None:
    contrast = Contrast(explain(document=OTHER, surrogate="a reranker made the score"), explain(document=DOCUMENT))
    text = str(contrast)
    for expected in ("wanted", "got", "difference", "no word", "password", "! wanted: Stand-in: a reranker"):
        assert expected in text
    assert "\x1b" not in text
    data = json.loads(json.dumps(contrast.to_dict()))
    assert data["difference"] == contrast.difference
    assert data["pairs"][0]["value"] == contrast.pairs(1)[0].value
    assert repr(contrast).startswith("Contrast(wanted=")


@pytest.mark.parametrize("document", HOSTILE)
def test_hostile_texts_are_only_seen(document: str) -> None:
    assert "\x1b" not in str(Contrast(explain(document=document), explain(document=DOCUMENT)))


def test_two_queries_are_refused() -> None:
    with pytest.raises(InvalidInput, match="same query"):
        Contrast(explain(query="a"), explain(query="b"))
    with pytest.raises(InvalidInput, match="without the texts"):
        Contrast(replace(explain(), document=None), explain())


@pytest.mark.slow
def test_on_real_weights_the_trap_is_named() -> None:
    with Explainer("all-MiniLM-L6-v2") as explainer:
        contrast = explainer.contrast(
            "How do bees find their way home?",
            wanted="Foragers steer by the sun and by landmarks on the flight back.",
            got="Our home insurance pays for a swarm of bees in the roof.",
        )
    assert contrast.difference > 0
    assert {"bees", "home"} & {item.query for item in contrast.pairs(3)}
    assert (contrast.pairs(1)[0].query, contrast.pairs(1)[0].document) == ("bees", "bees")


def test_the_first_sentence_says_whether_the_difference_is_in_a_word_at_all() -> None:
    said = set()
    for number in range(12):
        one, other = explain(document=f"{DOCUMENT} {number}"), explain(document=f"{OTHER} {number}")
        for shift in (0.0, 3.0):
            matrix = other.matrix.copy()
            matrix[-1, -1] += shift  # what belongs to no word
            moved = replace(other, matrix=matrix, score=float(matrix.sum(dtype=np.float64)))
            contrast = Contrast(wanted=one, got=moved)
            told, share = decided(contrast), contrast.unattributed / contrast.difference
            assert ("of the difference is in no word: " in told) == (share > 0.5)
            if "speaks most for" in told:
                winner = "got" if contrast.difference > 0 else "wanted"
                words = [item for item in contrast.query_words() if item.query != NO_WORD]
                best = max(words, key=lambda item: item.value * contrast.difference)
                assert f"speaks most for {winner} is “{best.query}”" in told
            said.add(told.split()[0])
    assert len(said) > 1
    same = Contrast(wanted=explain(), got=explain())
    assert decided(same) == "both have the same score"
