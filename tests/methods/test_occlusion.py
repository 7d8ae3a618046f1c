"""What the score loses without a part: equal to asking the model again, kept, and never mixed up with another unit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from rag_explain import Explainer
from rag_explain.errors import InvalidInput
from rag_explain.log import ExplanationLog, records
from rag_explain.log.verify import verify
from rag_explain.render.page import LONG
from rag_explain.render.plot import plot
from rag_explain.results.notices import NARROWED
from rag_explain.retrieval import HitExplainer, RetrievedDocument
from rag_explain.store import Store
from rag_explain.texts.passage import Passage
from rag_explain.texts.segments import word_spans
from tests.support.models import CORPUS, tiny
from tests.support.references_occlusion import matrix
from tests.support.samples import explain as sample

QUERY = "the cat, or paris?"
LESS_QUERY = [
    "cat, or paris?",
    "the, or paris?",
    "the cat or paris?",
    "the cat, paris?",
    "the cat, or?",
    "the cat, or paris",
]
DOCUMENT = "The cat looked at the moon. Paris is old! A dog (small) barked."
SENTENCES = ["The cat looked at the moon.", "Paris is old!", "A dog (small) barked."]
LESS_SENTENCES = [
    "Paris is old! A dog (small) barked.",
    "The cat looked at the moon. A dog (small) barked.",
    "The cat looked at the moon. Paris is old!",
]


def encoders(model: SentenceTransformer) -> tuple[Any, Any]:
    return (
        lambda text: model.encode_query(text, show_progress_bar=False).astype(np.float64).tolist(),
        lambda text: model.encode_document(text, show_progress_bar=False).astype(np.float64).tolist(),
    )


@pytest.mark.parametrize("architecture", ["bert", "roberta", "qwen3", "xlm-roberta"])
@pytest.mark.parametrize("measure", ["cosine", "dot"])
def test_pairs_are_what_the_model_s_own_scores_say(architecture: str, measure: str) -> None:
    model = tiny(architecture, similarity_fn_name=measure, prompts={"query": "find: ", "document": "text: "})
    explanation = Explainer(model, "occlusion").explain(QUERY, DOCUMENT)
    wanted = matrix(*encoders(model), (QUERY, LESS_QUERY), (DOCUMENT, LESS_SENTENCES), measure)
    assert [token.text for token in explanation.query_tokens] == [QUERY[a:b] for a, b in word_spans(QUERY)]
    assert [token.text for token in explanation.document_tokens] == SENTENCES
    assert (explanation.unit, explanation.measure, explanation.method) == ("sentence", measure, "occlusion")
    np.testing.assert_allclose(explanation.matrix, wanted, atol=2e-6 * max(1.0, np.abs(wanted).max()))
    assert abs(explanation.gap or 0.0) < 1e-5 * max(1.0, abs(explanation.score))


@pytest.mark.parametrize("unit", ["word", "sentence"])
def test_what_a_part_carries_is_what_the_score_loses_without_it(unit: Any) -> None:
    explainer = Explainer(tiny("bert"), "occlusion")
    explanation = explainer.explain(QUERY, DOCUMENT, unit=unit)
    highlights = explainer.highlight(QUERY, DOCUMENT, unit=unit)
    for token, carried, span in zip(
        explanation.document_tokens, explanation.document_saliency(), highlights, strict=True
    ):
        left = {"is": "Paris old!", "Paris is old!": LESS_SENTENCES[1]}.get(token.text)
        if left is not None:
            if unit == "word":
                left = f"The cat looked at the moon. {left} A dog (small) barked."
            before, after = explainer.scorer.score(QUERY, [DOCUMENT, left])
            assert carried == pytest.approx(before - after, abs=1e-6)
        assert (span.start, span.end, span.value) == (token.start, token.end, pytest.approx(carried, abs=1e-6))
    assert highlights.gap == pytest.approx(0.0, abs=1e-6)


def test_it_says_that_its_values_do_not_add_up_to_those_of_another_unit(tmp_path: Path) -> None:
    explainer = Explainer(tiny("bert"), "occlusion")
    words, sentences = (explainer.explain(QUERY, DOCUMENT, unit=unit) for unit in ("word", "sentence"))
    assert "do not add up" in " ".join(notice.text for notice in words.notices)
    with pytest.raises(InvalidInput, match='ask for unit="sentence"'):
        words.by_sentence()
    with pytest.raises(InvalidInput, match="cannot be split into words"):
        sentences.by_word()
    assert words.by_word() is words
    assert explainer.explain(QUERY, DOCUMENT, unit="token").unit == "word"  # half a word is never left out
    assert not sample().notices
    assert sample().by_word().can_be_grouped


def test_long_explanations_by_words_are_drawn_without_sentences_that_were_never_left_out() -> None:
    text = "the cat sat on the mat. " * 12
    explanation = Explainer(tiny("bert"), "occlusion").explain("the cat", text, unit="word")
    assert len(explanation.document_tokens) > LONG
    assert "occlusion" in explanation.to_html()
    assert "occlusion" in str(explanation)
    assert plot(explanation) is not None


def test_factors_are_kept_and_another_unit_is_a_miss(tmp_path: Path) -> None:
    model = tiny("bert")
    with Explainer(model, "occlusion", store=Store(tmp_path, precision="fp32")) as explainer:
        assert explainer.precompute([DOCUMENT, *CORPUS], progress=False).built == 6
        warm = explainer.explain(QUERY, DOCUMENT)
        words = explainer.explain(QUERY, DOCUMENT, unit="word")
        assert (warm.provenance["path"], words.provenance["path"]) == ("memory", "built")
        assert explainer.explain(QUERY, DOCUMENT, unit="word").provenance["path"] == "memory"
        explainer.store.close()
    with Explainer(model, "occlusion", store=Store(tmp_path, precision="fp32", readonly=True)) as explainer:
        kept = explainer.explain(QUERY, DOCUMENT)
        assert kept.provenance["path"] == "disk"
        explainer.store.close()
    fresh = Explainer(model, "occlusion")
    for one, unit in ((warm, "sentence"), (kept, "sentence"), (words, "word")):
        other = fresh.explain(QUERY, DOCUMENT, unit=unit)
        np.testing.assert_allclose(one.matrix, other.matrix, atol=1e-6)
        assert one.document_tokens == other.document_tokens


def test_words_that_were_kept_never_serve_sentences(tmp_path: Path) -> None:
    explainer = Explainer(tiny("bert"), "occlusion", store=tmp_path)
    explainer.precompute([DOCUMENT], unit="word", progress=False)
    assert explainer.explain(QUERY, DOCUMENT, unit="sentence").provenance["path"] == "built"
    assert explainer.explain(QUERY, DOCUMENT, unit="word").provenance["path"] == "memory"


def test_nothing_that_was_embedded_is_thrown_away() -> None:
    explainer = Explainer(tiny("bert"), "occlusion")
    assert explainer.explain(QUERY, DOCUMENT).provenance["path"] == "built"
    assert explainer.explain("another query", DOCUMENT).provenance["path"] == "memory"


def test_what_is_left_of_a_text_s_only_part_is_nothing() -> None:
    model = tiny("bert")
    explanation = Explainer(model, "occlusion").explain("cat?", "Paris is old!")
    wanted = matrix(*encoders(model), ("cat?", [None, "cat"]), ("Paris is old!", [None]))
    np.testing.assert_allclose(explanation.matrix, wanted, atol=1e-6)
    assert explanation.document_saliency()[0] == pytest.approx(explanation.score, abs=1e-6)


def test_what_was_cut_off_does_not_come_in_when_a_part_is_left_out() -> None:
    model = tiny("bert")
    model.max_seq_length = 12
    text = "the cat sat. paris is old. the dog ran over the old bridge."
    explainer = Explainer(model, "occlusion")
    explanation = explainer.explain("the cat", text)
    assert explanation.truncated == ("document",)
    sentences = [token.text for token in explanation.document_tokens]
    assert sentences[:2] == ["the cat sat.", "paris is old."]
    read = text[: explanation.document_tokens[-1].end]
    before, after = explainer.scorer.score("the cat", [text, read.removeprefix("the cat sat. ")])
    assert explanation.document_saliency()[0] == pytest.approx(before - after, abs=1e-6)


def test_metadata_around_the_text_stays_and_is_no_part_of_it() -> None:
    explainer = Explainer(tiny("bert"), "occlusion")
    passage = Passage(f"title: moon\n{DOCUMENT}\nend: paris", 12, 12 + len(DOCUMENT))
    explanation = explainer.explain(QUERY, passage)
    assert [token.text for token in explanation.document_tokens] == SENTENCES
    less = f"title: moon\n{LESS_SENTENCES[0]}\nend: paris"
    before, after = explainer.scorer.score(QUERY, [passage, less])
    assert explanation.document_saliency()[0] == pytest.approx(before - after, abs=1e-6)
    alone = explainer.explain(QUERY, Passage("title: moon\nParis is old!", 12))
    before, after = explainer.scorer.score(QUERY, ["title: moon\nParis is old!", "title: moon\n"])
    assert alone.document_saliency()[0] == pytest.approx(before - after, abs=1e-6)


def test_texts_without_spaces_are_taken_apart_too() -> None:
    explanation = Explainer(tiny("roberta"), "occlusion").explain("东京", "东京很大。巴黎很美。")
    assert [token.text for token in explanation.document_tokens] == ["东京很大。", "巴黎很美。"]
    assert abs(explanation.gap or 0.0) < 1e-6


@pytest.mark.parametrize("unit", ["word", None])
def test_two_steps_leave_out_the_words_of_the_best_sentences_alone(unit: Any, tmp_path: Path) -> None:
    model = tiny("bert")
    narrow = Explainer(model, "occlusion", best=2, store=tmp_path)
    every = Explainer(model, "occlusion").explain(QUERY, DOCUMENT, unit=unit)
    found = narrow.explain(QUERY, DOCUMENT, unit=unit)
    assert (found.unit, found.score) == (every.unit, pytest.approx(every.score, abs=1e-6))
    if unit is None:  # sentences, as they are without
        np.testing.assert_allclose(found.matrix, every.matrix, atol=5e-4)  # what a store on disk rounds
        assert found.notices == every.notices
        return
    best = Explainer(model, "occlusion").highlight(QUERY, DOCUMENT).top(2)
    inside = [at for at, one in enumerate(every.document_tokens) if any(a <= one.start < b for _, a, b, _ in best)]
    assert found.document_tokens == tuple(every.document_tokens[at] for at in inside)
    assert 0 < len(inside) < len(every.document_tokens)
    np.testing.assert_allclose(found.pairs, every.pairs[:, inside], atol=5e-4)
    assert abs(found.gap or 0.0) < 5e-4
    (told,) = [notice for notice in found.notices if notice.code == NARROWED]
    assert told.text.startswith("Only the words of the 2 best sentences were left out")
    assert [span[:3] for span in narrow.highlight(QUERY, DOCUMENT, unit="word")] == [
        (one.text, one.start, one.end) for one in found.document_tokens
    ]
    assert "Only the words of the 2 best sentences" in found.to_html()
    narrow.close()
    with Explainer(model, "occlusion", best=2, store=tmp_path) as again:
        assert again.explain(QUERY, DOCUMENT, unit="word").provenance["path"] == "disk"
    with Explainer(model, "occlusion", best=1, store=tmp_path) as fewer:
        assert len(fewer.explain(QUERY, DOCUMENT, unit="word").document_tokens) < len(inside)
    with Explainer(model, "occlusion", store=tmp_path) as plain:  # sentences are the same with and without
        assert plain.explain(QUERY, DOCUMENT).provenance["path"] == "disk"
        assert plain.explain(QUERY, DOCUMENT, unit="word").document_tokens == every.document_tokens


@pytest.mark.parametrize("best", [0, -1, "2", 1.5])
def test_a_number_of_sentences_that_is_none_is_refused(best: Any) -> None:
    with pytest.raises(InvalidInput, match="best must be"):
        Explainer(tiny("bert"), "occlusion", best=best)


def test_more_sentences_than_there_are_is_all_of_them() -> None:
    explainer = Explainer(tiny("bert"), "occlusion", best=9)
    assert len(explainer.explain(QUERY, DOCUMENT, unit="word").document_tokens) == len(word_spans(DOCUMENT))
    assert len(explainer.explain(QUERY, "moon", unit="word").document_tokens) == 1
    assert explainer.explain(QUERY, Passage("title\nThe moon is old. Go!", 6), unit="word").score is not None


def test_the_split_and_the_real_loss_stand_side_by_side() -> None:
    explainer, narrow = Explainer(tiny("bert")), {"method": "occlusion", "best": 1}
    comparison = explainer.compare(QUERY, DOCUMENT, ["bilrp", "occlusion", narrow])
    assert [row.method for row in comparison.rows] == ["bilrp", "occlusion", "occlusion best=1"]
    assert np.isfinite(comparison.agreement).all()
    assert comparison.agreement[1, 2] == pytest.approx(1.0)  # over the words that both have
    scores = [row.explanation.score for row in comparison.rows if row.explanation]
    assert scores == pytest.approx([explainer.explain(QUERY, DOCUMENT).score] * 3, abs=1e-6)
    for shown in (str(comparison), comparison._repr_html_()):
        assert shown.count("occlusion best=1") >= 3


def test_subspaces_of_it_sum_to_the_whole() -> None:
    explainer = Explainer(tiny("bert"), "occlusion")
    parts = explainer.subspaces(QUERY, DOCUMENT, {"first": (0, 8)})
    whole = explainer.explain(QUERY, DOCUMENT, unit="word")
    np.testing.assert_allclose(sum(part.matrix for part in parts.values()), whole.matrix, atol=1e-6)


def test_a_model_that_changed_is_not_served_what_was_kept(tmp_path: Path) -> None:
    model = tiny("bert")
    explainer = Explainer(model, "occlusion", store=tmp_path)
    explainer.explain(QUERY, DOCUMENT)
    with torch.no_grad():
        next(model.parameters()).mul_(1.5)
    assert explainer.explain(QUERY, DOCUMENT).provenance["path"] == "built"


def test_hits_and_the_log_take_it_like_any_other_method(tmp_path: Path) -> None:
    model = tiny("bert")
    found = [RetrievedDocument(id=str(index), text=text) for index, text in enumerate([DOCUMENT, *CORPUS[:2]])]
    hits = HitExplainer(Explainer(model, "occlusion"), explain="eager").hits(QUERY, found)
    assert [hit.explanation.unit for hit in hits if hit.explanation] == ["sentence"] * 3
    with ExplanationLog(tmp_path) as log:
        log.record(query=QUERY, answer="yes", hits=hits)
    (record,) = records(tmp_path)
    assert record.hits[0].explanation is not None
    verdicts = verify(tmp_path, lambda outline: Explainer(model, outline.method))
    assert {verdict.outcome for verdict in verdicts} == {"holds"}
