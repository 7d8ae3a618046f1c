"""Learned sparse encoders: each weight belongs to the token that won it, and each word says how two texts met."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Router
from sentence_transformers.base.modules.transformer import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from sentence_transformers.sparse_encoder.modules import SparseAutoEncoder, SpladePooling
from torch import nn

from rag_explain import Explainer, Explanation
from rag_explain.errors import InvalidInput, ModelChanged, UnsupportedModel
from tests.support import references_sparse as oracle
from tests.support.models import TEXTS, folder, splade
from tests.support.references import lrp_rows

QUERY, DOCUMENT = TEXTS
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"pooling": "sum"},
    {"activation": "log1p_relu"},
    {"pooling": "sum", "activation": "log1p_relu"},
    {"name": "distilbert"},
    {"name": "roberta"},
)
kinds = pytest.mark.parametrize("kind", KINDS, ids=str)


def own_score(model: SparseEncoder, query: str, document: str) -> float:
    """By the model's own public functions, without the single precision of its `similarity`."""
    left = model.encode_query([query], convert_to_sparse_tensor=False)[0].double()
    right = model.encode_document([document], convert_to_sparse_tensor=False)[0].double()
    norm = left.norm() * right.norm() if model.similarity_fn_name == "cosine" else 1.0
    return float(left @ right / norm)


def adds_up(explanation: Explanation, score: float) -> bool:
    return abs(explanation.score - score) <= 1e-9 * abs(score) and abs(explanation.gap or 0.0) <= 1e-9 * abs(score)


@kinds
def test_the_cells_are_what_the_equations_say(kind: dict[str, Any]) -> None:
    model = splade(**kind)
    explanation = Explainer(model).explain(QUERY, DOCUMENT)
    wanted = oracle.cells(oracle.parts(model, QUERY), oracle.parts(model, DOCUMENT))
    np.testing.assert_allclose(explanation.pairs, wanted, rtol=1e-6, atol=1e-6)
    assert not explanation.matrix[-1, :-1].any()
    assert not explanation.matrix[:-1, -1].any()
    assert adds_up(explanation, own_score(model, QUERY, DOCUMENT))
    assert (explanation.method, explanation.measure) == ("terms", "dot")


@kinds
def test_each_word_of_the_vocabulary_says_how_the_texts_met(kind: dict[str, Any]) -> None:
    model = splade(**kind)
    explanation = Explainer(model).explain(QUERY, DOCUMENT)
    left, right = (oracle.parts(model, text).sum(axis=0) for text in (QUERY, DOCUMENT))
    shared = np.flatnonzero(left * right)
    assert len(explanation.terms) == len(shared)
    assert sum(term.value for term in explanation.terms) == pytest.approx(explanation.score, rel=1e-9)
    tokenizer = model[0].tokenizer
    for term, word in zip(explanation.terms, shared, strict=True):
        assert term.text == (tokenizer.decode([int(word)]).strip() or tokenizer.convert_ids_to_tokens(int(word)))
        assert term.value == pytest.approx(left[word] * right[word], rel=1e-9)
        assert term.numbers["query weight"] == pytest.approx(left[word], rel=1e-9)
        assert term.numbers["document weight"] == pytest.approx(right[word], rel=1e-9)
        if kind.get("pooling", "max") == "max":
            assert len(term.query) == len(term.document) == 1


def test_the_word_in_which_two_others_met_is_named() -> None:
    model = splade()
    explanation = Explainer(model).explain(QUERY, DOCUMENT)
    best = max(explanation.terms, key=lambda term: term.value)
    word = model[0].tokenizer.convert_tokens_to_ids(best.text)
    rows, columns = (oracle.parts(model, text)[:, word].argmax() for text in (QUERY, DOCUMENT))
    assert best.query == (explanation.query_tokens[rows].label,)
    assert best.document == (explanation.document_tokens[columns].label,)
    for shown in (str(explanation), explanation.to_html(), explanation._repr_html_()):
        assert best.text in shown
        assert "document weight" in shown
    assert f"20 of {len(explanation.terms)} terms" in explanation.to_html()
    assert Explanation.from_json(explanation.to_json()).terms == explanation.terms


