"""Evidence: the sentences to read, held to the equation, over every window, offset and odd text."""

from __future__ import annotations

import copy
import json
import pickle
import threading
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from rag_explain import Explainer
from rag_explain.encoder.chunking import window_spans
from rag_explain.errors import FormatError, InvalidInput
from rag_explain.evidence import matches
from rag_explain.results.evidence import Evidence
from rag_explain.results.notices import METHOD, TRUNCATED
from rag_explain.results.spans import ValuedSpan
from rag_explain.texts.passage import Passage, as_passage
from rag_explain.texts.segments import sentence_spans
from tests.support.bag_scorer import BagOfVectors
from tests.support.models import CORPUS, colbert, tiny
from tests.support.references_evidence import sentence_values

QUERY = "Which cat looked at the moon?"
DOCUMENT = "A dog ran. The cat looked at the old moon!\n\nParis is the capital of France. Bees, too."
LONG = " ".join(f"{line.capitalize()}." for line in CORPUS * 8)


def spans(text: str) -> list[tuple[int, int]]:
    return sentence_spans(text)


@pytest.mark.parametrize("architecture", ["bert", "roberta", "t5", "qwen3"])
def test_values_are_the_sum_of_each_word_s_best_match_in_the_sentence(architecture: str) -> None:
    model = tiny(architecture)
    evidence = Explainer(model, "pooled").evidence(QUERY, DOCUMENT)
    wanted = sentence_values(model, QUERY, DOCUMENT, spans(DOCUMENT))
    np.testing.assert_allclose([one.value for one in evidence.sentences], wanted, rtol=1e-5)
    assert [(one.start, one.end) for one in evidence.sentences] == spans(DOCUMENT)
    assert all(one.text == DOCUMENT[one.start : one.end] for one in evidence.sentences)
    order = sorted(range(len(wanted)), key=lambda at: -wanted[at])
    assert list(evidence) == [evidence.sentences[at] for at in order[:2]]
    assert evidence.top(3) == tuple(evidence.sentences[at] for at in order[:3])
    assert evidence.score is not None
    assert evidence.score >= max(wanted) - 1e-9


def test_a_multi_vector_encoder_is_asked_for_its_own_vectors() -> None:
    model = colbert(prompts={"query": "", "document": ""})
    document = "The dog ran, barking! The cat looked at the moon"
    evidence = Explainer(model).evidence("the old cat", document)
    explanation = Explainer(model).explain("the old cat", document)
    assert explanation.similarities is not None
    words = [i for i, token in enumerate(explanation.query_tokens) if token.part == "text"]
    for one in evidence.sentences:
        inside = [
            j
            for j, token in enumerate(explanation.document_tokens)
            if token.part == "text" and one.start <= token.start < one.end and explanation.similarities[:, j].any()
        ]
        wanted = sum(max(explanation.similarities[i, j] for j in inside) for i in words)
        assert one.value == pytest.approx(wanted, rel=1e-5)


def test_expansion_and_special_tokens_do_not_vote() -> None:
    model = colbert(expansion={"strategy": "min", "length": 24})
    scorer = Explainer(model).scorer
    (found,) = matches(scorer, as_passage("the cat"), [as_passage(DOCUMENT)])
    assert len(found.best) == sum(
        token.part == "text" for token in scorer.read([as_passage("the cat")], "query").tokens[0]
    )


