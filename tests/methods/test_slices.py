from __future__ import annotations

import numpy as np
import pytest

from rag_explain import Explainer
from rag_explain.errors import InvalidInput
from rag_explain.methods.slices import OTHER
from tests.support.models import TEXTS, tiny

QUERY, DOCUMENT = TEXTS


@pytest.mark.parametrize("method", ["bilrp", "hxp", "ij", "ij-exact", "pooled"])
@pytest.mark.parametrize("architecture", ["bert", "roberta", "qwen3"])
def test_slices_sum_to_the_whole(method: str, architecture: str) -> None:
    explainer = Explainer(tiny(architecture), method)
    parts = explainer.subspaces(QUERY, DOCUMENT, {"entities": (0, 4), "negation": slice(4, 10, 2)})
    assert list(parts) == ["entities", "negation", OTHER]
    whole = explainer.method.pair(explainer.factor([QUERY], "query")[0], explainer.factor([DOCUMENT])[0])
    np.testing.assert_allclose(sum(part.matrix for part in parts.values()), whole.matrix, atol=1e-6)
    assert sum(part.score for part in parts.values()) == pytest.approx(whole.score, abs=1e-6)
    for name, part in parts.items():
        assert part.provenance["subspace"] == name


def test_a_slice_is_its_own_dimensions_part_of_the_score() -> None:
    model = tiny("bert")
    a, b = model.encode([QUERY, DOCUMENT])
    part = Explainer(model).subspaces(QUERY, DOCUMENT, {"first": (0, 3)})["first"]
    wanted = float(a[:3] @ b[:3]) / np.linalg.norm(a) / np.linalg.norm(b)
    assert part.score == pytest.approx(wanted, abs=1e-6)
    assert abs(part.gap or 0.0) < 1e-5


@pytest.mark.parametrize(
    "slices", [{}, {"a": (0, 99)}, {"a": (3, 3)}, {"a": (0, 4), "b": (3, 6)}, {"a": slice(40, 50)}]
)
def test_slices_are_checked(slices: dict[str, slice | tuple[int, int]]) -> None:
    with pytest.raises(InvalidInput):
        Explainer(tiny("bert")).subspaces(QUERY, DOCUMENT, slices)


@pytest.mark.parametrize("method", ["alignment", "bti", "random"])
def test_only_products_have_parts(method: str) -> None:
    with pytest.raises(InvalidInput, match="no parts by dimension"):
        Explainer(tiny("bert"), method).subspaces(QUERY, DOCUMENT, {"first": (0, 3)})
