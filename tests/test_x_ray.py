"""The x-ray of a chunk: shares of its own vector, which sum to 1."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from rag_explain.errors import InvalidInput
from rag_explain.explainer import Explainer
from rag_explain.results.x_ray import XRay
from rag_explain.texts.passage import Passage
from tests.support.embedders import Asked
from tests.support.models import CORPUS, colbert, static, tiny

HEADED = "# Handbook 2024\n\nThe cat sat on the mat. A dog ran over the old bridge.\n\nParis\n=====\n\nThe moon."
AROUND = "title: Moon\nlang: en\n\n"


@cache
def explainer(kind: str = "bert", method: str | None = None) -> Explainer:
    made: dict[str, Any] = {"static": static, "black box": Asked, "colbert": colbert}
    return Explainer(made[kind]() if kind in made else tiny(kind, dtype=torch.float32), method)


def total(found: XRay) -> float:
    return sum(one.value for one in found.sentences) + found.no_text


@pytest.mark.parametrize(
    ("kind", "method"),
    [("bert", None), ("bert", "pooled"), ("bert", "occlusion"), ("static", None), ("black box", None)],
)
def test_the_shares_and_the_rest_sum_to_one(kind: str, method: str | None) -> None:
    for text in (CORPUS[1], HEADED, Passage(AROUND + HEADED, len(AROUND))):
        found = explainer(kind, method).x_ray(text)
        assert total(found) == pytest.approx(1, abs=1e-4)
        assert found.error < 1e-4


def test_a_share_is_the_row_times_the_embedding() -> None:
    found = explainer().x_ray(CORPUS[1])
    (factors,) = explainer().factor([CORPUS[1]], unit="word")
    embedding = factors.embedding.astype(np.float64)
    shares = factors.rows.astype(np.float64) @ embedding / (embedding @ embedding)
    expected = [share for token, share in zip(factors.tokens, shares, strict=True) if token.part == "text"]
    assert [one.value for one in found.words] == pytest.approx(expected, abs=1e-6)
    assert found.special == pytest.approx(shares.sum() - sum(expected), abs=1e-6)


def test_sentences_headers_and_each_line_of_metadata_have_a_share() -> None:
    found = explainer().x_ray(Passage(AROUND + HEADED, len(AROUND)))
    assert [text for text, _ in found.metadata] == ["title: Moon", "lang: en"]
    assert [one.text for one in found.headers] == ["# Handbook 2024", "Paris"]
    for one in (*found.words, *found.sentences, *found.headers):
        assert HEADED[one.start : one.end] == one.text
    inside = [word.value for word in found.words if word.start < len("# Handbook 2024")]
    assert found.headers[0].value == pytest.approx(sum(inside))
    assert sum(one.value for one in found.words) == pytest.approx(sum(one.value for one in found.sentences))


def test_what_is_most_of_a_vector_is_said_first() -> None:
    text = "# Old moon over the bridge in Paris and Berlin\n\nA cat."
    found = explainer().x_ray(text)
    share = found.headers[0].value
    told = f"{100 * share:.1f} % of this vector is “# Old moon over the bridge in Paris and Berlin”"
    assert (told in str(found)) == (share > 0.25)
    assert share > 0.25


def test_kept_factors_of_any_unit_serve_without_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Explainer(tiny("bert", dtype=torch.float32))
    by_sentence = "The cat sat on the mat. A dog ran over the old bridge."
    own.precompute([by_sentence], unit="sentence", progress=False)
    own.precompute([CORPUS[0]], unit="token", progress=False)
    expected = own.x_ray(by_sentence, unit="word")
    monkeypatch.setattr(own.method, "factor", None)  # whatever computes fails
    found = own.x_ray(by_sentence)
    assert found.words == ()
    assert [one.value for one in found.sentences] == pytest.approx([one.value for one in expected.sentences], abs=1e-5)
    assert len(own.x_ray(CORPUS[0]).words) > 5


def test_a_black_box_is_looked_at_by_sentences_at_one_text_each() -> None:
    asked = Asked()
    own = Explainer(asked)
    before = len(asked.texts)
    found = own.x_ray("The cat sat on the mat. A dog ran over the old bridge. Paris is old.")
    assert len(found.sentences) == 3
    assert len(asked.texts) - before == 4
    own.x_ray("The cat sat on the mat. A dog ran over the old bridge. Paris is old.")
    assert len(asked.texts) - before == 4  # kept


def test_what_has_no_rows_is_refused_in_words() -> None:
    with pytest.raises(InvalidInput, match="no rows that sum to an embedding"):
        explainer("colbert").x_ray(CORPUS[0])
    with pytest.raises(InvalidInput, match="unit must be"):
        explainer().x_ray(CORPUS[0], unit="page")  # type: ignore[arg-type]


def test_it_is_shown_and_written() -> None:
    found = explainer().x_ray(Passage("<b>\n\n" + HEADED, len("<b>\n\n")))
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["metadata"][0]["text"] == "<b>"
    assert "no sentence" in str(found)
    assert "&lt;b&gt;" in found.to_html()
    assert "<script" not in found.to_html()
