"""Every kind of scorer and every question that can be asked of it: the CPU's numbers, one transfer out per batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rag_explain import Explainer, Explanation
from tests.support import device
from tests.support.cross_encoders import HEADS, cross
from tests.support.device.__main__ import DOCUMENTS, QUERIES
from tests.support.models import CORPUS, TEXTS, colbert, routed, splade, static, tiny

QUERY = "Where did the cat look?"
KINDS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    **{f"cross-encoder {name}": (lambda name=name: cross(name), {}) for name in HEADS},
    "cross-encoder attnlrp": (cross, {"rules": "attnlrp"}),
    "cross-encoder cut": (cross, {"cut": 1}),
    "cross-encoder gradient": (cross, {"method": "gradient-input"}),
    **{f"sparse {name}": (splade, {"method": name}) for name in ("terms", "bilrp", "hxp", "occlusion")},
    "sparse, queries by a table": (lambda: splade(free=True), {}),
    "two towers": (lambda: routed(tiny(), tiny(pooling="cls")), {}),
    "static": (static, {}),
    "late interaction": (colbert, {}),
    "attnlrp": (tiny, {"rules": "attnlrp"}),
    "biases apart": (tiny, {"biases": "apart"}),
    "one tangent at a time": (tiny, {"max_bytes": 1}),
    **{f"ij from {name}": (tiny, {"method": "ij", "reference": name}) for name in ("mask", "zero", "mean")},
    "ij-exact": (tiny, {"method": "ij-exact"}),
    "hxp": (tiny, {"method": "hxp"}),
    "occlusion": (tiny, {"method": "occlusion"}),
    "shapley": (tiny, {"method": "shapley"}),
    "gradients along a path": (tiny, {"method": "integrated-gradients"}),
}


def asked(explainer: Explainer) -> dict[str, Any]:
    """Every question that is asked of the scorer; numbers and names alone."""
    method, scorer = explainer.method, explainer.scorer
    unit = "sentence" if method.edits else "word"
    answers: dict[str, Any] = {}

    def matrices(name: str, explanations: list[Explanation]) -> None:
        answers[name] = [(one.matrix, one.score, one.returned) for one in explanations]

    if not method.edits:
        matrices("by token", explainer.explain_many(QUERY, TEXTS))
    for turn in ("cold", "again"):
        matrices(turn, explained := explainer.explain_many(QUERY, CORPUS, unit=unit))
    answers["highlights"] = [[span.value for span in one.spans] for one in explainer.highlight_many(QUERY, CORPUS)]
    if not method.edits:
        answers["links"] = [
            [(link.query.text, link.document.text, link.value) for link in one.links()] for one in explained
        ]
        answers["contrast"] = [
            (word.query, word.wanted, word.got) for word in explainer.contrast(QUERY, *TEXTS).query_words()
        ]
    answers["what if"] = [(one.text, one.score) for one in explainer.what_if(QUERY, CORPUS[3]).changes]
    answers["score"] = scorer.score(QUERY, CORPUS)
    if method.linear:
        x_ray = explainer.x_ray(CORPUS[3])
        answers["x-ray"] = [span.value for span in (*x_ray.words, *x_ray.sentences)], x_ray.special, x_ray.rest
        matrices("subspaces", list(explainer.subspaces(QUERY, TEXTS[0], {"some": (0, 4)}).values()))
    return answers


def off(one: Any, other: Any) -> float:
    """The largest difference of two answers, of which all names are the same."""
    if isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        return max((off(*both) for both in zip(one, other, strict=True)), default=0.0)
    if isinstance(one, (np.ndarray, float, np.floating)):
        return float(np.abs(np.asarray(one) - other).max(initial=0) / max(1.0, np.abs(one).max(initial=0)))
    assert one == other
    return 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_every_question_has_the_cpus_answer(toy: str, kind: str) -> None:
    make, options = KINDS[kind]
    model = make()
    here, there = asked(Explainer(model, **options)), asked(Explainer(copy.deepcopy(model).to(toy), **options))
    assert here.keys() == there.keys()
    for question, answer in here.items():
        assert off(answer, there[question]) <= 1e-6, question


def test_a_comparison_and_evidence_in_windows(toy: str) -> None:
    model = tiny()
    long = " ".join(f"{text.capitalize()}." for text in CORPUS * 6)
    one, other = (Explainer(copy.deepcopy(model).to(name)) for name in ("cpu", toy))
    found = [explainer.evidence(QUERY, long) for explainer in (one, other)]
    assert "overlapping windows" in " ".join(notice.text for notice in found[1].notices)
    assert off(*([span.value for span in evidence.spans] for evidence in found)) <= 1e-6
    rows = [explainer.compare(QUERY, TEXTS[0]).rows for explainer in (one, other)]
    for here, there in zip(*rows, strict=True):
        assert (here.method, here.reason) == (there.method, there.reason)
        assert off(here.explanation.matrix, there.explanation.matrix) <= 1e-6


# What ten unseen documents take: tensors in and out. A batch has two features (a cross-encoder's three), which follow
# its groups and their index where something is pushed; the query is a batch of its own, but in a pair.
CROSSED: dict[str, tuple[Callable[[], Any], dict[str, Any], tuple[int, int]]] = {
    "hxp": (tiny, {"method": "hxp"}, (2 + 1 + 2 + 1, 2)),
    "pooled": (tiny, {"method": "pooled"}, (2 + 1 + 2 + 1, 2)),
    "alignment": (tiny, {"method": "alignment"}, (2 + 2, 2)),
    "embeddings": (tiny, {"method": "embeddings"}, (2 + 2, 2)),
    "gradient": (tiny, {"method": "gradient"}, (2 + 2 + 1, 2)),
    "bti": (tiny, {"method": "bti"}, (2 * (2 + 2 + 1), 1)),
    "cross-encoder": (cross, {}, (3 + 2 + 1, 1)),
    "sparse bilrp": (splade, {"method": "bilrp"}, (2 + 2 + 2 + 1, 2)),
}


@pytest.mark.parametrize("kind", CROSSED)
def test_one_batch_of_documents_comes_back_at_once(toy: str, kind: str) -> None:
    make, options, counts = CROSSED[kind]
    explainer = Explainer(make().to(torch.float32).to(toy), **options)
    with device.watched() as seen:
        explainer.explain_many(QUERIES[0], DOCUMENTS)
    assert (seen["in"], seen["out"]) == counts, seen.at("in", "out")
    assert seen["size"] == seen["across"] == 0
    assert all("the model's own" in line for line in seen.at("scalar"))


@pytest.mark.parametrize("ask", ["evidence", "highlights of pairs", "scores of pairs", "vectors"])
def test_what_needs_no_pairs_comes_back_at_once(toy: str, ask: str) -> None:
    model = cross if "pairs" in ask else tiny
    explainer = Explainer(model().to(torch.float32).to(toy))
    asked: dict[str, Callable[[], object]] = {
        "evidence": lambda: explainer.evidence_many(QUERY, DOCUMENTS),
        "highlights of pairs": lambda: explainer.highlight_many(QUERY, DOCUMENTS),
        "scores of pairs": lambda: explainer.scorer.score(QUERY, DOCUMENTS),
        "vectors": lambda: explainer.scorer.embed(DOCUMENTS, "document"),
    }
    with device.watched() as seen:
        asked[ask]()
    assert (seen["out"], seen["size"]) == (1, 0), seen.at("out", "size")
    assert all("the model's own" in line for line in seen.at("scalar"))
