from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rag_explain import Explainer
from rag_explain.errors import InvalidInput, UnsupportedModel
from rag_explain.methods import METHODS
from tests.support.models import OF_OTHERS, TEXTS, model_for, tiny

QUERY, DOCUMENT = TEXTS
DOCS = Path(__file__).parents[2] / "docs" / "methods.md"


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_explains_and_says_whether_it_adds_up(name: str) -> None:
    explainer = Explainer(model_for(name), name)
    explanation = explainer.explain(QUERY, DOCUMENT)
    assert explanation.method == name
    assert (explanation.gap is None) == (not explainer.method.additive)
    if explainer.method.additive:
        assert abs(explanation.gap or 0.0) < 3e-3
    assert explanation.settings == explainer.method.settings


SYMMETRIC = ("bilrp", "hxp", "ij", "ij-exact", "pooled", "bti", "embeddings", "gradient", "integrated-gradients")


@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in SYMMETRIC), ("alignment", {"score": "f1"})])
def test_texts_that_change_places_turn_the_matrix_over(name: str, options: dict[str, Any]) -> None:
    explainer = Explainer(tiny("bert"), name, **options)
    for query, document in ((QUERY, DOCUMENT), ("cat", DOCUMENT), ("the the the the", "the")):
        one, other = explainer.explain(query, document), explainer.explain(document, query)
        assert one.score == pytest.approx(other.score, abs=1e-6)
        np.testing.assert_allclose(one.matrix, other.matrix.T, atol=2e-5)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_is_in_the_docs(name: str) -> None:
    assert f"`{name}`" in DOCS.read_text(encoding="utf-8")


def test_an_unknown_method_or_option_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidInput, match="choose one of alignment, bilrp"):
        Explainer(tiny("bert"), "shap")
    with pytest.raises(InvalidInput, match="its options are: rules, "):
        Explainer(tiny("bert"), "bilrp", ruels="lrp")


def install(folder: Path, source: str, target: str = "lengths:Lengths") -> None:
    """A package with one entry point, as pip would leave it behind."""
    (folder / "lengths.py").write_text(source, encoding="utf-8")
    about = folder / "lengths-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: lengths\nVersion: 1.0\n", encoding="utf-8")
    (about / "entry_points.txt").write_text(f"[rag_explain.methods]\nlengths = {target}\n", encoding="utf-8")


def documented_example() -> str:
    """The example of docs/methods.md, as it stands there."""
    return DOCS.read_text(encoding="utf-8").split("# lengths.py\n")[1].split("```")[0]


def test_the_documented_example_of_a_third_party_method_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = documented_example()
    assert len(source.strip().splitlines()) <= 24
    install(tmp_path, source)
    monkeypatch.syspath_prepend(str(tmp_path))
    explanation = Explainer(tiny("bert"), "lengths").explain(QUERY, DOCUMENT)
    assert explanation.method == "lengths"
    assert abs(explanation.gap or 0.0) < 1e-5
    with pytest.raises(InvalidInput, match="lengths"):
        Explainer(tiny("bert"), "shap")


@pytest.mark.parametrize(
    ("source", "reason"),
    [("import nothing_of_that_name", "could not be loaded"), ("Lengths = 3", "no subclass of")],
)
def test_a_broken_third_party_method_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, reason: str
) -> None:
    install(tmp_path, source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "lengths", raising=False)
    with pytest.raises(InvalidInput, match=reason):
        Explainer(tiny("bert"), "lengths")


def test_importing_the_library_does_not_import_torch() -> None:
    code = "import sys, rag_explain; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class Unknown(nn.Module):
    """An operation that has no rule, after the pooling."""

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        features["sentence_embedding"] = torch.erfinv(torch.tanh(features["sentence_embedding"] / 10))
        return features


@pytest.mark.parametrize("name", sorted({*METHODS}.difference(OF_OTHERS)))  # which refuse by themselves
def test_a_method_that_cannot_explain_a_model_refuses_when_it_is_made(name: str) -> None:
    model = tiny("bert", after=lambda: [Unknown()])
    try:
        explainer = Explainer(model, name)
    except UnsupportedModel as error:
        assert "aten.erfinv" in str(error)  # noqa: PT017  # which methods refuse is the question
    else:
        explainer.explain(QUERY, DOCUMENT)
        # They do not follow the model to its embedding, or do not look inside.
        assert name in ("alignment", "bti", "embeddings", "occlusion", "random", "shapley")
