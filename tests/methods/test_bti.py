from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rag_explain import Explainer
from rag_explain.errors import InvalidInput, MissingExtra
from rag_explain.methods.bti import pair_scores, top_clusters
from rag_explain.texts.tokens import Role, Token
from tests.support.models import TEXTS, tiny
from tests.support.references_bti import algorithm_1

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
@pytest.mark.parametrize(("layer", "kind"), [(0, "product"), (0, "gradient"), (0, "activation"), (3, "product")])
def test_scores_follow_the_algorithm(architecture: str, layer: int, kind: Any) -> None:
    model = tiny(architecture).eval()
    explainer = Explainer(model, "bti", layer=layer, saliency=kind, clusters=None)
    found = explainer.explain(QUERY, DOCUMENT)
    inside = (
        members(explainer, QUERY, "query", found.query_tokens),
        members(explainer, DOCUMENT, "document", found.document_tokens),
    )
    scores, cosines, cosine = algorithm_1(model, (QUERY, DOCUMENT), inside, layer, kind)
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


def test_matches_are_taken_from_both_sides() -> None:
    cosines = np.array([[0.9, 0.8], [0.7, 0.1]], dtype=np.float32)
    ones = np.ones(2, dtype=np.float32)
    # 0 likes 0, 1 likes 0; column 0 likes 0, column 1 likes 0.
    np.testing.assert_allclose(pair_scores(cosines, ones, ones), [[0.9, 0.8], [0.7, 0]])


def test_top_clusters_keep_the_upper_groups() -> None:
    scores = np.array([[0.92, 0.9, 0, 0.91], [0.5, 0.51, 0.52, 0], [0.01, 0.02, 0.03, 0.04]], dtype=np.float32)
    np.testing.assert_allclose(top_clusters(scores, 1), scores * (scores > 0.8))
    np.testing.assert_allclose(top_clusters(scores, 2), scores * (scores > 0.4))
    np.testing.assert_allclose(top_clusters(scores, None), scores)
    equal = np.full((2, 2), 0.3, dtype=np.float32)
    np.testing.assert_allclose(top_clusters(equal, 1), equal)


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
    """Two descriptions of gloves as in figure 3 of Malkiel et al. (2022), whose point is this pair of words."""
    found = Explainer("all-MiniLM-L6-v2", "bti", clusters=None).explain(
        "Gloves in ribbed fabric. Tops of thumb, index, and middle fingers in touchscreen-compatible fabric.",
        "Running gloves with uppers in windproof functional fabric. Top of thumb and index finger made from "
        "smartphone-friendly material.",
    )
    assert found.similarities is not None
    words, others = ([token.text for token in side] for side in (found.query_tokens, found.document_tokens))
    row = found.similarities[words.index("touchscreen-compatible")]
    assert others[int(row.argmax())] == "smartphone-friendly"
