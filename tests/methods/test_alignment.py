from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rag_explain import Explainer
from rag_explain.errors import InvalidInput, MissingExtra, UnsupportedModel
from rag_explain.methods.alignment import align, scores
from rag_explain.results.notices import UNKNOWN
from tests.support.models import TEXTS, colbert, tiny

QUERY, DOCUMENT = TEXTS
DOCUMENTS = [DOCUMENT, "The moon.", "Words, words; words!"]


def greedy(cosines: NDArray[np.float64]) -> dict[str, float]:
    """MaxSim and BERTScore from their equations, cell by cell."""
    n_q, n_d = cosines.shape
    best_for_query = [max(cosines[i, j] for j in range(n_d)) for i in range(n_q)]
    best_for_document = [max(cosines[i, j] for i in range(n_q)) for j in range(n_d)]
    recall, precision = sum(best_for_query) / n_q, sum(best_for_document) / n_d
    f1 = 2 * precision * recall / (precision + recall)
    return {"maxsim": sum(best_for_query), "recall": recall, "precision": precision, "f1": f1}


EXPANSIONS: list[dict[str, Any] | None] = [
    None,
    {"strategy": "fixed", "length": 20},
    {"strategy": "fixed", "length": 20, "attend": True},
    {"strategy": "min", "length": 24},
]


@pytest.mark.parametrize("expansion", EXPANSIONS)
def test_a_multivector_encoder_says_what_it_could_not_read(expansion: dict[str, Any] | None) -> None:
    with Explainer(colbert(expansion=expansion)) as explainer:
        found = [explainer.explain("the 🐝", f"🚗 {DOCUMENT}") for _ in range(3)]
    for explanation in found:
        assert [(notice.code, notice.side) for notice in explanation.notices] == [
            (UNKNOWN, "query"),
            (UNKNOWN, "document"),
        ]
        assert explanation.notices[0].text.startswith("1 of 2 words of the query")


@pytest.mark.parametrize("expansion", EXPANSIONS)
@pytest.mark.parametrize("similarity", ["maxsim", "meanmaxsim"])
def test_the_score_of_a_multivector_encoder_is_its_own(expansion: dict[str, Any] | None, similarity: str) -> None:
    model = colbert(expansion=expansion, similarity_fn_name=similarity)
    explainer = Explainer(model)
    assert explainer.method.name == "alignment"
    wanted = model.similarity(model.encode_query([QUERY]), model.encode_document(DOCUMENTS))[0]
    explanations = explainer.explain_many(QUERY, DOCUMENTS)
    for explanation, score in zip(explanations, wanted, strict=True):
        assert explanation.score == pytest.approx(float(score), rel=1e-5)
        assert abs(explanation.gap or 0.0) < 1e-5
        assert explanation.surrogate is None
        # Every query token that is scored has exactly one match.
        assert set(np.count_nonzero(explanation.pairs, axis=1)) <= {0, 1}


@pytest.mark.parametrize("architecture", ["bert", "roberta", "modernbert"])
def test_matches_are_the_best_of_the_model_s_own_vectors(architecture: str) -> None:
    model = colbert(architecture, prompts={"query": "", "document": ""})
    explanation = Explainer(model).explain(QUERY, DOCUMENT)
    left, right = model.encode_query(QUERY), model.encode_document(DOCUMENT)
    wanted = (left @ right.T).cpu().numpy()
    assert explanation.similarities is not None
    kept = explanation.similarities[:, explanation.similarities.any(axis=0)]
    np.testing.assert_allclose(kept, wanted, atol=1e-6)
    assert explanation.score == pytest.approx(greedy(wanted)["maxsim"], rel=1e-5)


def test_skipped_punctuation_carries_nothing() -> None:
    explanation = Explainer(colbert()).explain(QUERY, DOCUMENT)
    skipped = [j for j, token in enumerate(explanation.document_tokens) if token.text in (",", "!")]
    assert skipped
    assert not explanation.pairs[:, skipped].any()


def test_expansion_tokens_are_named_and_count() -> None:
    explanation = Explainer(colbert(expansion={"strategy": "min", "length": 24})).explain(QUERY, DOCUMENT)
    assert len(explanation.query_tokens) == 24
    assert explanation.query_tokens[-1].part == "special"
    assert explanation.query_tokens[-1].piece == "[MASK]"
    assert explanation.pairs[-1].any()
    words = explanation.by_word()
    assert words.score == explanation.score


