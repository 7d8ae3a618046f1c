"""Results: frozen, exact through JSON and pickle, and sums that do not change by grouping."""

from __future__ import annotations

import copy
import io
import json
import pickle
import threading
from dataclasses import FrozenInstanceError, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from rag_explain.errors import FormatError, InvalidInput
from rag_explain.factors import Factors
from rag_explain.results.deferred import Deferred
from rag_explain.results.explanation import Explanation
from rag_explain.results.hits import Hit, Hits
from rag_explain.texts.tokens import Token
from tests.support.samples import DOCUMENT, HOSTILE, explain, hits, tokens_of
from tests.support.strategies import TEXTS, make


def same(left: Explanation, right: Explanation) -> None:
    for item in fields(Explanation):
        a, b = getattr(left, item.name), getattr(right, item.name)
        if isinstance(a, np.ndarray):
            np.testing.assert_array_equal(a, b)
            assert a.dtype == b.dtype
        else:
            assert a == b, item.name


@given(TEXTS, TEXTS, st.integers(0, 9), st.booleans())
@settings(max_examples=60)
def test_a_round_trip_through_json_and_pickle_is_exact(query: str, document: str, seed: int, truncated: bool) -> None:
    explanation = make(query, document, seed, truncated)
    text = explanation.to_json()
    assert "\n" not in text
    text.encode()  # a file can hold it, whatever the texts are
    same(Explanation.from_json(text), explanation)
    same(Explanation.from_dict(explanation.to_dict()), explanation)
    same(pickle.loads(pickle.dumps(explanation)), explanation)
    same(copy.deepcopy(explanation), explanation)


@given(TEXTS, TEXTS, st.integers(0, 9), st.booleans())
@settings(max_examples=60)
def test_grouping_conserves_the_sum_and_its_tokens_are_pieces_of_the_text(
    query: str, document: str, seed: int, truncated: bool
) -> None:
    explanation = make(query, document, seed, truncated)
    total = float(explanation.matrix.sum(dtype=np.float64))
    size = float(np.abs(explanation.matrix).sum()) + 1
    by_word = explanation.by_word()
    for grouped in (by_word, explanation.by_sentence(), by_word.by_sentence()):
        assert float(grouped.matrix.sum(dtype=np.float64)) == pytest.approx(total, abs=1e-6 * size)
        assert grouped.gap == pytest.approx(explanation.gap, abs=1e-6 * size)
        assert grouped.score == explanation.score
        for text, tokens in ((query, grouped.query_tokens), (document, grouped.document_tokens)):
            assert all(token.text == text[token.start : token.end] != "" for token in tokens)
            assert all(a.end <= b.start for a, b in pairwise(tokens))
        if explanation.similarities is not None:
            assert np.isfinite(grouped.similarities).all()
    np.testing.assert_allclose(
        by_word.by_sentence().matrix.sum(1), explanation.by_sentence().matrix.sum(1), atol=1e-5 * size
    )


def test_words_sum_their_pieces_and_special_tokens_go_to_the_rest() -> None:
    explanation = explain()
    by_word = explanation.by_word()
    pieces = [i for i, token in enumerate(explanation.document_tokens) if 28 <= token.start < 36 and token.text]
    word = next(i for i, token in enumerate(by_word.document_tokens) if token.text == "password")
    assert len(pieces) == 2
    row = next(i for i, token in enumerate(by_word.query_tokens) if token.text == "reset")
    token = next(i for i, token in enumerate(explanation.query_tokens) if token.text == "reset")
    assert by_word.pairs[row, word] == pytest.approx(float(explanation.pairs[token, pieces].sum()), abs=1e-6)
    assert {token.part for token in by_word.document_tokens} == {"text"}
    assert by_word.unit == "word"
    assert by_word.by_word() is by_word
    assert explanation.by_sentence().unit == "sentence"
    with pytest.raises(InvalidInput, match="cannot be split"):
        explanation.by_sentence().by_word()


