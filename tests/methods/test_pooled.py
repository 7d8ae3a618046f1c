from __future__ import annotations

import numpy as np
import pytest
import torch
from sentence_transformers.base.modules import Dense
from sentence_transformers.sentence_transformer.modules import Normalize

from rag_explain import Explainer
from rag_explain.errors import InvalidInput
from tests.support.models import TEXTS, tiny

QUERY, DOCUMENT = TEXTS


@pytest.mark.parametrize("architecture", ["bert", "roberta", "qwen3", "t5"])
def test_rows_are_the_tokens_shares_of_the_mean(architecture: str) -> None:
    model = tiny(architecture)
    explainer = Explainer(model, "pooled")
    vectors = model.encode(DOCUMENT, output_value="token_embeddings").double().cpu().numpy()
    (factors,) = explainer.factor([DOCUMENT])
    np.testing.assert_allclose(factors.rows, vectors / len(vectors), rtol=1e-4, atol=1e-6)
    assert not factors.rest.any()
    assert factors.error < 1e-6
    a, b = model.encode([QUERY, DOCUMENT])
    explanation = explainer.explain(QUERY, DOCUMENT)
    assert explanation.score == pytest.approx(float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)), abs=1e-6)
    assert abs(explanation.gap or 0.0) < 1e-6


def test_a_dense_layer_s_bias_is_the_rest() -> None:
    model = tiny("bert", after=lambda: [Dense(16, 8, activation_function=torch.nn.Identity()), Normalize()])
    (factors,) = Explainer(model, "pooled").factor([DOCUMENT])
    np.testing.assert_allclose(factors.rest, model[2].linear.bias.detach().numpy(), atol=1e-6)
    assert factors.error < 1e-6


@pytest.mark.parametrize("pooling", ["cls", "lasttoken"])
def test_one_cell_is_called_one_cell(pooling: str) -> None:
    explainer = Explainer(tiny("bert", pooling), "pooled")
    explanation = explainer.explain(QUERY, DOCUMENT)
    assert np.count_nonzero(explanation.pairs) == 1
    assert any("one cell" in notice.text for notice in explanation.notices)
    assert abs(explanation.gap or 0.0) < 1e-6
    assert not Explainer(tiny("bert"), "pooled").explain(QUERY, DOCUMENT).notices


def test_there_is_no_layer_to_choose() -> None:
    with pytest.raises(InvalidInput, match="no layer"):
        Explainer(tiny("bert"), "pooled", layer=1)


@pytest.mark.slow
def test_on_the_real_encoder_it_is_exact() -> None:
    explanation = Explainer("all-MiniLM-L6-v2", "pooled").explain("a dog runs", "The small dog is running.")
    assert abs(explanation.gap or 0.0) < 1e-5
