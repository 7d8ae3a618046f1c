from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense
from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss
from sentence_transformers.sentence_transformer.modules import Pooling

from rag_explain import Explainer, ShiftedEncoder
from rag_explain.errors import InvalidInput, UnsupportedModel
from tests.support.models import TEXTS, folder, tiny
from tests.support.references_jacobian import integrated_jacobian

QUERY, DOCUMENT = TEXTS


def shifted(architecture: str = "bert", pooling: str = "mean", *after: torch.nn.Module) -> SentenceTransformer:
    transformer = ShiftedEncoder(str(folder(architecture)))
    width = transformer.get_embedding_dimension()
    model = SentenceTransformer(modules=[transformer, Pooling(width, pooling), *after], device="cpu")
    return model.to(torch.float64)


@pytest.mark.parametrize("architecture", ["bert", "roberta", "mpnet", "qwen3"])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_it_is_the_embedding_less_its_reference(architecture: str, pooling: str) -> None:
    plain = integrated_jacobian(tiny(architecture, pooling), DOCUMENT, 0, normalise=False, nodes=1)
    # In a batch with a longer text, too: padding must not take part.
    found = shifted(architecture, pooling).encode([DOCUMENT, DOCUMENT + " " + QUERY])[0]
    np.testing.assert_allclose(found, (plain.embedding - plain.reference).numpy(), atol=2e-5)


@pytest.mark.parametrize("architecture", ["bert", "roberta", "t5"])
def test_exact_explains_its_own_cosine_with_nothing_left_over(architecture: str) -> None:
    model = shifted(architecture)
    explanation = Explainer(model, "ij-exact", layer=2, tolerance=1e-4, max_nodes=200).explain(QUERY, DOCUMENT)
    a, b = model.encode([QUERY, DOCUMENT])
    assert explanation.score == pytest.approx(float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)), abs=1e-5)
    assert explanation.surrogate is None
    assert abs(explanation.unattributed) < 1e-3
    assert not explanation.matrix[-1].any()
    assert not explanation.matrix[:, -1].any()


def test_it_gives_the_same_rows_as_shifting_a_plain_encoder() -> None:
    (one,) = Explainer(shifted(), "ij-exact", layer=1).factor([DOCUMENT])
    (two,) = Explainer(tiny("bert"), "ij-exact", layer=1).factor([DOCUMENT])
    np.testing.assert_allclose(one.rows, two.rows, atol=1e-6)
    np.testing.assert_allclose(one.embedding, two.embedding, atol=1e-6)
    assert one.norm == pytest.approx(two.norm)


def test_other_methods_see_the_shift_as_a_constant() -> None:
    for method in ("bilrp", "pooled", "hxp"):
        explanation = Explainer(shifted(), method).explain(QUERY, DOCUMENT)
        assert abs(explanation.gap or 0.0) < 1e-5
    models = tiny("bert"), shifted()
    plain, moved = (Explainer(model, "bilrp", biases="apart").factor([DOCUMENT])[0] for model in models)
    np.testing.assert_allclose(plain.rows, moved.rows, atol=1e-5)


def test_ij_has_no_direction_to_start_from() -> None:
    with pytest.raises(InvalidInput, match="use ij-exact"):
        Explainer(shifted(), "ij")


def test_a_bias_behind_the_pooling_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="not zero"):
        Explainer(shifted("bert", "mean", Dense(16, 8)), "ij-exact")
    Explainer(shifted("bert", "mean", Dense(16, 8, bias=False)), "ij-exact")


def test_it_is_saved_and_loaded(tmp_path: Path) -> None:
    model = shifted("roberta")
    model.save_pretrained(str(tmp_path))
    again = SentenceTransformer(str(tmp_path), device="cpu", trust_remote_code=True)
    assert type(again[0]) is ShiftedEncoder
    np.testing.assert_allclose(again.encode(DOCUMENT), model.encode(DOCUMENT), atol=1e-5)
    assert Explainer(again, "ij-exact").scorer.encoder.is_shifted
    with pytest.raises(InvalidInput, match="trust_remote_code=True"):
        Explainer(str(tmp_path))


def test_it_trains() -> None:
    model = shifted().eval()  # no dropout: the loss falls by training alone
    loss = CosineSimilarityLoss(model)
    features = [dict(model.preprocess([text, QUERY])) for text in (QUERY, DOCUMENT)]
    labels = torch.tensor([0.9, 0.1], dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    values = []
    for _ in range(12):
        value = loss([dict(feature) for feature in features], labels)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        values.append(value.item())
    assert values[-1] < values[0]
