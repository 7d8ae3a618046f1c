from __future__ import annotations

from typing import TypeVar

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense
from sentence_transformers.sentence_transformer.modules import Normalize

from rag_explain import Explainer, Token
from rag_explain.encoder.model import Encoder
from rag_explain.encoder.reference import reference_features
from rag_explain.errors import InvalidInput, UnsupportedModel
from rag_explain.factors import Factors
from rag_explain.methods.integration_path import IntegrationPath, _next_nodes
from rag_explain.methods.jacobian import ExactJacobians, IntegratedJacobians
from rag_explain.scorers.bi_encoder import BiEncoder
from tests.support.models import TEXTS, tiny
from tests.support.references_jacobian import equation_2, integrated_jacobian

ARCHITECTURES = ["bert", "roberta", "mpnet", "distilbert", "t5-gated", "qwen3"]
CASTS_TO_FLOAT32 = ("qwen3", "t5-gated")  # inside their norms, whatever the model's precision
QUERY, DOCUMENT = TEXTS
Kind = TypeVar("Kind", IntegratedJacobians, ExactJacobians)


@pytest.fixture(autouse=True)
def _no_autograd():
    with torch.no_grad():
        yield


def rows_of(method: IntegratedJacobians | ExactJacobians, text: str) -> tuple[torch.Tensor, IntegrationPath]:
    path = method.path(method.encoder.read([text], "document"), 0)
    return path.rows(2**24), path


def with_nodes(kind: type[Kind], scorer: BiEncoder, layer: int, nodes: int, **options: str) -> Kind:
    """The method held at `nodes` nodes: what it computes is then a finite sum that can be written out."""
    return kind(scorer, layer, tolerance=1e-14, max_nodes=nodes, **options)  # type: ignore[arg-type]  # of one of them