def test_cosines_and_cut_weights_are_split_as_they_are_scored() -> None:
    for settings in ({"similarity_fn_name": "cosine"}, {"max_active_dims": 20}):
        model = splade(**settings)
        explanation = Explainer(model).explain(QUERY, DOCUMENT)
        assert adds_up(explanation, own_score(model, QUERY, DOCUMENT))
    assert len(explanation.terms) <= 20
    with pytest.raises(InvalidInput, match=r"max_active_dims.*use terms, occlusion"):
        Explainer(splade(max_active_dims=20), "bilrp")


@pytest.mark.parametrize("kind", KINDS[:5], ids=str)
def test_input_tokens_are_followed_to_the_weights_by_the_rules(kind: dict[str, Any]) -> None:
    model = splade(**kind)
    explainer = Explainer(model, "bilrp", biases="apart")
    ruled = SparseEncoder(modules=[copy.deepcopy(model[0]), oracle.RuledPooling(model[1])], device="cpu")
    if kind.get("name") == "distilbert":  # its blocks stand one level lower here
        ruled[0].auto_model.transformer = ruled[0].auto_model.distilbert.transformer
    rows = []
    for text, role in ((QUERY, "query"), (DOCUMENT, "document")):
        features = model.preprocess([text])
        wanted = lrp_rows(ruled, features, 0, gated=False)[0].numpy()
        (factors,) = explainer.factor([text], role)  # type: ignore[arg-type]  # a role
        scale = np.abs(wanted).max()
        np.testing.assert_allclose(factors.rows, wanted, rtol=1e-5, atol=1e-5 * scale)
        assert factors.error < 1e-6
        rows.append(wanted)
    explanation = explainer.explain(QUERY, DOCUMENT)
    wanted = rows[0] @ rows[1].T
    np.testing.assert_allclose(explanation.pairs, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())
    assert explanation.score == pytest.approx(own_score(model, QUERY, DOCUMENT), rel=1e-6)
    assert abs(explanation.gap or 0.0) < 1e-5 * np.abs(explanation.matrix).sum()


@pytest.mark.parametrize("method", ["bilrp", "hxp", "occlusion"])
@kinds
def test_what_goes_through_the_model_adds_up_to_the_same_score(kind: dict[str, Any], method: str) -> None:
    model = splade(**kind)
    explainer = Explainer(model, method)
    own = own_score(model, QUERY, DOCUMENT)
    for query in (QUERY, "The moon looked at the cat.", "At moon the cat the looked."):  # of one length
        explanation = explainer.explain(query, DOCUMENT)
        own = own_score(model, query, DOCUMENT)
        assert explanation.score == pytest.approx(own, rel=1e-5)
        assert abs(explanation.gap or 0.0) < 1e-4 * abs(own)
    highlights = explainer.highlight(QUERY, DOCUMENT)
    assert sum(span.value for span in highlights) + highlights.unattributed == pytest.approx(highlights.score, rel=1e-5)


def test_queries_without_a_model_share_a_word_among_its_tokens() -> None:
    model = splade(free=True)
    query = "the cat looked at the moon, the cat"
    explanation = Explainer(model).explain(query, DOCUMENT)
    documents = SparseEncoder(modules=list(model[0].sub_modules["document"]), device="cpu")
    wanted = oracle.cells(oracle.table_parts(model, query), oracle.parts(documents, DOCUMENT))
    np.testing.assert_allclose(explanation.pairs, wanted, rtol=1e-6, atol=1e-7)
    assert adds_up(explanation, own_score(model, query, DOCUMENT))
    assert all(token.part == "text" for token in explanation.query_tokens)
    assert Explainer(model).explain("", DOCUMENT).score == 0.0
    with pytest.raises(InvalidInput, match="reads queries by a table"):
        Explainer(model, "bilrp")


def test_a_table_that_is_written_to_is_another_model() -> None:
    model = splade(free=True)
    explainer = Explainer(model)
    before = explainer.explain(QUERY, DOCUMENT)
    with torch.no_grad():
        model[0].sub_modules["query"][0].weight.mul_(2)
    after = explainer.explain(QUERY, DOCUMENT)
    assert after.score == pytest.approx(2 * before.score)
    assert after.fingerprint != before.fingerprint


def _sum(model: Any) -> None:
    model[1].pooling_strategy = "sum"


def _fewer(model: Any) -> None:
    model.max_active_dims = 5


def _other_table(model: Any) -> None:
    model[0].sub_modules["query"][0] = splade(free=True)[0].sub_modules["query"][0]


