"""One tangent per word or sentence gives what summed token rows give, on every path and for every method."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rag_explain import Explainer
from rag_explain.errors import InvalidInput
from rag_explain.texts.passage import Passage
from tests.support.models import CORPUS, tiny

QUERY = "why did the dog look at the moon?"
TEXT = "The cat sat on the mat. The dog looked at the old moon! It was a long night."
HEADER = "title: the old house\nauthor: a cat\n\n"
PASSAGE = Passage(HEADER + TEXT, len(HEADER), len(HEADER) + len(TEXT))
LINEAR = ["bilrp", "hxp", "ij", "ij-exact", "pooled"]
OTHERS = ["alignment", "bti", "embeddings", "gradient", "integrated-gradients", "random"]


@pytest.mark.parametrize("unit", ["word", "sentence"])
@pytest.mark.parametrize("method", LINEAR)
@pytest.mark.parametrize(("architecture", "pooling"), [("bert", "mean"), ("roberta", "cls"), ("qwen3", "lasttoken")])
def test_grouped_rows_are_summed_token_rows(architecture: str, pooling: str, method: str, unit) -> None:
    explainer = Explainer(tiny(architecture, pooling), method)
    batch = explainer.scorer.read([PASSAGE, Passage(CORPUS[0])], "document")
    grouped, tokens = explainer.factor([PASSAGE, CORPUS[0]], unit=unit), explainer.factor([PASSAGE, CORPUS[0]])
    for index, (one, other) in enumerate(zip(grouped, tokens, strict=True)):
        wanted = other.grouped(unit, batch.passages[index], batch.spans[index])
        assert one.tokens == wanted.tokens
        assert (one.unit, one.norm) == (unit, pytest.approx(other.norm))
        np.testing.assert_allclose(one.rows, wanted.rows, atol=2e-6 * max(1.0, float(np.abs(other.rows).max())))
        np.testing.assert_allclose(one.rest, other.rest, atol=2e-6)
        assert one.error < 1e-3


def test_special_tokens_are_one_row_and_each_line_of_metadata_is_one() -> None:
    (factors,) = Explainer(tiny("bert", prompts={"document": "text: "})).factor([PASSAGE], unit="sentence")
    parts = [token.part for token in factors.tokens]
    assert parts == ["text", "text", "text", "special", "metadata", "metadata"]
    assert [token.text for token in factors.tokens[:3]] == TEXT.replace(". ", ".|").replace("! ", "!|").split("|")
    assert [token.piece for token in factors.tokens[4:]] == ["title: the old house", "author: a cat"]


@pytest.mark.parametrize("unit", ["word", "sentence"])
@pytest.mark.parametrize("document", [TEXT, PASSAGE, "cat"], ids=["text", "with metadata", "one word"])
@pytest.mark.parametrize("method", [*LINEAR, *OTHERS])
def test_an_explanation_by_unit_is_the_grouped_one_cell_by_cell(method: str, document: str | Passage, unit) -> None:
    explainer = Explainer(tiny("bert"), method)
    whole, grouped = explainer.explain(QUERY, document), explainer.explain(QUERY, document, unit=unit)
    wanted = whole.by_word() if unit == "word" else whole.by_sentence()
    assert grouped.unit == unit
    assert grouped.query_tokens == wanted.query_tokens
    assert grouped.document_tokens == wanted.document_tokens
    np.testing.assert_allclose(grouped.matrix, wanted.matrix, atol=2e-6)
    assert grouped.score == pytest.approx(whole.score, abs=1e-6)
    assert grouped.notices == whole.notices


@pytest.mark.parametrize("unit", ["word", "sentence"])
@pytest.mark.parametrize("method", LINEAR)
def test_kept_units_serve_every_query_and_are_kept_apart_from_tokens(method: str, unit, tmp_path: Path) -> None:
    with Explainer(tiny("bert"), method, store=tmp_path) as explainer:
        cold = explainer.explain(QUERY, PASSAGE).grouped(unit)
        explainer.precompute([PASSAGE], unit=unit, progress=False)
        warm = explainer.explain(QUERY, PASSAGE, unit=unit)
        assert warm.provenance["path"] == "memory"
        assert warm.document_tokens == cold.document_tokens
        np.testing.assert_allclose(warm.matrix, cold.matrix, atol=2e-3)  # rows are kept in half precision
        assert explainer.explain(QUERY, PASSAGE).provenance["path"] in ("cold", "built")


def test_a_text_that_was_cut_off_ends_where_the_encoder_stopped() -> None:
    model = tiny("bert", dtype=torch.float32)
    model.max_seq_length = 12
    explainer = Explainer(model)
    for unit in ("word", "sentence"):
        grouped, wanted = explainer.explain("moon", TEXT, unit=unit), explainer.explain("moon", TEXT).grouped(unit)
        assert grouped.truncated == ("document",)
        assert grouped.document_tokens == wanted.document_tokens
        np.testing.assert_allclose(grouped.matrix, wanted.matrix, atol=2e-6)


@pytest.mark.parametrize("unit", ["page", ""])
def test_units_that_there_are_not_are_refused_everywhere(unit) -> None:
    explainer = Explainer(tiny("bert"))
    for call in (
        lambda: explainer.explain(QUERY, TEXT, unit=unit),
        lambda: explainer.highlight(QUERY, TEXT, unit=unit),
        lambda: explainer.factor([TEXT], unit=unit),
        lambda: explainer.precompute([TEXT], unit=unit, progress=False),
        lambda: explainer.x_ray(TEXT, unit=unit),
    ):
        with pytest.raises(InvalidInput, match="'token', 'word' or 'sentence'"):
            call()


def test_methods_that_choose_among_tokens_are_not_grouped() -> None:
    with pytest.raises(InvalidInput, match="cannot be grouped"):
        Explainer(tiny("bert"), "alignment").factor([TEXT], unit="word")
