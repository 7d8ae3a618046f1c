"""Every pooling that sentence-transformers has, and the one that only the paper has, against the papers' own way."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling

from rag_explain import Explainer
from rag_explain.encoder.model import Encoder
from rag_explain.linear import LRP
from rag_explain.methods.frozen import freeze
from tests.support.models import TEXTS, QKVPooling, tiny
from tests.support.references import lrp_rows, lrp_rows_with_biases

POOLINGS = (*Pooling.POOLING_MODES, "qkv")


@cache
def model(pooling: str) -> SentenceTransformer:
    return tiny(after=lambda: [QKVPooling()]) if pooling == "qkv" else tiny("bert", pooling)


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


@torch.no_grad()
@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_relevance_is_that_of_one_backward_pass_per_dimension(pooling: str, layer: int) -> None:
    encoder = Encoder(model(pooling))
    batch = encoder.read(TEXTS, "document")
    apart, _ = freeze(encoder, batch, layer, LRP)
    placed, _ = freeze(encoder, batch, layer, LRP, biases_by_position=True)
    for index in range(len(TEXTS)):
        features, positions = batch.select([index]).features, batch.positions(index)
        with torch.enable_grad():
            without = lrp_rows(model(pooling), features, layer, gated=False)[0]
            beside, after = lrp_rows_with_biases(model(pooling), features, layer, gated=False)
        for frozen, oracle in ((apart, without), (placed, beside[0])):
            assert relative(frozen.push_rows()[0][index, positions], oracle) < 1e-9
            assert relative(frozen.pull_rows()[0][index, positions], oracle) < 1e-9
        assert not after.any()


@pytest.mark.parametrize("rules", ["lrp", "attnlrp"])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_the_explanation_sums_to_the_models_own_similarity(pooling: str, rules: str) -> None:
    explanation = Explainer(model(pooling), "bilrp", rules=rules).explain(*TEXTS)
    query, document = model(pooling).encode_query(TEXTS[0]), model(pooling).encode_document(TEXTS[1])
    own = float(model(pooling).similarity(query, document))
    assert explanation.score == pytest.approx(own, abs=1e-6)
    assert explanation.gap == pytest.approx(0, abs=1e-5)
