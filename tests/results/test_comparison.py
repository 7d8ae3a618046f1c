from __future__ import annotations

import json
import math

import numpy as np
import pytest
from scipy.stats import spearmanr

from rag_explain import Explainer, Explanation, Token
from rag_explain.errors import InvalidInput
from rag_explain.results.comparison import Compared, Comparison, jaccard, rank_correlation
from tests.support.models import TEXTS, tiny

QUERY, DOCUMENT = TEXTS


def test_ranks_are_correlated_as_spearman_did() -> None:
    generator = np.random.default_rng(0)
    left, right = generator.integers(0, 5, 40), generator.integers(0, 5, 40)
    assert rank_correlation(left, right) == pytest.approx(spearmanr(left, right)[0])
    assert math.isnan(rank_correlation(left, np.zeros(40)))
    assert math.isnan(rank_correlation(left, right[:-1]))


def test_options_without_a_method_are_those_of_the_default_one() -> None:
    (row,) = Explainer(tiny("bert")).compare(QUERY, DOCUMENT, [{"layer": 1}]).rows
    assert (row.method, row.reason) == ("layer=1", None)


def test_methods_stand_side_by_side() -> None:
    explainer = Explainer(tiny("bert"))
    choices = ["bilrp", {"method": "ij", "layer": 2}, "random", "bti"]
    comparison = explainer.compare(QUERY, DOCUMENT, methods=choices)
    assert [row.method for row in comparison.rows] == ["bilrp", "ij layer=2", "random", "bti"]
    bilrp, ij, random, bti = comparison.rows
    assert bilrp.explanation is not None
    assert np.array_equal(bilrp.explanation.matrix, explainer.explain(QUERY, DOCUMENT).matrix)
    assert bilrp.error is None
    assert ij.error is not None
    assert ij.error <= 1e-3
    assert random.explanation is not None
    assert random.explanation.gap is None
    assert bti.explanation is not None
    np.testing.assert_allclose(np.diag(comparison.agreement), 1)
    np.testing.assert_allclose(comparison.agreement, comparison.agreement.T)
    words = [row.explanation.by_word().pairs.ravel() for row in (bilrp, ij) if row.explanation is not None]
    assert comparison.agreement[0, 1] == pytest.approx(spearmanr(*words)[0])


def test_the_strongest_pairs_in_common_are_counted_whatever_the_small_ones_do() -> None:
    def compared(values: list[float]) -> Compared:
        matrix = np.zeros((5, 8), dtype=np.float32)
        matrix[:-1, :-1].flat[: len(values)] = values
        words = [tuple(Token(one, at, at + 1) for at, one in enumerate(text)) for text in ("abcd", "efghijk")]
        shown = Explanation(
            query="abcd", document="efghijk", query_tokens=words[0], document_tokens=words[1], matrix=matrix,
            score=0.0, method="bilrp", unit="word",
        )  # fmt: skip
        return Compared("by hand", shown, 0.0)

    strong = [float(30 - place) for place in range(10)]
    rows = [
        compared([*strong, *(0.01 * place for place in range(1, 11))]),
        compared([*(-value for value in strong), *(0.01 * place for place in range(10, 0, -1))]),
        compared([*(0.01,) * 5, *strong]),  # five places further on: five of fifteen in common
        Compared("refused", None, 0.0, "no"),
    ]
    found = Comparison.of(rows).overlap
    assert found[0, 1] == found[1, 0] == found[0, 0] == 1
    assert found[0, 2] == pytest.approx(5 / 15)
    assert np.isnan(found[3]).all()
    assert math.isnan(jaccard(frozenset(), frozenset((1,))))


def test_a_method_is_asked_at_several_layers() -> None:
    comparison = Explainer(tiny("bert")).compare(QUERY, DOCUMENT, ["bilrp", {"method": "ij"}], layers=range(2))
    assert [row.method for row in comparison.rows] == ["bilrp layer=0", "ij layer=0", "bilrp layer=1", "ij layer=1"]
    assert np.isfinite(comparison.overlap).all()
    assert "overlap" in str(comparison)


def test_a_method_that_refuses_is_listed_with_its_reason() -> None:
    comparison = Explainer(tiny("bert")).compare(QUERY, DOCUMENT, ["pooled", {"method": "pooled", "layer": 1}])
    refused = comparison.rows[1]
    assert refused.explanation is None
    assert "no layer" in (refused.reason or "")
    assert np.isnan(comparison.agreement[1]).all()
    assert "no layer" in str(comparison)


def test_it_can_be_printed_and_written() -> None:
    comparison = Explainer(tiny("bert")).compare(QUERY, DOCUMENT, ["bilrp", "alignment"])
    text = str(comparison)
    assert "agreement" in text
    assert "\x1b" not in text
    data = json.loads(json.dumps(comparison.to_dict(), allow_nan=False))
    assert data["rows"][0]["method"] == "bilrp"
    assert data["rows"][0]["explanation"]["method"] == "bilrp"
    assert repr(comparison) == "Comparison(bilrp, alignment)"


def test_all_methods_of_an_encoder_are_compared_by_default() -> None:
    comparison = Explainer(tiny("bert")).compare(QUERY, DOCUMENT)
    names = {row.method for row in comparison.rows}
    assert {"bilrp", "hxp", "ij", "pooled", "alignment", "bti", "embeddings", "gradient"} <= names
    assert not {"random", "ij-exact"} & names
    assert all(row.explanation is not None for row in comparison.rows)


@pytest.mark.parametrize("methods", [[], "bilrp"])
def test_a_list_is_asked_for(methods: object) -> None:
    with pytest.raises(InvalidInput, match="list"):
        Explainer(tiny("bert")).compare(QUERY, DOCUMENT, methods)  # type: ignore[arg-type]  # the point of the test
