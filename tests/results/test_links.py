"""Links: each cell in one link at most, values in score units, offsets into the caller's own texts."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rag_explain.errors import InvalidInput
from rag_explain.results.explanation import Explanation
from rag_explain.results.links import find_links, linked_words
from rag_explain.texts.tokens import Token
from tests.support.samples import DOCUMENT, QUERY, explain
from tests.support.strategies import TEXTS, make

SHAPES = st.tuples(st.integers(0, 6), st.integers(0, 6))


def words_of(text: str) -> tuple[Token, ...]:
    starts = [0] + [place + 1 for place, letter in enumerate(text) if letter == " "]
    return tuple(Token(word, start, start + len(word)) for word, start in zip(text.split(), starts, strict=True))


def by_words(query: str, document: str, pairs: Any) -> Explanation:
    matrix = np.pad(np.array(pairs, dtype=np.float32), ((0, 1), (0, 1)))
    words = {"query_tokens": words_of(query), "document_tokens": words_of(document)}
    return Explanation(query=query, document=document, matrix=matrix, score=1.0, method="bilrp", unit="word", **words)


def cells_of(shape: tuple[int, int], seed: int, levels: int) -> np.ndarray:
    """Cells of both signs; with few levels many of them are equal, and whole rows zero."""
    generator = np.random.default_rng(seed)
    cells = generator.normal(size=shape) if levels == 0 else generator.integers(-levels, levels + 1, shape)
    return cells.astype(np.float32)


def oracle(pairs: np.ndarray) -> list[tuple[int, int]]:
    """The definition, word by word, with nothing shared."""
    n, m = pairs.shape

    def strength(i: int, j: int) -> float:
        if not (0 <= i < n and 0 <= j < m):
            return 0.0
        row, column = sum(abs(float(x)) for x in pairs[i]), sum(abs(float(x)) for x in pairs[:, j])
        return float(pairs[i, j]) / (math.sqrt(row) * math.sqrt(column)) if row and column else 0.0

    def support(i: int, j: int) -> float:
        return strength(i, j) + 0.2 * strength(i - 1, j - 1) + 0.2 * strength(i + 1, j + 1)

    def is_best(value: float, before: list[float], after: list[float]) -> bool:
        return all(value > other + 1e-12 for other in before) and all(value >= other - 1e-12 for other in after)

    return [
        (i, j)
        for i in range(n)
        for j in range(m)
        if is_best(support(i, j), [support(i, x) for x in range(j)], [support(i, x) for x in range(j + 1, m)])
        and is_best(support(i, j), [support(x, j) for x in range(i)], [support(x, j) for x in range(i + 1, n)])
        and strength(i, j) * math.sqrt(n * m) > 1 - 1e-9
    ]


@given(SHAPES, st.integers(0, 10_000))
@settings(max_examples=200)
def test_linked_words_are_those_of_the_definition(shape: tuple[int, int], seed: int) -> None:
    cells = cells_of(shape, seed, levels=0)
    assert linked_words(cells.astype(np.float64)) == oracle(cells)


@given(SHAPES, st.integers(0, 10_000), st.integers(0, 2))
@settings(max_examples=200)
def test_every_cell_is_in_one_link_at_most_and_values_are_sums_of_cells(
    shape: tuple[int, int], seed: int, levels: int
) -> None:
    cells = cells_of(shape, seed, levels)
    words = [tuple(Token("w", 2 * place, 2 * place + 1) for place in range(count)) for count in shape]
    texts = ("w " * shape[0], "w " * shape[1])
    links = find_links(cells, *words, texts)
    taken: tuple[set[int], set[int]] = (set(), set())
    for link in links:
        places = [range(one.start // 2, one.end // 2 + 1) for one in (link.query, link.document)]
        for side, words_taken in zip(places, taken, strict=True):
            assert not words_taken & set(side)
            words_taken.update(side)
        block = cells[places[0].start : places[0].stop, places[1].start : places[1].stop]
        assert block.shape[0] == block.shape[1]
        assert link.value == pytest.approx(float(block.sum(dtype=np.float64)))
        assert link.value > 0
        assert (block > 0).any(axis=1).all()  # every word has a pair of its own in it
    assert [link.value for link in links] == sorted((link.value for link in links), reverse=True)
    assert find_links(cells, *words, texts) == links
    linked = {(i, j) for i, j in linked_words(cells.astype(np.float64))}
    assert {i for i, _ in linked} == taken[0]
    assert {j for _, j in linked} == taken[1]
    assert all(cells[place] > 0 for place in linked)


@given(TEXTS, TEXTS, st.integers(0, 9), st.booleans())
@settings(max_examples=60)
def test_offsets_point_into_the_texts_whatever_these_are(query: str, document: str, seed: int, truncated: bool) -> None:
    explanation = make(query, document, seed, truncated)
    for link in explanation.links():
        assert query[link.query.start : link.query.end] == link.query.text != ""
        assert document[link.document.start : link.document.end] == link.document.text != ""
    assert explanation.by_word().links() == explanation.links()


def test_neighbours_become_phrases_and_tell_equal_words_apart() -> None:
    pairs = [
        [0.02, 0.0, 0.02, 0.0],  # "the" is as like to one "the" as to the other
        [0.0, 0.0, 0.01, 0.3],
    ]
    explanation = by_words("the dog", "the cat the dog", pairs)
    (link,) = explanation.links()
    assert (link.query.text, link.document.text) == ("the dog", "the dog")
    assert (link.document.start, link.document.end) == (8, 15)
    assert link.value == pytest.approx(0.02 + 0.0 + 0.01 + 0.3)


def test_words_in_another_order_are_a_phrase_too() -> None:
    explanation = by_words("run fast", "fast run", [[0.0, 0.4], [0.5, 0.1]])
    assert [(one.query.text, one.document.text) for one in explanation.links()] == [("run fast", "fast run")]


def test_words_whose_other_cells_speak_against_it_are_no_phrase() -> None:
    explanation = by_words("not good", "not bad", [[0.4, -0.3], [-0.3, 0.5]])
    found = [(one.query.text, one.document.text, one.value) for one in explanation.links()]
    assert found == [("good", "bad", pytest.approx(0.5)), ("not", "not", pytest.approx(0.4))]


def test_one_word_and_its_only_partner_are_linked_when_they_carry_something() -> None:
    for value in (0.3, 1e-30, 1e30):
        (link,) = by_words("a", "b", [[value]]).links()
        assert link.value == pytest.approx(value)
    assert by_words("a", "b", [[-0.3]]).links() == ()
    assert by_words("a", "b", [[0.0]]).links() == ()


def test_equal_cells_link_the_first_words() -> None:
    (link,) = by_words("a b", "c d", np.ones((2, 2))).links()[:1]
    assert link.query.text.startswith("a")
    assert link.document.text.startswith("c")


def test_scaling_the_matrix_scales_the_values_and_nothing_else() -> None:
    explanation = explain()
    scaled = replace(explanation, matrix=explanation.matrix * 4)
    for one, other in zip(explanation.links(), scaled.links(), strict=True):
        assert (one.query, one.document) == (other.query, other.document)
        assert other.value == pytest.approx(4 * one.value)


def test_links_say_what_belongs_together_and_k_limits_them() -> None:
    explanation = explain()
    links = explanation.links()
    found = {(one.query.text.split()[-1], one.document.text.split()[-1]) for one in links}
    assert ("reset", "reset") in found
    assert explanation.links(2) == links[:2]
    assert explanation.links(0) == explanation.links(-1) == ()
    assert explain("", DOCUMENT).links() == explain(QUERY, "").links() == ()


def test_a_link_is_plain_data() -> None:
    (link, *_) = explain().links()
    data = json.loads(json.dumps(link.to_dict()))
    assert data["query"] == {"text": link.query.text, "start": link.query.start, "end": link.query.end}
    assert data["document"]["text"] == DOCUMENT[data["document"]["start"] : data["document"]["end"]]
    assert data["value"] == link.value


def test_links_need_words() -> None:
    with pytest.raises(InvalidInput, match="by sentences cannot be split into words"):
        explain().by_sentence().links()
    with pytest.raises(InvalidInput, match="without the texts"):
        replace(explain(), document=None).links()


def test_links_of_words_without_their_texts_keep_their_places_only() -> None:
    words = explain().by_word()
    silent = replace(words, query=None, document=None)
    for one, other in zip(words.links(), silent.links(), strict=True):
        assert other.query.text == other.document.text == ""
        assert (other.query.start, other.document.end, other.value) == (one.query.start, one.document.end, one.value)