def test_top_pairs_and_highlights_are_the_largest() -> None:
    explanation = explain().by_word()
    pairs = explanation.top_pairs(5)
    sizes = np.sort(np.abs(explanation.pairs), axis=None)[::-1]
    assert [abs(pair.value) for pair in pairs] == pytest.approx(sizes[:5].tolist())
    assert sum(pair.share for pair in explanation.top_pairs(10**6)) == pytest.approx(1.0)
    assert explanation.top_pairs(0) == []
    best = explanation.highlights(2)
    assert [DOCUMENT[mark.start : mark.end] for mark in best] == [mark.text for mark in best]
    assert best[0].value == pytest.approx(float(explanation.document_saliency().max()))


def test_arrays_and_fields_cannot_be_written() -> None:
    source = np.zeros((3, 3), dtype=np.float32)
    view = source[:]
    view.flags.writeable = False
    tokens = (Token("a", 0, 1), Token("b", 1, 2))
    explanation = Explanation(
        query="ab", document="ab", query_tokens=tokens, document_tokens=tokens, matrix=view, score=0, method="m"
    )
    source[:] = 1  # somebody else's array, seen through a read-only view
    assert not explanation.matrix.any()
    with pytest.raises(ValueError, match="read-only"):
        explanation.matrix[0, 0] = 1
    with pytest.raises(ValueError, match="read-only"):
        explanation.pairs[0, 0] = 1
    with pytest.raises(FrozenInstanceError):
        explanation.score = 1.0  # type: ignore[misc]  # what is tested
    with pytest.raises(TypeError):
        explanation.settings["layer"] = 1  # type: ignore[index]  # what is tested
    assert not pickle.loads(pickle.dumps(explanation)).matrix.flags.writeable


def test_an_array_that_nobody_else_can_write_is_not_copied() -> None:
    explanation = explain()
    assert explanation.by_word().matrix.base is None
    moved = Explanation(**{item.name: getattr(explanation, item.name) for item in fields(Explanation)})
    assert moved.matrix is explanation.matrix


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_none_are_refused(value: float) -> None:
    explanation = explain()
    matrix = explanation.matrix.copy()
    matrix[0, 0] = value
    with pytest.raises(InvalidInput, match="NaN"):
        explain(matrix=matrix)
    with pytest.raises(InvalidInput, match="NaN"):
        explain(score=value)


def test_a_matrix_of_another_shape_is_refused() -> None:
    with pytest.raises(InvalidInput, match="one row per token"):
        explain(matrix=np.zeros((2, 2), dtype=np.float32))


def test_a_text_that_is_not_kept_is_kept_nowhere() -> None:
    dropped = explain(document="a secret word", query="public", document_tokens=tokens_of("a secret word"))
    dropped = Explanation(**{i.name: getattr(dropped, i.name) for i in fields(Explanation)} | {"document": None})
    for text in (dropped.to_json(), repr(pickle.dumps(dropped))):
        assert "secr" not in text
    same(Explanation.from_json(dropped.to_json()), dropped)
    assert dropped.document_tokens[0].label == "[CLS]"
    with pytest.raises(InvalidInput, match="before dropping"):
        dropped.by_word()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "not an explanation"),
        ({"version": 1}, "version 1 cannot be read"),
        ({"unit": "page"}, "damaged"),
        ({"matrix": [[1.0]]}, "damaged"),
        ({"matrix": "no"}, "damaged"),
        ({"matrix": "1E100"}, "not a number"),
        ({"matrix": [[1e100]]}, "too large"),
        ({"matrix": [[10**400]]}, "not a number"),
        ({"score": float("nan")}, "damaged"),
        ({"score": None}, "damaged"),
        ({"query_tokens": [[0, 99, "text", ""]]}, "damaged"),
        ({"query_tokens": [[-2, 1, "text", ""]]}, "damaged"),
        ({"query_tokens": [[0, 1, "evil", ""]]}, "damaged"),
        ({"query_tokens": 5}, "damaged"),
    ],
)
def test_damaged_data_is_refused_in_words(change: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        Explanation.from_dict(explain().to_dict() | change)


@pytest.mark.parametrize("text", ["", "[]", "null", "{", '{"format": 1}'])
def test_what_is_no_explanation_is_refused(text: str) -> None:
    with pytest.raises(FormatError):
        Explanation.from_json(text)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), st.lists, max_leaves=8))
