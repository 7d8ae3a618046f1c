"""`lrp` of cross-encoders: held to the slow reference, sums to the logit, and refuses in words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder
from torch import nn

from rag_explain import Explainer, Explanation
from rag_explain.errors import CheckFailed, InvalidInput, UnsupportedModel
from rag_explain.methods import METHODS
from rag_explain.texts.passage import Passage
from tests.support import references_cross
from tests.support.cross_encoders import HEADS, cross
from tests.support.models import ARCHITECTURES, tiny

QUERY = "the cat looked"
DOCUMENTS = ["a dog sat on the moon", "The cat looked at the moon, and the dog ran.", "berlin"]
LABELS = 3


def expected(model: CrossEncoder, explainer: Explainer, document: str, label: int = 0) -> tuple[Any, float]:
    """The matrix and the logit by the slow reference."""
    pairs = explainer.scorer.pair_encoder.read_pairs(Passage(QUERY), [Passage(document)])
    name = model[0].auto_model.config.model_type
    gated = name in ARCHITECTURES and ARCHITECTURES[name].gated
    cut = explainer.method.settings["cut"]
    *found, logit = references_cross.relevance(model, pairs.features, cut, gated=gated, label=label)
    places = [pairs.text(0, side)[1].tolist() for side in (0, 1)]
    return references_cross.matrix(*found, *places).numpy(), float(logit)


@pytest.mark.parametrize("name", HEADS)
def test_pairs_and_relevance_are_those_of_the_slow_reference(name: str) -> None:
    model = cross(name)
    explainer = Explainer(model)
    for document in DOCUMENTS:
        explanation = explainer.explain(QUERY, document)
        matrix, logit = expected(model, explainer, document)
        np.testing.assert_allclose(explanation.matrix, matrix, atol=2e-6 * np.abs(matrix).max())
        assert explanation.score == pytest.approx(logit, abs=1e-6)
        assert abs(explanation.gap or 0.0) < 1e-6 * np.abs(matrix).sum()


@pytest.mark.parametrize("cut", [1, 2])
def test_every_cut_is_that_of_the_slow_reference(cut: int) -> None:
    model = cross("bert")
    explainer = Explainer(model, cut=cut)
    matrix, _ = expected(model, explainer, DOCUMENTS[0])
    np.testing.assert_allclose(explainer.explain(QUERY, DOCUMENTS[0]).matrix, matrix, atol=1e-6)


def test_the_logit_of_any_label_is_split() -> None:
    model = cross("bert", LABELS)
    sums = []
    for label in range(LABELS):
        explainer = Explainer(model, label=label)
        explanation = explainer.explain(QUERY, DOCUMENTS[0])
        matrix, logit = expected(model, explainer, DOCUMENTS[0], label)
        np.testing.assert_allclose(explanation.matrix, matrix, atol=1e-6)
        assert explanation.score == pytest.approx(logit)
        sums.append(explanation.score)
    assert len({round(one, 4) for one in sums}) == LABELS


@pytest.mark.parametrize("options", [{}, {"rules": "attnlrp"}, {"method": "gradient-input"}], ids=str)
@pytest.mark.parametrize("name", ["bert", "deberta-v2", "qwen3"])
def test_it_adds_up_by_every_unit(name: str, options: dict[str, str]) -> None:
    explainer = Explainer(cross(name), **options)  # type: ignore[arg-type]
    for unit in ("token", "word", "sentence"):
        for explanation in explainer.explain_many(QUERY, DOCUMENTS, unit=unit):
            assert abs(explanation.gap or 0.0) < 1e-5
            assert (explanation.unit, explanation.measure) == (unit, "logit")


def test_gradient_times_input_is_that_of_autograd() -> None:
    model = cross("bert")
    explainer = Explainer(model, "gradient-input")
    explanation = explainer.explain(QUERY, DOCUMENTS[0])
    pairs = explainer.scorer.pair_encoder.read_pairs(Passage(QUERY), [Passage(DOCUMENTS[0])])
    caught: list[torch.Tensor] = []

    def catch(module: nn.Module, args: tuple[Any, ...]) -> Any:
        caught.append(args[0].detach().requires_grad_())
        return (caught[0], *args[1:])

    handle = model[0].auto_model.bert.encoder.layer[0].register_forward_pre_hook(catch)
    logit = model(dict(pairs.features))["scores"][0, 0]
    handle.remove()
    (slope,) = torch.autograd.grad(logit, caught[0])
    carried = (slope * caught[0]).sum(dim=-1)[0].detach().numpy()
    for side, values in enumerate((explanation.query_saliency(), explanation.document_saliency())):
        np.testing.assert_allclose(values, carried[pairs.text(0, side)[1].numpy()], atol=1e-6)


def test_each_token_sums_to_its_relevance_wherever_the_pairs_are_cut() -> None:
    one, other = (Explainer(cross("roberta"), cut=cut).explain(QUERY, DOCUMENTS[1]) for cut in (1, 2))
    assert not np.allclose(one.pairs, other.pairs, atol=1e-3)
    np.testing.assert_allclose(one.document_saliency(), other.document_saliency(), atol=1e-6)
    np.testing.assert_allclose(one.query_saliency(), other.query_saliency(), atol=1e-6)
    rest = one.score - one.document_saliency().sum() - one.query_saliency().sum()
    assert one.matrix[-1, -1] == pytest.approx(rest + one.pairs.sum(), abs=1e-5)


@pytest.mark.parametrize("name", ["bert", "modernbert", "qwen3-chat"])
def test_highlights_are_the_relevance_of_the_documents_words(name: str) -> None:
    explainer = Explainer(cross(name))
    explanations = explainer.explain_many(QUERY, DOCUMENTS, unit="word")
    for explanation, found in zip(explanations, explainer.highlight_many(QUERY, DOCUMENTS), strict=True):
        np.testing.assert_allclose([one.value for one in found], explanation.document_saliency(), atol=1e-6)
        assert [one.text for one in found] == [one.text for one in explanation.document_tokens]
        assert (found.score, found.measure) == (pytest.approx(explanation.score), "logit")
        assert found.returned == pytest.approx(explanation.returned)
        assert abs(found.gap or 0.0) < 1e-5


def test_highlights_take_one_cotangent_and_pairs_two_for_each_token_of_the_query(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rag_explain.linear.affine_map import AffineMap

    explainer = Explainer(cross("bert"))
    pulled: list[int] = []
    plain = AffineMap.pull

    def counted(self: AffineMap, cotangents: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        pulled.append(len(cotangents))
        return plain(self, cotangents, *rest, **more)

    monkeypatch.setattr(AffineMap, "pull", counted)
    explainer.highlight(QUERY, DOCUMENTS[0])
    assert pulled == [1]
    pulled.clear()
    tokens = len(explainer.explain(QUERY, DOCUMENTS[0]).query_tokens)
    assert sum(pulled) == 2 + tokens  # to the cut, from there, and one for each


@pytest.mark.parametrize("name", ["bert", "modernbert", "qwen3", "qwen3-chat"])
def test_pairs_are_explained_alike_alone_and_together(name: str) -> None:
    explainer = Explainer(cross(name))
    documents = [*DOCUMENTS, DOCUMENTS[0], f"{DOCUMENTS[1]} {DOCUMENTS[0]}"]
    for document, one in zip(documents, explainer.explain_many(QUERY, documents), strict=True):
        alone = explainer.explain(QUERY, document)
        assert one.document == document
        assert one.score == pytest.approx(alone.score, abs=1e-6)
        np.testing.assert_allclose(one.matrix, alone.matrix, atol=2e-6)


def test_little_memory_changes_no_number() -> None:
    plain, little = (Explainer(cross("bert"), max_bytes=size) for size in (None, 1))
    for one, other in zip(plain.explain_many(QUERY, DOCUMENTS), little.explain_many(QUERY, DOCUMENTS), strict=True):
        np.testing.assert_allclose(one.matrix, other.matrix, atol=1e-6)


def test_nothing_said_on_one_side_leaves_the_relevance_of_the_other() -> None:
    for name in ("bert", "qwen3"):
        explainer = Explainer(cross(name))
        for query, document in ((QUERY, ""), ("", DOCUMENTS[0])):
            explanation = explainer.explain(query, document)
            assert abs(explanation.gap or 0.0) < 1e-6
            assert explanation.returned == pytest.approx(float(cross(name).predict([(query, document)])[0]), abs=1e-6)
    with pytest.raises(InvalidInput, match="have no tokens"):
        Explainer(cross("qwen3")).explain("", "")


def test_it_is_said_where_the_rest_of_the_logit_is() -> None:
    explainer = Explainer(cross("bert"))
    explanation = explainer.explain(QUERY, DOCUMENTS[0])
    assert any("in no pair" in notice.text for notice in explanation.notices)
    assert not any("in no pair" in notice.text for notice in explainer.highlight(QUERY, DOCUMENTS[0]).notices)
    no_word = explanation.trust.no_word
    carried = [
        value
        for tokens, values in (
            (explanation.query_tokens, explanation.query_saliency()),
            (explanation.document_tokens, explanation.document_saliency()),
        )
        for token, value in zip(tokens, values.tolist(), strict=True)
        if token.part == "text"
    ]
    words = explanation.by_word()
    sums = [*words.query_saliency().tolist(), *words.document_saliency().tolist()]
    left = abs(explanation.score - sum(carried))
    assert no_word == pytest.approx(left / (left + sum(map(abs, sums))), rel=1e-4)


@pytest.mark.parametrize("name", sorted({*METHODS} - {"lrp", "gradient-input"}))
def test_methods_of_other_models_refuse_a_cross_encoder(name: str) -> None:
    with pytest.raises((InvalidInput, UnsupportedModel), match="use lrp"):
        Explainer(cross("bert"), name).explain(QUERY, DOCUMENTS[0])


def test_other_models_are_refused() -> None:
    with pytest.raises(InvalidInput, match="reads each text by itself, and gives no logit: use bilrp"):
        Explainer(tiny("bert"), "lrp")
    with pytest.raises(InvalidInput, match="gives one number, the cosine: leave out the label"):
        Explainer(tiny("bert"), label=1)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"cut": 0}, "cut must be between 1 and 2 for this model, not 0"),
        ({"cut": 3}, "cut must be between 1 and 2 for this model, not 3"),
        ({"cut": "2"}, "cut must be a whole number"),
        ({"layer": 1}, "lrp has no layer to choose"),
        ({"rules": "deeplift"}, "rules must be one of lrp, attnlrp"),
        ({"biases": "apart"}, "its options are: rules, cut, max_bytes"),
        ({"method": "gradient-input", "rules": "lrp"}, "its options are: cut, max_bytes"),
    ],
    ids=str,
)
def test_options_that_it_does_not_have_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        Explainer(cross("bert"), **options)


def test_what_needs_a_half_of_its_own_for_each_text_is_refused() -> None:
    explainer = Explainer(cross("bert"))
    refused = [
        (lambda: explainer.precompute(DOCUMENTS, progress=False), "there is nothing to precompute"),
        (lambda: explainer.factor(DOCUMENTS), "explains pairs of texts: it has no factors"),
        (lambda: explainer.factor(DOCUMENTS, unit="word"), "explains pairs of texts: it has no factors"),
        (lambda: explainer.subspaces(QUERY, DOCUMENTS[0], {"a": slice(0, 4)}), "is not a product of factors"),
        (lambda: explainer.evidence(QUERY, DOCUMENTS[0]), "has no vectors of tokens to be compared"),
        (lambda: explainer.query_vector(QUERY), "gives no vector per text"),
        (lambda: explainer.document_vectors(DOCUMENTS), "gives no vector per text"),
        (lambda: explainer.plan(DOCUMENTS), "sends no texts to be embedded"),
    ]
    for ask, reason in refused:
        with pytest.raises(InvalidInput, match=reason):
            ask()


def test_contrast_and_compare_are_of_logits() -> None:
    explainer = Explainer(cross("bert"))
    contrast = explainer.contrast(QUERY, *DOCUMENTS[:2])
    assert contrast.difference == pytest.approx(contrast.got.score - contrast.wanted.score)
    compared = explainer.compare(QUERY, DOCUMENTS[0])
    assert [one.method for one in compared.rows] == ["lrp", "gradient-input"]
    assert all(one.explanation is not None for one in compared.rows)
    labels = Explainer(cross("bert", LABELS), label=0)
    pairs = labels.compare(QUERY, DOCUMENTS[0], [{"method": "lrp", "label": f"label {n}"} for n in range(LABELS)])
    assert len({round(one.explanation.score, 4) for one in pairs.rows if one.explanation}) == LABELS


class Aside(nn.Module):
    """Something that is read of the tokens past all blocks."""

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        features["scores"] = features["scores"] + features["input_ids"].sum(dim=1, keepdim=True) / 100
        return features


class Unknown(nn.Module):
    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        features["scores"] = torch.erfinv(torch.tanh(features["scores"] / 10))
        return features


@pytest.mark.parametrize(
    ("module", "reason"), [(Aside, "reaches the embedding past the input of block 0"), (Unknown, "aten.erfinv")]
)
def test_a_model_that_cannot_be_split_is_refused_when_the_explainer_is_made(
    module: type[nn.Module], reason: str
) -> None:
    model = cross("bert")
    with pytest.raises(UnsupportedModel, match=reason):
        Explainer(CrossEncoder(modules=[model[0], module()], device="cpu").to(torch.float64))


def test_a_sum_that_misses_the_logit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from rag_explain.linear.affine_map import AffineMap

    monkeypatch.setattr(AffineMap, "rest", lambda self, cotangents: cotangents.new_ones(cotangents.shape[:2]))
    with pytest.raises(CheckFailed, match=r"miss the logit of .* by .*%"):
        Explainer(cross("bert"))


def test_a_model_of_one_block_is_refused() -> None:
    model = cross("bert")
    model[0].auto_model.bert.encoder.layer = model[0].auto_model.bert.encoder.layer[:1]
    model[0].auto_model.config.num_hidden_layers = 1
    with pytest.raises(UnsupportedModel, match="has one block, and pairs are formed between two"):
        Explainer(model)


def test_an_explanation_is_written_and_read_with_what_the_model_returned() -> None:
    explanation = Explainer(cross("bert")).explain(QUERY, DOCUMENTS[0])
    read = Explanation.from_json(explanation.to_json())
    assert read.returned == explanation.returned
    assert read.to_dict() == explanation.to_dict()
    assert "the model returned" in str(explanation)
    assert f"logit {explanation.score:.4f}" in " ".join(str(explanation).split())
