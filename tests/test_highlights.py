"""Highlights: the score split by the words of the document, from one cotangent, held to the sums of all pairs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rag_explain import Explainer
from rag_explain.errors import InvalidInput
from rag_explain.factors import Factors
from rag_explain.results.highlights import Highlights
from rag_explain.texts.passage import Passage
from tests.support.models import ARCHITECTURES, CORPUS, tiny

QUERY = "where did the small dog look at the moon?"
METHODS = [{"method": "bilrp"}, {"biases": "position"}, {"rules": "attnlrp"}, {"method": "hxp"}, {"method": "pooled"}]
METHODS += [{"method": "ij", "layer": 2}, {"method": "alignment"}]


def values(highlights: Highlights) -> np.ndarray:
    return np.array([one.value for one in highlights])


@pytest.mark.parametrize("options", METHODS, ids=str)
def test_a_highlight_is_what_a_word_carries_over_the_whole_query(options) -> None:
    with Explainer(tiny(dtype=torch.float32), **options) as explainer:
        found = explainer.highlight_many(QUERY, CORPUS)
        for one, document in zip(found, CORPUS, strict=True):
            whole = explainer.explain(QUERY, document)
            by_word = whole.by_word()
            assert [(span.text, span.start, span.end) for span in one] == [
                (token.text, token.start, token.end) for token in by_word.document_tokens
            ]
            # Over special tokens and the rest too: all rows of the matrix. An integral is as good as its nodes.
            allowed = 1e-4 if options.get("method") == "ij" else 1e-5
            assert np.allclose(values(one), by_word.matrix[:, :-1].sum(axis=0), atol=allowed)
            assert np.allclose(values(one), by_word.document_saliency(), atol=allowed)
            assert one.score == pytest.approx(whole.score, abs=1e-6)
            assert one.unattributed == pytest.approx(one.score - values(one).sum(), abs=1e-6)
            if explainer.method.additive:
                assert one.gap == pytest.approx(0.0, abs=100 * allowed)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_takes_one_cotangent_per_document(name, monkeypatch) -> None:
    with Explainer(tiny(name, dtype=torch.float32)) as explainer:
        seen: list[Factors] = []
        cold = explainer.method.cold
        monkeypatch.setattr(explainer.method, "cold", lambda query, batch: seen.append(query) or cold(query, batch))
        found = explainer.highlight_many(QUERY, CORPUS[:2])
        assert {len(query.rows) for query in seen} == {1}
        assert not any(query.rest.any() for query in seen)
        monkeypatch.undo()
        for one, document in zip(found, CORPUS, strict=False):
            expected = explainer.explain(QUERY, document).by_word().document_saliency()
            assert np.allclose(values(one), expected, atol=2e-5)


def test_kept_tokens_and_words_serve_highlights_and_sentences_do_not(tmp_path) -> None:
    for unit, path in (("token", "memory"), ("word", "memory"), ("sentence", "cold")):
        with Explainer(tiny(dtype=torch.float32)) as explainer:
            expected = values(explainer.highlight(QUERY, CORPUS[0]))
            explainer.precompute(CORPUS[:1], unit=unit, progress=False)
            one = explainer._explained(QUERY, (Passage(CORPUS[0]),), "word", None, whole=True)[0]
            assert one.provenance["path"] == path
            assert np.allclose(values(explainer.highlight(QUERY, CORPUS[0])), expected, atol=1e-6)


def test_metadata_in_front_of_a_text_has_no_highlights_and_moves_no_offsets() -> None:
    passage = Passage(f"title: moon\n{CORPUS[0]}", 12)
    with Explainer(tiny(dtype=torch.float32)) as explainer:
        one = explainer.highlight(QUERY, passage)
    assert [CORPUS[0][span.start : span.end] for span in one] == [span.text for span in one]
    assert "title" not in [span.text for span in one]
    assert Highlights.from_dict(one.to_dict()) == one
    assert Highlights.from_dict(one.to_dict()).gap == one.gap
    assert one.top(1)[0].value == max(values(one))


def test_nothing_to_highlight_is_no_error() -> None:
    with Explainer(tiny(dtype=torch.float32)) as explainer:
        assert explainer.highlight_many(QUERY, []) == []
        assert explainer.highlight(QUERY, "") == ()
        with pytest.raises(InvalidInput, match="use highlight for one"):
            explainer.highlight_many(QUERY, CORPUS[0])
