from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from rag_explain import Explainer
from rag_explain.errors import InvalidInput, MissingExtra
from rag_explain.methods.bti import matches, top_clusters
from rag_explain.texts.tokens import Role, Token
from tests.support.models import TEXTS, tiny
from tests.support.references_bti import algorithm_1, match_words, top_words

QUERY, DOCUMENT = TEXTS
ARCHITECTURES = ["bert", "roberta", "t5"]


def members(explainer: Explainer, text: str, role: Role, words: Sequence[Token]) -> list[list[int]]:
    """The tokens of the text that belong to each word, by where they stand."""
    tokens = [token for token in explainer.scorer.encoder.read([text], role).tokens[0] if token.part == "text"]
    return [
        [
            k
            for k, token in enumerate(tokens)
            if word.start <= token.start < word.end or token.start < word.start < token.end
        ]
        for word in words
    ]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("clusters", [None, 2, 3])
@pytest.mark.parametrize(("layer", "kind"), [(0, "product"), (0, "gradient"), (0, "activation"), (3, "product")])
def test_scores_follow_the_algorithm(architecture: str, layer: int, kind: Any, clusters: int | None) -> None:
    model = tiny(architecture).eval()
    explainer = Explainer(model, "bti", layer=layer, saliency=kind, clusters=clusters)
    found = explainer.explain(QUERY, DOCUMENT)
    inside = (
        members(explainer, QUERY, "query", found.query_tokens),
        members(explainer, DOCUMENT, "document", found.document_tokens),
    )
    scores, cosines, cosine = algorithm_1(model, (QUERY, DOCUMENT), inside, layer, kind, clusters)
    assert found.references is not None
    assert found.references["cosine"] == pytest.approx(cosine, abs=1e-5)
    np.testing.assert_allclose(found.similarities, cosines, atol=1e-5)
    wanted = np.zeros(found.pairs.shape)
    for (i, j), score in scores.items():
        wanted[i, j] = score
    np.testing.assert_allclose(found.pairs, wanted, atol=1e-5)
    assert (found.pairs != 0).sum() <= len(scores)
    assert found.unit == "word"
    assert found.gap is None


def test_where_saliency_is_taken_does_not_change_which_words_are_matched() -> None:
    """Words are matched by what the encoder puts out (Eq. 5), wherever their saliency comes from."""
    model = tiny("bert")
    tables = [Explainer(model, "bti", layer=layer, clusters=None).explain(QUERY, DOCUMENT) for layer in range(4)]
    for found in tables:
        np.testing.assert_allclose(found.similarities, tables[0].similarities, atol=1e-6)


def test_documents_in_a_batch_do_not_meet() -> None:
    explainer = Explainer(tiny("bert"), "bti", clusters=None)
    documents = ["The moon.", DOCUMENT, "A dog in Paris ran over the bridge to the moon."]
    for document, together in zip(documents, explainer.explain_many(QUERY, documents), strict=True):
        np.testing.assert_allclose(together.matrix, explainer.explain(QUERY, document).matrix, atol=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_words_are_matched_and_chosen_as_in_the_pseudocode(seed: int) -> None:
    chance = np.random.default_rng(seed)
    shape = chance.integers(1, 9, 2)
    # Corners of a cube, so that some words are equally near; scores of either sign, and some of them zero.
    left, right = (chance.choice([-1.0, 1.0], (count, 3)) for count in shape)
    cosines = (left @ right.T / 3).astype(np.float32)
    one, other = ([*torch.tensor(vectors)] for vectors in (left, right))
    values = chance.random(shape[0]).round(1), chance.random(shape[1]).round(2)
    sides = (
        match_words(one, other, *values, is_reversed=False),
        match_words(other, one, *values[::-1], is_reversed=True),
    )
    pairs = {(i, j): score for side in sides for i, j, score in side}
    matched = matches(cosines)
    assert {(int(i), int(j)) for i, j in np.argwhere(matched)} == set(pairs)
    scores = cosines * values[0][:, None] * values[1]
    for clusters in (None, 1, 2, 3):
        wanted = np.zeros(shape)
        for place, score in top_words({place: scores[place] for place in pairs}, clusters).items():
            wanted[place] = score
        np.testing.assert_allclose(top_clusters(scores, matched, clusters), wanted, atol=1e-6)


def test_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.cluster", None)
    with pytest.raises(MissingExtra, match=r"rag-explain\[bti\]"):
        Explainer(tiny("bert"), "bti")


@pytest.mark.parametrize("options", [{"saliency": "none"}, {"clusters": 0}, {"layer": 4}])
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        Explainer(tiny("bert"), "bti", **options)


@pytest.mark.slow
def test_on_the_real_encoder_like_words_come_first() -> None:
    explainer = Explainer("all-MiniLM-L6-v2", "bti")
    found = explainer.explain("a dog runs in the park", "The small dog is running over the green grass.")
    best = {(pair.query.text, pair.document.text) for pair in found.top_pairs(3)}
    assert best == {("park", "grass"), ("dog", "dog"), ("runs", "running")}


@pytest.mark.slow
def test_on_the_real_encoder_the_papers_gloves_match() -> None:
    """Two descriptions of gloves as in figure 3 of Malkiel et al. (2022), whose point is this pair of words.

    Matched by the input vectors, E in place of B, it is in neither of the two top clusters.
    """
    found = Explainer("all-MiniLM-L6-v2", "bti").explain(
        "Gloves in ribbed fabric. Tops of thumb, index, and middle fingers in touchscreen-compatible fabric.",
        "Running gloves with uppers in windproof functional fabric. Top of thumb and index finger made from "
        "smartphone-friendly material.",
    )
    kept = {(pair.query.text, pair.document.text) for pair in found.top_pairs(20) if pair.value}
    assert ("touchscreen-compatible", "smartphone-friendly") in kept