def test_prompts_neither_vote_nor_count() -> None:
    model = tiny("bert", prompts={"query": "question: ", "document": "moon cat. "})
    evidence = Explainer(model, "pooled").evidence(QUERY, DOCUMENT)
    assert [(one.start, one.end) for one in evidence.sentences] == spans(DOCUMENT)
    (found,) = matches(Explainer(model, "pooled").scorer, as_passage(QUERY), [as_passage(DOCUMENT)])
    assert len(found.best) == len(tiny("bert").tokenizer(QUERY, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("architecture", ["bert", "roberta"])
def test_a_text_longer_than_the_window_is_read_in_overlapping_windows(architecture: str) -> None:
    model = tiny(architecture)
    explainer = Explainer(model, "pooled")
    assert explainer.scorer.read([as_passage(LONG)], "document").truncated[0]
    windows = explainer.scorer.window_spans(LONG, spans(LONG))
    evidence = explainer.evidence(QUERY, LONG)
    wanted = sentence_values(model, QUERY, LONG, spans(LONG), windows)
    np.testing.assert_allclose([one.value for one in evidence.sentences], wanted, rtol=1e-5)
    assert min(wanted) > 0.0
    assert [(notice.code, notice.level) for notice in evidence.notices] == [(METHOD, "note")]
    assert "overlapping windows" in evidence.notices[0].text


def test_windows_hold_whole_sentences_fit_and_overlap() -> None:
    scorer = Explainer(tiny("bert"), "pooled").scorer
    windows = scorer.window_spans(LONG, spans(LONG))
    batch = scorer.read([as_passage(LONG[start:end]) for start, end in windows], "document")
    assert not any(batch.truncated)
    assert {start for start, _ in windows} <= {start for start, _ in spans(LONG)}
    assert {end for _, end in windows} <= {end for _, end in spans(LONG)}
    assert all(any(a <= start and end <= b for a, b in windows) for start, end in spans(LONG))
    assert (windows[0][0], windows[-1][1]) == (0, len(LONG))
    assert all(b_start < a_end for (_, a_end), (b_start, _) in pairwise(windows))
    assert len(windows) == len(set(windows)) <= 3 * len(LONG) // (windows[0][1] - windows[0][0])


def test_a_sentence_longer_than_the_window_is_read_in_pieces() -> None:
    model = tiny("bert")
    explainer = Explainer(model, "pooled")
    text = "barking" * 3 + " " + "bridges navigate landmarks barking " * 11 + "the moon. A cat."
    assert max(b - a for a, b in window_spans(text, spans(text), explainer.scorer.encoder.reader)) < len(text) - 10
    evidence = explainer.evidence(QUERY, text)
    windows = explainer.scorer.window_spans(text, spans(text))
    wanted = sentence_values(model, QUERY, text, spans(text), windows)
    np.testing.assert_allclose([one.value for one in evidence.sentences], wanted, rtol=1e-5)


@pytest.mark.parametrize("text", [DOCUMENT, LONG])
def test_offsets_are_the_caller_s_and_metadata_do_not_count(text: str) -> None:
    before, after = "Title: the cat looked at the moon. Year: 5.\n\n", "\nSource: the cat looked at the moon."
    passage = Passage(before + text + after, len(before), len(before) + len(text))
    evidence = Explainer(tiny("bert"), "pooled").evidence(QUERY, passage)
    assert evidence.document == text
    assert [(one.text, one.start, one.end) for one in evidence.sentences] == [(text[a:b], a, b) for a, b in spans(text)]
    assert all(one.value > 0.0 for one in evidence.sentences)


def test_a_text_behind_more_metadata_than_the_encoder_reads_is_read() -> None:
    before = LONG + "\n\n"
    passage = Passage(before + DOCUMENT, len(before))
    explainer = Explainer(tiny("bert"), "pooled")
    assert explainer.explain(QUERY, passage).truncated == ("document",)
    evidence = explainer.evidence(QUERY, passage)
    assert [one.text for one in evidence.sentences] == [DOCUMENT[a:b] for a, b in spans(DOCUMENT)]
    assert all(one.value > 0.0 for one in evidence.sentences)
    assert TRUNCATED not in {notice.code for notice in evidence.notices}


def test_many_documents_are_each_what_they_are_alone() -> None:
    explainer = Explainer(tiny("bert"), "pooled")
    documents = [DOCUMENT, "", LONG, "The moon.", " \n ", *CORPUS]
    for document, found in zip(documents, explainer.evidence_many(QUERY, documents, 3), strict=True):
        alone = explainer.evidence(QUERY, document, 3)
        np.testing.assert_allclose([one.value for one in found], [one.value for one in alone], rtol=1e-6)
        assert [one[:3] for one in found] == [one[:3] for one in alone]
    assert explainer.evidence_many(QUERY, []) == []


def test_each_document_is_encoded_once_and_the_query_once(monkeypatch: pytest.MonkeyPatch) -> None:
    explainer = Explainer(tiny("bert"), "pooled")
    encoder, counted = explainer.scorer.encoder, []
    run = encoder.run
    monkeypatch.setattr(encoder, "run", lambda batch, *more: counted.append(len(batch)) or run(batch, *more))
    explainer.evidence_many(QUERY, [DOCUMENT, *CORPUS, ""])
    assert sum(counted) == 1 + 1 + len(CORPUS)
    assert len(counted) < 1 + 1 + len(CORPUS)  # in batches


@pytest.mark.parametrize("document", ["", "  \n\t"])
def test_a_document_without_words_has_no_evidence(document: str) -> None:
    evidence = Explainer(tiny("bert"), "pooled").evidence(QUERY, document)
    assert evidence == ()
    assert (evidence.sentences, evidence.score) == ((), 0.0)
    assert "no sentence" in str(evidence)


def test_sentences_of_which_nothing_is_compared_match_nothing() -> None:
    evidence = Explainer(colbert()).evidence("the cat", "The cat sat. , ! The moon")
    assert {one.text for one in evidence.sentences if one.value == 0.0} <= {",", ", !", "!"}
    assert evidence[0].value > 0.0


def test_one_sentence_and_more_asked_for_than_there_are() -> None:
    explainer = Explainer(tiny("bert"), "pooled")
    assert [one.text for one in explainer.evidence(QUERY, "The moon.")] == ["The moon."]
    assert len(explainer.evidence(QUERY, DOCUMENT, 99)) == len(spans(DOCUMENT))
    assert explainer.evidence(QUERY, DOCUMENT, 0) == ()
    for k in (-1, 1.5, "2", True):
        with pytest.raises(InvalidInput, match="k must be"):
            explainer.evidence(QUERY, DOCUMENT, k)  # type: ignore[arg-type]


@pytest.mark.parametrize("query", ["", "   "])
def test_a_query_without_words_is_refused(query: str) -> None:
    with pytest.raises(InvalidInput, match="no word to look for"):
        Explainer(tiny("bert"), "pooled").evidence(query, DOCUMENT)


def test_a_scorer_without_token_vectors_is_refused_in_words() -> None:
    with pytest.raises(InvalidInput, match="no vectors of tokens"):
        Explainer(BagOfVectors()).evidence(QUERY, DOCUMENT)
    with pytest.raises(InvalidInput, match="list of documents"):
        Explainer(BagOfVectors()).evidence_many(QUERY, DOCUMENT)


def test_a_huge_document_never_has_more_than_a_few_windows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    explainer = Explainer(tiny("bert", dtype=torch.float32), "pooled")
    text = LONG * (100_000 // len(LONG) + 1)
    encoder, sizes = explainer.scorer.encoder, []
    run = encoder.run
    shape = lambda batch: batch.features["input_ids"].shape  # noqa: E731
    monkeypatch.setattr(encoder, "run", lambda batch, *more: sizes.append(shape(batch)) or run(batch, *more))
    evidence = explainer.evidence(QUERY, text)
    assert len(evidence.sentences) == len(spans(text))
    assert all(rows * length <= 4096 for rows, length in sizes)
    assert len(sizes) > 10
    assert TRUNCATED not in {notice.code for notice in evidence.notices}


def test_a_backend_takes_the_place_of_the_scoring() -> None:
    asked: list[tuple[str, list[str]]] = []

    def longest(query: str, sentences: list[str]) -> list[Any]:
        asked.append((query, sentences))
        return [np.float32(len(sentence)) for sentence in sentences]

    evidence = Explainer(BagOfVectors()).evidence(QUERY, DOCUMENT, 1, backend=longest)
    assert asked == [(QUERY, [DOCUMENT[a:b] for a, b in spans(DOCUMENT)])]
    assert [(one.text, one.value) for one in evidence] == [("The cat looked at the old moon!", 31.0)]
    assert (evidence.method, evidence.score, evidence.model) == ("longest", None, "")


@pytest.mark.parametrize("values", [[1.0], [1.0] * 9, [1.0, 2.0, float("nan"), 0.0], ["a"] * 4, None])
def test_what_a_backend_gives_is_checked(values: Any) -> None:
    with pytest.raises(InvalidInput, match="backend"):
        Explainer(BagOfVectors()).evidence(QUERY, DOCUMENT, backend=lambda query, sentences: values)


def test_a_backend_that_fails_is_named() -> None:
    def broken(query: str, sentences: list[str]) -> list[float]:
        raise OSError("no such model")

    with pytest.raises(InvalidInput, match=r"backend broken failed.*no such model"):
        Explainer(BagOfVectors()).evidence(QUERY, DOCUMENT, backend=broken)


def test_evidence_travels() -> None:
    evidence = Explainer(tiny("bert"), "pooled").evidence(QUERY, DOCUMENT, 3)
    for same in (
        Evidence.from_dict(json.loads(evidence.to_json())),
        pickle.loads(pickle.dumps(evidence)),
        copy.deepcopy(evidence),
    ):
        assert isinstance(same, Evidence)
        assert (same, same.sentences, same.k) == (evidence, evidence.sentences, 3)
        assert (same.query, same.fingerprint, same.notices) == (QUERY, evidence.fingerprint, evidence.notices)
    with pytest.raises(AttributeError):
        evidence.k = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    "change",
    [
        {"version": 9},
        {"format": "other"},
        {"spans": [[0, 999, 1.0]]},
        {"spans": [[5, 2, 1.0]]},
        {"spans": [[0, 2, "x"]]},
        {"spans": [[0, 2, float("inf")]]},
        {"spans": 3},
        {"k": "two"},
        {"query": None},
    ],
)
def test_damaged_evidence_is_refused(change: dict[str, Any]) -> None:
    data = Explainer(tiny("bert"), "pooled").evidence(QUERY, DOCUMENT).to_dict()
    with pytest.raises(FormatError):
        Evidence.from_dict({**data, **change})


def test_views_say_where_to_look_and_nothing_in_a_text_is_markup() -> None:
    document = "A dog ran. The <b>cat</b> [red]looked[/red] at the old moon!"
    evidence = Explainer(tiny("bert"), "pooled").evidence("cat <i>&", document)
    assert repr(evidence) == "Evidence(2 of 2 sentences, maxsim)"
    for shown in (str(evidence), evidence._repr_html_(), evidence.to_html()):
        assert "where to look, not what carried the score" in shown
        assert f"{evidence[0].value:.4f}" in shown
    assert "[red]looked[/red]" in str(evidence)
    assert "<b>cat</b>" not in evidence.to_html()
    assert "<script" not in evidence.to_html()


def test_a_page_is_written(tmp_path: Any) -> None:
    evidence = Explainer(tiny("bert"), "pooled").evidence(QUERY, DOCUMENT)
    page = evidence.to_html(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page


def test_eight_threads_find_the_same() -> None:
    explainer = Explainer(tiny("bert"), "pooled")
    wanted = explainer.evidence_many(QUERY, [DOCUMENT, LONG])
    found: list[list[Evidence]] = []

    def look() -> None:
        found.append(explainer.evidence_many(QUERY, [DOCUMENT, LONG]))

    threads = [threading.Thread(target=look) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [wanted] * 8


def test_a_tie_keeps_the_order_of_the_document() -> None:
    pieces = tuple(ValuedSpan("ab"[at], at, at + 1, 1.0) for at in range(2))
    assert Evidence(spans=pieces, k=1, query="", document="ab", method="maxsim") == (pieces[0],)


@pytest.mark.slow
def test_the_real_encoder_finds_the_sentence() -> None:
    document = "The cat sat there. It was a long and cold night. The dog looked at the sky. Nobody came."
    (found,) = Explainer("all-MiniLM-L6-v2").evidence("Which animal watched the stars?", document, 1)
    assert found.text == "The dog looked at the sky."