def _other_pooling(model: Any) -> None:
    model[0].sub_modules["document"][1] = SpladePooling("sum")


def _prompts(model: Any) -> None:
    model.prompts = {"query": "query: "}


@pytest.mark.parametrize(
    ("free", "change"),
    [
        *((False, change) for change in (_sum, _fewer, _prompts)),
        *((True, change) for change in (_other_table, _other_pooling, _fewer, _prompts)),
    ],
)
def test_a_sparse_model_that_changes_is_noticed(free: bool, change: Any) -> None:
    model = splade(free=free)
    explainer = Explainer(model)
    explainer.explain(QUERY, DOCUMENT)
    change(model)
    with pytest.raises(ModelChanged):
        explainer.explain(QUERY, DOCUMENT)


def test_a_prompt_wins_weights_like_any_token() -> None:
    for free in (False, True):
        model = splade(free=free, prompts={"query": "the moon: ", "document": "a dog "})
        explanation = Explainer(model).explain(QUERY, DOCUMENT)
        assert "prompt" in {token.part for token in explanation.query_tokens}
        assert adds_up(explanation, own_score(model, QUERY, DOCUMENT))


class Doubled(nn.Module):
    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        features["sentence_embedding"] = features["sentence_embedding"] * 2
        return features


def test_what_has_no_words_as_dimensions_is_refused_in_words() -> None:
    first = splade()[0]
    latent = [Transformer(str(folder("bert"))), Pooling(16), SparseAutoEncoder(16, 32, k=4)]
    with pytest.raises(UnsupportedModel, match="Pooling and SparseAutoEncoder: a sparse encoder is explained where"):
        Explainer(SparseEncoder(modules=latent, device="cpu"))
    with pytest.raises(UnsupportedModel, match="SpladePooling and Doubled"):
        Explainer(SparseEncoder(modules=[first, SpladePooling(), Doubled()], device="cpu"))
    towers = Router.for_query_document([splade()[0], SpladePooling()], [first, SpladePooling()])
    with pytest.raises(UnsupportedModel, match="queries of this model are read by Transformer"):
        Explainer(SparseEncoder(modules=[towers], device="cpu"))


def test_the_verbs_say_what_they_can() -> None:
    explainer = Explainer(splade())
    for call, words in (
        (lambda: explainer.evidence(QUERY, DOCUMENT), 'unit="sentence"'),
        (lambda: explainer.precompute([DOCUMENT]), "nothing to precompute"),
    ):
        with pytest.raises(InvalidInput, match=words):
            call()
    assert [row.method for row in explainer.compare(QUERY, DOCUMENT).rows] == ["terms", "bilrp", "hxp", "occlusion"]
    scores = [explainer.explain(QUERY, text).score for text in (DOCUMENT, QUERY)]
    contrast = explainer.contrast(QUERY, DOCUMENT, QUERY)
    assert contrast.difference == pytest.approx(scores[1] - scores[0])
    sentences = explainer.explain(QUERY, f"{DOCUMENT} The moon.", unit="sentence")
    assert sentences.pairs.shape[1] == 2
    many = explainer.explain_many(QUERY, [DOCUMENT, QUERY, "The moon."])
    assert [one.document for one in many] == [DOCUMENT, QUERY, "The moon."]


def test_factors_of_documents_are_kept_as_of_any_encoder(tmp_path: Path) -> None:
    explainer = Explainer(splade(), "bilrp", store=tmp_path)
    cold = explainer.explain(QUERY, DOCUMENT)
    assert explainer.precompute([DOCUMENT], unit="token", progress=False).built == 1
    warm = explainer.explain(QUERY, DOCUMENT)
    assert warm.provenance["path"] == "memory"
    np.testing.assert_allclose(warm.matrix, cold.matrix, rtol=5e-3, atol=5e-3 * np.abs(cold.matrix).max())


def test_a_sparse_model_is_loaded_by_its_folder(tmp_path: Path) -> None:
    model = splade().float()
    model.save(str(tmp_path))
    explanation = Explainer(str(tmp_path)).explain(QUERY, DOCUMENT)
    assert explanation.score == pytest.approx(own_score(model, QUERY, DOCUMENT), rel=1e-5)
    assert explanation.method == "terms"
    long = "the cat looked at the old bridge " * 40
    assert Explainer(str(tmp_path)).explain(QUERY, long).truncated == ("document",)
