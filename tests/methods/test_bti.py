from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor

from rag_explain import Explainer
from rag_explain.errors import InvalidInput, MissingExtra
from rag_explain.methods.bti import pair_scores, top_clusters
from tests.support.models import TEXTS, tiny
from tests.support.references_jacobian import _pass

QUERY, DOCUMENT = TEXTS
ARCHITECTURES = ["bert", "roberta", "t5"]


def saliencies(model: SentenceTransformer, layer: int, kind: str) -> tuple[list[Tensor], list[Tensor], float]:
    """Step 1 to 3 by autograd on the model itself: vectors and scaled saliencies of both texts' own tokens."""
    blocks = 3
    inputs, pooled, frames = [], [], []
    for text, task in ((QUERY, "query"), (DOCUMENT, "document")):
        features: dict[str, Any] = dict(model.preprocess([text], task=task))
        ids = features["input_ids"][0]
        frame = (ids == model.tokenizer.cls_token_id) | (ids == model.tokenizer.sep_token_id)
        if layer < blocks:
            hidden, _ = _pass(model, dict(features), layer, None)
            at = hidden.detach().requires_grad_()
            caught: list[Tensor] = []
            handle = model[1].register_forward_pre_hook(lambda _m, args, caught=caught: caught.append(args[0]))
            _pass(model, dict(features), layer, at)
            handle.remove()
            last = caught[0]["token_embeddings"]
        else:
            at = last = model[0](dict(features))["token_embeddings"].detach().requires_grad_()
        inputs.append(at)
        pooled.append(last[0, ~frame].mean(dim=0))
        frames.append(~frame)
    cosine = torch.nn.functional.cosine_similarity(pooled[0], pooled[1], dim=0)
    gradients = torch.autograd.grad(cosine, inputs)
    vectors, scaled = [], []
    for at, gradient, kept in zip(inputs, gradients, frames, strict=True):
        product = {"product": at * gradient, "gradient": gradient, "activation": at}[kind]
        saliency = torch.relu(product)[0, kept].sum(dim=-1)
        scaled.append(((saliency - saliency.min()) / (saliency.max() - saliency.min())).detach())
        vectors.append(at[0, kept].detach())
    return vectors, scaled, cosine.item()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("layer", "kind"), [(0, "product"), (0, "gradient"), (0, "activation"), (3, "product")])
def test_scores_follow_the_steps(architecture: str, layer: int, kind: Any) -> None:
    model = tiny(architecture).eval()
    vectors, saliency, cosine = saliencies(model, layer, kind)
    explainer = Explainer(model, "bti", layer=layer, saliency=kind, clusters=None)
    found = explainer.explain(QUERY, DOCUMENT)
    assert found.references is not None
    assert found.references["cosine"] == pytest.approx(cosine, abs=1e-5)
    # Words from tokens, one by one.
    words = []
    for batch, values, weights in zip(
        (explainer.scorer.encoder.read([QUERY], "query"), explainer.scorer.encoder.read([DOCUMENT], "document")),
        vectors,
        saliency,
        strict=True,
    ):
        tokens = [token for token in batch.tokens[0] if token.part == "text"]
        side = found.query_tokens if len(words) == 0 else found.document_tokens
        rows = []
        for word in side:
            inside = [
                k
                for k, token in enumerate(tokens)
                if word.start <= token.start < word.end or (token.start < word.start < token.end)
            ]
            rows.append((values[inside].mean(dim=0), weights[inside].max()))
        words.append(rows)
    wanted = np.zeros(found.pairs.shape)
    table = np.array([[torch.nn.functional.cosine_similarity(a, b, dim=0) for b, _ in words[1]] for a, _ in words[0]])
    assert found.similarities is not None
    np.testing.assert_allclose(found.similarities, table, atol=1e-5)
    for i, (_, m) in enumerate(words[0]):
        for j, (_, n) in enumerate(words[1]):
            if table[i].argmax() == j or table[:, j].argmax() == i:
                wanted[i, j] = table[i, j] * m * n
    np.testing.assert_allclose(found.pairs, wanted, atol=1e-5)
    assert found.unit == "word"
    assert found.gap is None


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
