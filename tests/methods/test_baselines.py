from __future__ import annotations

import numpy as np
import pytest
import torch

from rag_explain import Explainer
from rag_explain.encoder.model import Encoder
from rag_explain.errors import InvalidInput
from rag_explain.methods.baselines import IntegratedGradients, similarity_gradients
from rag_explain.scorers.bi_encoder import BiEncoder
from tests.support.models import TEXTS, tiny
from tests.support.references_jacobian import integrated_jacobian, similarity_saliency

QUERY, DOCUMENT = TEXTS
ARCHITECTURES = ["bert", "roberta", "qwen3"]


def embedded(model: torch.nn.Module, text: str) -> torch.Tensor:
    return torch.tensor(model.encode(text), dtype=torch.float64)  # type: ignore[operator]  # it is a SentenceTransformer


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("layer", [0, 2])
def test_gradient_is_the_product_of_gradient_lengths(architecture: str, layer: int) -> None:
    model = tiny(architecture)
    by_query, _ = similarity_saliency(model, QUERY, embedded(model, DOCUMENT), layer, task="query")
    by_document, _ = similarity_saliency(model, DOCUMENT, embedded(model, QUERY), layer)
    wanted = torch.outer(by_query.norm(dim=-1), by_document.norm(dim=-1)).numpy()
    documents = ["The moon.", DOCUMENT, QUERY]
    explanation = Explainer(model, "gradient", layer=layer).explain_many(QUERY, documents)[1]
    np.testing.assert_allclose(explanation.pairs, wanted, rtol=1e-4, atol=1e-7)
    assert explanation.gap is None


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_embeddings_are_products_of_input_vectors(architecture: str) -> None:
    model = tiny(architecture)
    _, left = similarity_saliency(model, QUERY, embedded(model, DOCUMENT), 0, task="query")
    _, right = similarity_saliency(model, DOCUMENT, embedded(model, QUERY), 0)
    explanation = Explainer(model, "embeddings").explain(QUERY, DOCUMENT)
    np.testing.assert_allclose(explanation.pairs, left @ right.T, rtol=1e-4, atol=1e-5)
    a, b = embedded(model, QUERY), embedded(model, DOCUMENT)
    assert explanation.score == pytest.approx(float(a @ b / a.norm() / b.norm()), abs=1e-6)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_integrated_gradients_follow_their_equation(architecture: str) -> None:
    model = tiny(architecture)
    encoder = Encoder(model)
    method = IntegratedGradients(BiEncoder(encoder), 1, tolerance=1e-14, max_nodes=4)
    with torch.no_grad():
        (found,) = method.cold(encoder.read([QUERY], "query"), encoder.read([DOCUMENT], "document"))
    a = integrated_jacobian(model, QUERY, 1, normalise=True, nodes=4, task="query")
    b = integrated_jacobian(model, DOCUMENT, 1, normalise=True, nodes=4)
    # IG_i of the cosine with b held is <integrated Jacobian of the unit embedding, unit b>.
    wanted = torch.outer(a.rows @ b.embedding, b.rows @ a.embedding).numpy()
    np.testing.assert_allclose(found.matrix[:-1, :-1], wanted, rtol=1e-4, atol=1e-6)


def test_another_reference_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidInput, match="must be one of padding, mask, zero, mean, not 'none'"):
        Explainer(tiny("bert"), "integrated-gradients", reference="none")


@pytest.mark.parametrize("reference", ["padding", "mask", "zero", "mean"])
def test_integrated_gradients_are_complete(reference: str) -> None:
    options = {"layer": 1, "tolerance": 1e-6, "reference": reference}
    found = Explainer(tiny("bert"), "integrated-gradients", **options).explain(QUERY, DOCUMENT)
    assert found.settings["reference"] == reference
    references = found.references
    assert references is not None
    assert references["query_sum"] == pytest.approx(found.score - references["f(r_a, b)"], abs=1e-5)
    assert references["document_sum"] == pytest.approx(found.score - references["f(a, r_b)"], abs=1e-5)


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_gradients_of_the_similarity(similarity: str) -> None:
    encoder = Encoder(tiny("bert", similarity_fn_name=similarity))
    torch.manual_seed(0)
    query = torch.randn(5, dtype=torch.float64, requires_grad=True)
    documents = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    by_query, by_document = similarity_gradients(encoder, query.detach(), documents.detach())
    for index in range(3):
        value = query @ documents[index]
        if similarity == "cosine":
            value = value / query.norm() / documents[index].norm()
        one, other = torch.autograd.grad(value, [query, documents])
        assert torch.allclose(by_query[index], one)
        assert torch.allclose(by_document[index], other[index])


def test_random_depends_on_its_seed_and_on_the_texts_alone() -> None:
    model = tiny("bert")
    one = Explainer(model, "random", seed=1).explain_many(QUERY, [DOCUMENT, QUERY])[0]
    again = Explainer(model, "random", seed=1).explain(QUERY, DOCUMENT)
    other = Explainer(model, "random", seed=2).explain(QUERY, DOCUMENT)
    assert np.array_equal(one.matrix, again.matrix)
    assert not np.array_equal(one.matrix, other.matrix)
    with pytest.raises(InvalidInput, match="no layer"):
        Explainer(model, "random", layer=1)


@pytest.mark.parametrize("method", ["embeddings", "gradient", "integrated-gradients", "random"])
def test_pair_methods_have_no_factors(method: str) -> None:
    explainer = Explainer(tiny("bert"), method)
    with pytest.raises(InvalidInput, match="pairs of texts"):
        explainer.factor([DOCUMENT])
    assert not explainer.method.has_factors


@pytest.mark.slow
@pytest.mark.parametrize("method", ["embeddings", "gradient", "integrated-gradients", "random"])
def test_on_the_real_encoder(method: str) -> None:
    explanation = Explainer("all-MiniLM-L6-v2", method).explain("a dog runs", "The small dog is running.")
    assert explanation.score == pytest.approx(0.7, abs=0.3)
    assert explanation.pairs.any()


def test_integrated_gradients_begin_at_the_reference_that_is_asked_for() -> None:
    model = tiny("bert")
    padding = Explainer(model, "integrated-gradients", layer=0).explain(QUERY, DOCUMENT)
    zero = Explainer(model, "integrated-gradients", layer=0, reference="zero").explain(QUERY, DOCUMENT)
    assert padding.settings["reference"] == "padding"
    assert "along_reference" not in zero.settings
    assert padding.references is not None
    assert zero.references is not None
    wanted = integrated_jacobian(model, DOCUMENT, 0, normalise=True, nodes=1, filler="zero").reference
    asked = integrated_jacobian(model, QUERY, 0, normalise=True, nodes=1, task="query").embedding
    assert zero.references["f(a, r_b)"] == pytest.approx(float(asked @ wanted), abs=1e-6)
    assert zero.references["f(a, r_b)"] != pytest.approx(padding.references["f(a, r_b)"], abs=1e-4)
    # Completeness: what the document's tokens carry is the score less that of its reference.
    assert zero.references["document_sum"] == pytest.approx(zero.score - zero.references["f(a, r_b)"], abs=5e-3)