@pytest.mark.parametrize("along", ["pairs", "rest"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("layer", [0, 2])
def test_ij_is_the_sum_of_its_equation(architecture: str, layer: int, along: str) -> None:
    model = tiny(architecture)
    method = with_nodes(IntegratedJacobians, BiEncoder(Encoder(model)), layer, 4, along_reference=along)
    rows, path = rows_of(method, QUERY)
    wanted = integrated_jacobian(model, QUERY, layer, normalise=True, nodes=4, across=along == "rest")
    tolerance = 2e-6 if architecture in CASTS_TO_FLOAT32 else 1e-9
    assert torch.allclose(path.embedding, wanted.embedding, atol=tolerance)
    assert torch.allclose(path.reference, wanted.reference, atol=tolerance)
    assert torch.allclose(method.endpoints(path)[0], wanted.rest, atol=tolerance)
    assert (rows - wanted.rows).abs().max() < tolerance


@pytest.mark.parametrize("reference", ["mask", "zero", "mean"])
@pytest.mark.parametrize("architecture", ["bert", "roberta", "mpnet"])
def test_every_reference_is_what_its_name_says(architecture: str, reference: str) -> None:
    model = tiny(architecture)
    method = with_nodes(IntegratedJacobians, BiEncoder(Encoder(model)), 1, 3, reference=reference)
    rows, path = rows_of(method, QUERY)
    wanted = integrated_jacobian(model, QUERY, 1, normalise=True, nodes=3, filler=reference, across=True)
    padding = integrated_jacobian(model, QUERY, 1, normalise=True, nodes=1)
    assert torch.allclose(path.reference, wanted.reference, atol=1e-9)
    assert not torch.allclose(path.reference, padding.reference, atol=1e-3)
    assert (rows - wanted.rows).abs().max() < 1e-9


def test_a_reference_without_ids_leaves_other_texts_their_word_vectors() -> None:
    explainer = Explainer(tiny("bert"), "ij", layer=1, reference="zero")
    before = explainer.scorer.embed([QUERY], "query")
    explainer.factor([QUERY], "query")
    np.testing.assert_array_equal(explainer.scorer.embed([QUERY], "query"), before)


def test_a_tokenizer_without_a_mask_token_has_no_mask_reference() -> None:
    model = tiny("bert")
    model.tokenizer.mask_token = None
    with pytest.raises(UnsupportedModel, match="no mask token"):
        Explainer(model, "ij", reference="mask")


@pytest.mark.parametrize("option", [{}, {"similarity_fn_name": "dot"}])
def test_what_lies_along_the_references_is_in_the_rest(option: dict[str, str]) -> None:
    model = tiny("roberta", **option)
    options = {"layer": 1, "tolerance": 1e-6, "max_nodes": 64}
    explanation = Explainer(model, "ij", **options).explain(QUERY, DOCUMENT)
    kept = Explainer(model, "ij", along_reference="pairs", **options).explain(QUERY, DOCUMENT)
    a, b = (
        integrated_jacobian(model, text, 1, normalise=not option, nodes=32, task=task, across=True)
        for text, task in ((QUERY, "query"), (DOCUMENT, "document"))
    )
    np.testing.assert_allclose(explanation.pairs, a.rows @ b.rows.T, atol=1e-5)
    # Equation 2 for e': no term but f'(a, b) is left.
    across = float((a.embedding - a.rest) @ (b.embedding - b.rest))
    assert float(explanation.pairs.sum()) == pytest.approx(across, abs=1e-5)
    assert abs(explanation.gap or 0.0) < 1e-5
    assert explanation.references is not None
    assert kept.references is not None
    moved = explanation.references["along references"]
    assert float(kept.pairs.sum()) - float(explanation.pairs.sum()) == pytest.approx(moved, abs=2e-5)
    assert "along references" not in kept.references


def test_the_pairs_of_the_papers_are_those_of_equation_2() -> None:
    model = tiny("bert")
    options = {"layer": 1, "tolerance": 1e-6, "max_nodes": 64, "along_reference": "pairs"}
    explanation = Explainer(model, "ij", **options).explain(QUERY, DOCUMENT)
    a = integrated_jacobian(model, QUERY, 1, normalise=True, nodes=32, task="query")
    b = integrated_jacobian(model, DOCUMENT, 1, normalise=True, nodes=32)
    left, right = equation_2(a, b)
    assert float(right.sum()) == pytest.approx(float(left), abs=1e-5)  # 32 nodes
    np.testing.assert_allclose(explanation.pairs, right, atol=1e-5)


def test_ij_converges_to_the_integral() -> None:
    model = tiny("bert")
    rows, path = rows_of(IntegratedJacobians(BiEncoder(Encoder(model)), 2, tolerance=1e-8), QUERY)
    wanted = integrated_jacobian(model, QUERY, 2, normalise=True, nodes=100, across=True)
    assert path.nodes < 100
    assert (rows - wanted.rows).abs().max() < 1e-7


@pytest.mark.parametrize("architecture", ["bert", "roberta", "qwen3"])
def test_exact_integrates_the_embedding_and_divides_afterwards(architecture: str) -> None:
    model = tiny(architecture)
    method = with_nodes(ExactJacobians, BiEncoder(Encoder(model)), 1, 4)
    rows, path = rows_of(method, QUERY)
    wanted = integrated_jacobian(model, QUERY, 1, normalise=False, nodes=4)
    rest, embedding, norm = method.endpoints(path)
    shifted = wanted.embedding - wanted.reference
    tolerance = 5e-6 if architecture in CASTS_TO_FLOAT32 else 1e-9
    assert (rows - wanted.rows).abs().max() < tolerance * wanted.rows.abs().max()
    assert not rest.any()
    assert torch.allclose(embedding, shifted, atol=tolerance * 10)
    assert float(norm) == pytest.approx(float(shifted.norm()), rel=1e-6)


def test_a_dense_layer_and_a_normalisation_behind_the_pooling_are_part_of_the_path() -> None:
    model = tiny("bert", after=lambda: [Dense(16, 8, activation_function=torch.nn.Tanh()), Normalize()])
    rows, _ = rows_of(with_nodes(IntegratedJacobians, BiEncoder(Encoder(model)), 1, 4), QUERY)
    assert (rows - integrated_jacobian(model, QUERY, 1, normalise=True, nodes=4, across=True).rows).abs().max() < 1e-9


@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken", "max", "weightedmean", ("mean", "cls")])
def test_every_pooling_sums_to_the_embedding(pooling: str | tuple[str, ...]) -> None:
    explainer = Explainer(tiny("bert", pooling), "ij", layer=2, tolerance=1e-5, max_nodes=200)
    explanation = explainer.explain(QUERY, DOCUMENT)
    # A maximum has kinks along the path, where Gauss sums converge slowly.
    assert abs(explanation.gap or 0.0) < (1e-2 if pooling == "max" else 5e-5)


@pytest.mark.parametrize("method", ["ij", "ij-exact"])
@pytest.mark.parametrize("architecture", ["bert", "xlm-roberta", "t5"])
def test_cold_warm_and_padded_batches_agree(method: str, architecture: str) -> None:
    explainer = Explainer(tiny(architecture), method, layer=1, tolerance=1e-4, max_nodes=24)
    documents = [DOCUMENT, "The moon.", DOCUMENT + " " + DOCUMENT]
    (half,) = explainer.factor([QUERY], "query")
    batch = explainer.scorer.encoder.read(documents, "document")
    cold = explainer.method.cold(half, batch)
    warm = [explainer.method.pair(half, factors) for factors in explainer.factor(documents)]
    alone = [explainer.explain(QUERY, document) for document in documents]
    for one, two, three in zip(cold, warm, alone, strict=True):
        np.testing.assert_allclose(one.matrix, two.matrix, atol=2e-6)
        np.testing.assert_allclose(one.matrix, three.matrix, atol=2e-6)
        assert one.score == pytest.approx(two.score, abs=1e-6)
        assert one.references is not None
        assert two.references is not None
        assert dict(one.references) == pytest.approx(dict(two.references), abs=1e-5)


def test_the_reference_similarities_are_the_cosines_with_the_empty_text() -> None:
    model = tiny("roberta")
    explanation = Explainer(model, "ij", layer=1).explain(QUERY, DOCUMENT)
    a = integrated_jacobian(model, QUERY, 1, normalise=True, nodes=1, task="query")
    b = integrated_jacobian(model, DOCUMENT, 1, normalise=True, nodes=1)
    found = explanation.references
    assert found is not None
    assert found["f(a, r_b)"] == pytest.approx(float(a.embedding @ b.reference), abs=1e-6)
    assert found["f(r_a, b)"] == pytest.approx(float(a.reference @ b.embedding), abs=1e-6)
    assert found["f(r_a, r_b)"] == pytest.approx(float(a.reference @ b.reference), abs=1e-6)
    parts = explanation.score - found["f(a, r_b)"] - found["f(r_a, b)"] + found["f(r_a, r_b)"]
    parts -= found["along references"]
    assert float(explanation.pairs.sum()) == pytest.approx(parts, abs=5e-3)


LARGE, SMALL = 0.2, 0.05


@pytest.mark.parametrize("along", ["rest", "pairs"])
@pytest.mark.parametrize(
    ("to_query_reference", "to_document_reference", "named"),
    [
        (SMALL, LARGE, "f(a, r_b) is 0.20"),
        (LARGE, SMALL, "f(r_a, b) is 0.20"),
        (SMALL, -LARGE, "f(a, r_b) is -0.20"),
        (-LARGE, SMALL, "f(r_a, b) is -0.20"),
        (SMALL, -SMALL, None),
    ],
)
def test_a_reference_similarity_far_from_zero_is_said_and_what_fills_the_pairs_is_named(
    to_query_reference: float, to_document_reference: float, named: str | None, along: str
) -> None:
    method = IntegratedJacobians(BiEncoder(Encoder(tiny("bert"))), 2, along_reference=along)
    # a, b, r_a, r_b of length one, with f(r_a, r_b) = 0.9, f(r_a, b) and f(a, r_b) as given
    r_a, r_b = np.array([1.0, 0, 0, 0], np.float32), np.array([0.9, 0.19**0.5, 0, 0], np.float32)
    b = np.array([to_query_reference, 0, (1 - to_query_reference**2) ** 0.5, 0], np.float32)
    a = np.array([0, to_document_reference / 0.19**0.5, 0, 0], np.float32)
    a[3] = (1 - a @ a) ** 0.5
    shares = (0.5, -0.25) if along == "rest" else (1.0, 1.0)
    query = half(a, r_a, shares[0])
    terms, notices = method.similarities(query, b, r_b * np.float32(shares[1]), shares[1])
    assert terms["f(a, r_b)"] == pytest.approx(to_document_reference, abs=1e-6)
    assert terms["f(r_a, b)"] == pytest.approx(to_query_reference, abs=1e-6)
    assert [notice.code for notice in notices] == (["method"] if named else [])
    for notice in notices:
        assert notice.text.startswith(str(named))
        assert "f(r_a, r_b) = 0.90" in notice.text
        assert ("left out of them" in notice.text) == (along == "rest")


@pytest.mark.parametrize("longer", [0.01, 100.0])
def test_references_of_a_dot_product_are_judged_by_their_cosine(longer: float) -> None:
    method = IntegratedJacobians(BiEncoder(Encoder(tiny("bert", similarity_fn_name="dot"))), 2)
    reference, near, far = np.eye(3, dtype=np.float32)[0], *np.array([[0.2, 1, 0], [0.05, 0, 1]], np.float32)
    for embedding, told in ((near, ["method"]), (far, [])):
        query = half(embedding * np.float32(longer), reference, 0.5)
        terms, notices = method.similarities(query, far * np.float32(longer), reference * np.float32(0.5), 0.5)
        assert terms["f(a, r_b)"] == pytest.approx(float(embedding[0]) * longer, rel=1e-5)
        assert [notice.code for notice in notices] == told


def half(embedding: np.ndarray, reference: np.ndarray, along: float) -> Factors:
    """A query of one token whose rest is so many times its reference."""
    rest = reference * np.float32(along)
    (row, token) = embedding - rest, Token("cat", 0, 3, "text")
    about = {"role": "query", "method": "ij", "settings": {}, "fingerprint": "", "references": {"along": along}}
    return Factors(tokens=(token,), rows=row[None], rest=rest, embedding=embedding, norm=1.0, **about)


def test_the_error_is_measured_and_the_search_for_nodes_ends(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny("bert")
    loose = Explainer(model, "ij", layer=0, tolerance=1e-2).factor([DOCUMENT])[0]
    tight = Explainer(model, "ij", layer=0, tolerance=1e-6, max_nodes=300).factor([DOCUMENT])[0]
    assert loose.references is not None
    assert tight.references is not None
    assert loose.error <= 1e-2
    assert tight.error <= 2e-6
    assert loose.references["nodes"] < tight.references["nodes"]
    capped = Explainer(model, "ij", layer=0, tolerance=1e-9, max_nodes=3).factor([DOCUMENT])[0]
    assert capped.references is not None
    assert capped.references["nodes"] == 3
    assert capped.error > 1e-9
    assert "raise max_nodes" in caplog.text


def test_the_next_number_of_nodes_follows_the_errors() -> None:
    assert _next_nodes([], 1e-3, 1) == 8
    # Ten times better with every four nodes: 1e-1 at 8 and 1e-2 at 12 make 1e-3 at 16, with a margin.
    assert _next_nodes([(8, 1e-1), (12, 1e-2)], 1e-3, 1) == 17
    assert _next_nodes([(8, 1e-1), (12, 2e-1)], 1e-3, 1) == 24  # no convergence yet: twice as many


def test_without_shared_masks_the_numbers_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    method = IntegratedJacobians(BiEncoder(Encoder(tiny("t5"))), 1)
    rows, path = rows_of(method, QUERY)
    assert method._spreads("document")
    monkeypatch.setattr(method, "_spreads", lambda role: False)
    copied, other = rows_of(method, QUERY)
    assert path.nodes == other.nodes
    assert torch.allclose(rows, copied, atol=1e-12)


def test_long_texts_run_in_several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    method = IntegratedJacobians(BiEncoder(Encoder(tiny("bert"))), 1)
    rows, path = rows_of(method, DOCUMENT)
    assert path.kept
    monkeypatch.setattr("rag_explain.methods.integration_path._POSITIONS", 50)
    again, other = rows_of(method, DOCUMENT)
    assert not other.kept
    assert torch.allclose(rows, again, atol=1e-12)


def test_a_dot_product_model_has_no_norm_in_its_path() -> None:
    model = tiny("bert", similarity_fn_name="dot")
    explainer = Explainer(model, "ij", layer=1, tolerance=1e-6)
    explanation = explainer.explain(QUERY, DOCUMENT)
    a, b = model.encode([QUERY, DOCUMENT])
    assert explanation.score == pytest.approx(float(a @ b), rel=1e-5)
    assert abs(explanation.gap or 0.0) < 1e-4 * abs(explanation.score)


def test_exact_sums_to_the_cosine_of_the_shifted_encoder_and_says_that_it_is_another() -> None:
    model = tiny("bert")
    explanation = Explainer(model, "ij-exact", layer=1, tolerance=1e-6).explain(QUERY, DOCUMENT)
    a = integrated_jacobian(model, QUERY, 1, normalise=False, nodes=1, task="query")
    b = integrated_jacobian(model, DOCUMENT, 1, normalise=False, nodes=1)
    cosine = torch.nn.functional.cosine_similarity(a.embedding - a.reference, b.embedding - b.reference, dim=0)
    assert explanation.score == pytest.approx(float(cosine), abs=1e-6)
    assert float(explanation.pairs.sum()) == pytest.approx(float(cosine), abs=1e-5)
    assert "shifted encoder" in (explanation.surrogate or "")


@pytest.mark.parametrize("texts", [("", DOCUMENT), (QUERY, ""), ("", "")], ids=["query", "document", "both"])
def test_an_empty_text_is_its_own_reference_and_carries_nothing(texts: tuple[str, str]) -> None:
    explanation = Explainer(tiny("bert", dtype=torch.float32), "ij-exact", layer=1).explain(*texts)
    assert explanation.score == pytest.approx(0, abs=1e-4)
    np.testing.assert_allclose(explanation.matrix, 0, atol=1e-4)


def test_without_a_padding_token_the_end_token_fills() -> None:
    model: SentenceTransformer = tiny("gpt_neo")
    features = model.preprocess(["The cat."])
    model.tokenizer.pad_token = None
    with pytest.raises(UnsupportedModel, match="neither a padding nor an end token"):
        reference_features(features, model[0])
    model.tokenizer.eos_token = "[SEP]"
    ids = reference_features(features, model[0])["input_ids"][0].tolist()
    assert ids[0] == model.tokenizer.cls_token_id
    assert set(ids[1:]) == {model.tokenizer.eos_token_id}
    assert len(ids) == features["input_ids"].shape[1]


@pytest.mark.parametrize(
    "option", [{"tolerance": 0.0}, {"max_nodes": 0}, {"nodes": 3}, {"reference": "unk"}, {"along_reference": "out"}]
)
def test_options_are_checked(option: dict[str, float]) -> None:
    with pytest.raises(InvalidInput):
        Explainer(tiny("bert"), "ij", **option)


@pytest.mark.slow
@pytest.mark.parametrize("layer", [0, 3, 5])
def test_on_the_real_encoder_the_integral_is_reached(layer: int) -> None:
    explainer = Explainer("all-MiniLM-L6-v2", "ij", layer=layer)
    explanation = explainer.explain("a dog runs in the park", "The small dog is running over the green grass.")
    assert explanation.references is not None
    assert explanation.references["query_error"] <= 1e-3
    assert explanation.references["document_error"] <= 1e-3
    assert abs(explanation.gap or 0.0) <= 3e-3


@pytest.mark.slow
def test_on_the_real_encoder_rows_follow_the_equation() -> None:
    explainer = Explainer("all-MiniLM-L6-v2", "ij", layer=5, tolerance=1e-4)
    rows, _ = rows_of(explainer.method, "a dog runs")  # type: ignore[arg-type]  # it is ij
    model = SentenceTransformer(explainer.scorer.encoder.whole[0].auto_model.name_or_path, device="cpu")
    wanted = integrated_jacobian(model, "a dog runs", 5, normalise=True, nodes=12, across=True)
    assert (rows - wanted.rows).abs().max() < 1e-4


@pytest.mark.slow
def test_an_unrelated_document_shows_pairs_that_sum_to_its_score() -> None:
    query, document = "how do bees find their way home", "The boiler must be serviced once a year. " * 6
    found = Explainer("all-MiniLM-L6-v2", "ij", layer=5).explain(query, document)
    papers = Explainer("all-MiniLM-L6-v2", "ij", layer=5, along_reference="pairs").explain(query, document)
    assert abs(found.score) < 0.2
    assert float(papers.pairs.sum()) - found.score > 0.3
    assert float(found.pairs.sum()) == pytest.approx(found.score, abs=0.02)
    assert papers.references is not None
    assert papers.references["f(r_a, r_b)"] < 0.95  # their lengths differ