def test_any_json_is_read_or_refused(value: Any) -> None:
    data = explain().to_dict()
    for key in ("query", "document_tokens", "matrix", "truncated"):
        try:
            Explanation.from_dict(data | {key: value})
        except FormatError:
            continue


def factors() -> Factors:
    return Factors(
        tokens=(Token("a", 0, 1),),
        rows=np.ones((1, 4), dtype=np.float32),
        rest=np.zeros(4, dtype=np.float32),
        embedding=np.ones(4, dtype=np.float32),
        norm=2.0,
        role="document",
        method="bilrp",
        settings={"layer": 0},
        fingerprint="f",
    )


def test_factors_survive_pickle_and_check_their_shapes() -> None:
    again = pickle.loads(pickle.dumps(factors()))
    np.testing.assert_array_equal(again.rows, factors().rows)
    assert not again.rows.flags.writeable
    assert again.settings == {"layer": 0}
    with pytest.raises(InvalidInput, match="rest must be"):
        Factors(
            **{i.name: getattr(factors(), i.name) for i in fields(Factors) if i.init}
            | {"rest": np.zeros(3, dtype=np.float32)}
        )
    with pytest.raises(InvalidInput, match="one row per token"):
        Factors(**{i.name: getattr(factors(), i.name) for i in fields(Factors) if i.init} | {"tokens": ()})


def pending(compute: Any) -> Hit:
    return Hit(id="a", text="t", rank=1, score=0.5, metric="cosine", handle=Deferred(compute))


def test_a_lazy_explanation_is_computed_once_by_many_threads() -> None:
    calls = []

    def compute() -> Explanation:
        calls.append(1)
        return explain()

    hit = pending(compute)
    assert hit.status == "pending"
    assert hit.to_dict()["explanation"] is None
    assert not calls
    copied = copy.deepcopy(hit)
    threads = [threading.Thread(target=lambda: hit.explanation) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == [1]
    assert copied.explanation is hit.explanation
    assert hit.to_dict()["explanation"]["format"] == "rag_explain.explanation"


def test_a_failing_explanation_leaves_a_reason() -> None:
    def fail() -> Explanation:
        raise RuntimeError("the disk is full")

    hit = pending(fail)
    assert hit.explanation is None
    assert hit.status == "failed"
    assert hit.reason == "RuntimeError: the disk is full"


def test_a_pickled_hit_says_that_its_explanation_stayed_behind() -> None:
    hit = pickle.loads(pickle.dumps(pending(explain)))
    assert hit.status == "skipped"
    assert "pickled" in hit.reason
    ready = pickle.loads(pickle.dumps(hits()[0]))
    assert ready.explanation.query == hits()[0].explanation.query


def test_a_hit_with_any_metadata_becomes_json() -> None:
    metadata = {"score": np.float32(0.5), "missing": float("nan"), "path": {1, 2}, "object": object, 3: ("a",)}
    hit = Hit(id="a", text=HOSTILE[0], rank=1, score=0.5, metric="cosine", metadata=metadata)
    data = json.loads(json.dumps(hit.to_dict(), allow_nan=False))
    assert data["metadata"] == {"score": 0.5, "missing": None, "path": [1, 2], "object": str(object), "3": ["a"]}


def test_hits_are_a_tuple_and_their_repr_computes_nothing() -> None:
    found = Hits([pending(explain)])
    assert repr(found)
    assert found[0].status == "pending"
    assert isinstance(found[:1], Hits)
    assert found[0] is next(iter(found))
    assert isinstance(pickle.loads(pickle.dumps(hits())), Hits)


def test_every_result_shows_itself(tmp_path: Path) -> None:
    for result in (explain(), hits(), hits()[0], hits()[:1]):
        assert "password" in result._repr_html_()
        assert result.to_html(tmp_path / "page.html") == (tmp_path / "page.html").read_text(encoding="utf-8")
        console = Console(file=io.StringIO(), width=100)
        console.print(result)
        assert "adds up to the score" in console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO


def test_reprs_are_short() -> None:
    assert repr(explain()).startswith("Explanation(bilrp, ")
    assert len(repr(explain())) < 100
    assert "error=" in repr(factors())