@pytest.mark.parametrize("architecture", ["bert", "roberta", "qwen3"])
@pytest.mark.parametrize("kind", ["maxsim", "recall", "precision", "f1"])
def test_a_bi_encoder_s_last_layer_is_aligned(architecture: str, kind: Any) -> None:
    model = tiny(architecture)
    explanation = Explainer(model, "alignment", score=kind).explain(QUERY, DOCUMENT)
    output = [model.encode(text, output_value="token_embeddings") for text in (QUERY, DOCUMENT)]
    left, right = (torch.nn.functional.normalize(vectors[1:-1], dim=-1).double() for vectors in output)
    wanted = (left @ right.T).cpu().numpy()
    words = [i for i, token in enumerate(explanation.query_tokens) if token.part == "text"]
    assert explanation.similarities is not None
    found = explanation.similarities[words][:, explanation.similarities.any(axis=0)]
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert explanation.score == pytest.approx(greedy(wanted)[kind], rel=1e-4)
    assert abs(explanation.gap or 0.0) < 1e-5
    assert "not how this encoder scores" in (explanation.surrogate or "")
    assert dict(explanation.references or {}) == pytest.approx(greedy(wanted), rel=1e-4)


def test_every_score_is_the_sum_of_its_matrix() -> None:
    cosines = np.random.default_rng(0).uniform(-1, 1, (4, 7))
    for kind, value in greedy(cosines).items():
        assert align(cosines, kind).sum() == pytest.approx(value)  # type: ignore[arg-type]
    assert scores(cosines) == pytest.approx(greedy(cosines))


def test_transport_moves_all_of_both_texts_at_the_least_cost() -> None:
    from scipy.optimize import linprog

    cosines = np.random.default_rng(1).uniform(-1, 1, (3, 4))
    # The transport problem as the linear program that it is.
    rows = np.kron(np.eye(3), np.ones(4))
    columns = np.kron(np.ones(3), np.eye(4))
    program = linprog(
        (1 - cosines).ravel(),
        A_eq=np.vstack([rows, columns]),
        b_eq=np.concatenate([np.full(3, 1 / 3), np.full(4, 1 / 4)]),
    )
    assert align(cosines, "transport").sum() == pytest.approx(1 - program.fun)
    explanation = Explainer(tiny("bert"), "alignment", score="transport").explain(QUERY, DOCUMENT)
    assert abs(explanation.gap or 0.0) < 1e-6


def test_transport_needs_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ot", None)
    with pytest.raises(MissingExtra, match=r"rag-explain\[ot\]"):
        Explainer(tiny("bert"), "alignment", score="transport")


def test_factors_are_kept_like_any_others() -> None:
    explainer = Explainer(tiny("bert"), "alignment")
    (half,), documents = explainer.factor([QUERY], "query"), explainer.factor(DOCUMENTS)
    for document, explanation in zip(documents, explainer.explain_many(QUERY, DOCUMENTS), strict=True):
        np.testing.assert_allclose(explainer.method.pair(half, document).matrix, explanation.matrix, atol=1e-6)


def test_other_methods_refuse_a_multivector_encoder() -> None:
    with pytest.raises(InvalidInput, match="one vector per token"):
        Explainer(colbert(), "bilrp")
    explainer = Explainer(colbert())
    with pytest.raises(InvalidInput, match="use alignment"):
        _ = explainer.scorer.encoder


def test_merged_token_vectors_are_refused() -> None:
    from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling

    model = colbert()
    model.append(HierarchicalTokenPooling(pool_factor=2))
    with pytest.raises(UnsupportedModel, match="token pooling"):
        Explainer(model).explain(QUERY, DOCUMENT)


def test_a_saved_multivector_encoder_is_found_by_its_folder(tmp_path: Path) -> None:
    model = colbert()
    model.save_pretrained(str(tmp_path))
    explainer = Explainer(str(tmp_path))
    assert explainer.scorer.methods == ("alignment",)
    wanted = float(model.similarity(model.encode_query([QUERY]), model.encode_document([DOCUMENT]))[0, 0])
    assert explainer.explain(QUERY, DOCUMENT).score == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("options", [{"layer": 1}, {"score": "best"}])
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        Explainer(tiny("bert"), "alignment", **options)


@pytest.mark.slow
def test_on_the_real_encoder_words_meet_their_like() -> None:
    explainer = Explainer("all-MiniLM-L6-v2", "alignment", score="f1")
    explanation = explainer.explain("a dog runs in the park", "The small dog is running over the green grass.")
    best = {(pair.query.text, pair.document.text) for pair in explanation.top_pairs(3)}
    assert ("dog", "dog") in best
    assert ("runs", "running") in best
