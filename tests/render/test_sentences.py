"""What the views share: units, sentences, pieces of a text, and nothing that acts instead of being seen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rag_explain.errors import InvalidInput
from rag_explain.render import sentences
from rag_explain.render.views.explanation import UNREAD_SHOWN, in_unit, pieces, warnings
from rag_explain.results.deferred import Deferred
from rag_explain.results.explanation import Explanation
from rag_explain.results.hits import Hit
from rag_explain.results.notices import METHOD, MISMATCH, OTHER_RANKING, Notice
from rag_explain.results.stages import Stage
from rag_explain.texts.tokens import Token
from tests.support.samples import DOCUMENT, HOSTILE, explain, hits
from tests.support.strategies import TEXTS, make


@given(TEXTS, TEXTS, st.integers(0, 9), st.booleans())
@settings(max_examples=60)
def test_the_pieces_are_the_whole_text_in_order(query: str, document: str, seed: int, truncated: bool) -> None:
    explanation = make(query, document, seed, truncated)
    for shown in (in_unit(explanation), explanation.by_sentence(), explanation):
        found = pieces(shown, "document")
        assert "".join(piece.text for piece in found).replace("\n", "") == sentences.visible(document).replace("\n", "")
        met = [piece.token for piece in found if piece.token is not None]
        assert met == sorted(set(met))
        if shown.unit != "token":
            assert met == list(range(len(shown.document_tokens)))


def test_the_unseen_tail_is_shown_as_unseen_and_counted() -> None:
    shown = in_unit(explain(limit=20))
    last = pieces(shown, "document")[-1]
    assert not last.is_read
    assert DOCUMENT.endswith(last.text)
    long = in_unit(explain(document=DOCUMENT + " more" * 1000, limit=20))
    tail = pieces(long, "document")[-1]
    assert len(tail.text) < UNREAD_SHOWN + 40
    assert tail.text.endswith("more characters")
    assert "read only the first" in sentences.unread(long, "document")[0]


def test_a_text_cut_at_its_beginning_shows_the_unseen_head() -> None:
    explanation = explain()
    start = DOCUMENT.index("A link")
    keep = [i for i, token in enumerate(explanation.document_tokens) if token.start >= start or token.part != "text"]
    tokens = tuple(explanation.document_tokens[i] for i in keep)
    shown = explain(
        document_tokens=tokens, matrix=explanation.matrix[:, [*keep, -1]], truncated=("document",)
    ).by_word()
    first, *rest = pieces(shown, "document")
    assert not first.is_read
    assert first.text == DOCUMENT[:start]
    assert all(piece.is_read for piece in rest)


def test_tokens_that_share_a_character_show_it_once() -> None:
    text = "🙂!"
    tokens = (Token("🙂", 0, 1), Token("🙂", 0, 1), Token("!", 1, 2))
    matrix = np.zeros((4, 4), dtype=np.float32)
    explanation = Explanation(
        query=text, document=text, query_tokens=tokens, document_tokens=tokens, matrix=matrix, score=0, method="m"
    )
    assert [piece.text for piece in pieces(explanation, "document")] == ["🙂", "!"]


@given(st.text())
def test_what_is_shown_neither_moves_the_cursor_nor_turns_text_around(text: str) -> None:
    shown = sentences.visible(text)
    shown.encode()
    assert not any(ord(c) < 32 and c not in "\n\t" for c in shown)
    assert not set(shown) & {"\x1b", "\x7f", "\x9b", "\u202d", "\u202e"}


def test_units() -> None:
    explanation = explain()
    assert in_unit(explanation).unit == "word"
    assert in_unit(explanation, "token") is explanation
    assert in_unit(explanation, "sentence").unit == "sentence"
    assert in_unit(explanation.by_sentence()).unit == "sentence"
    with pytest.raises(InvalidInput, match="cannot be shown by tokens"):
        in_unit(explanation.by_word(), "token")


def test_words_without_text_are_numbered() -> None:
    dropped = in_unit(replace(explain(), query=None, document=None))
    assert dropped.unit == "token"
    assert [piece.text for piece in pieces(dropped, "document")][:3] == ["[CLS] ", "2 ", "3 "]
    assert any("not kept" in notice for notice in sentences.notices(dropped))


def test_whether_it_adds_up_is_said() -> None:
    exact = explain()
    assert sentences.balance(exact).startswith("adds up to the score, gap ")
    assert sentences.balance(explain(score=exact.score + 0.05)).startswith("does not add up to the score, gap +5.0e-02")
    assert "does not claim to add up" in sentences.balance(explain(method="bti", additive=False))


def test_notices_and_source_name_what_a_reader_must_know() -> None:
    explanation = explain(surrogate="a reranker made\x1b the score", references={"query": 0.25})
    assert [line.text for line in warnings(explanation)] == [
        "Stand-in: a reranker made\ufffd the score",
        "References: query 0.25",
    ]
    assert sentences.source(explanation) == "bilrp · all-MiniLM-L6-v2 · layer 0"


def test_facts_of_a_hit() -> None:
    exact = explain(matrix=np.zeros_like(explain().matrix), score=0.78)
    hit = Hit(id="a", text=None, rank=1, score=0.42, metric="squared L2", handle=Deferred.ready(exact))
    assert sentences.facts(hit) == "0.4200 squared L2 · exact similarity 0.7800 · the index differs by +0.0100"
    assert sentences.facts(replace(hit, score=None)) == "no score of its own · exact similarity 0.7800"
    assert sentences.facts(hits()[0]).endswith(" cosine")
    found = Stage("index", "search", 3, None, 0.42, "squared L2")
    staged = replace(hit, score=2.0, metric="unknown", stages=(found, Stage("Filter", "filter", 2, 3)))
    before = "rank 2 after Filter; before that rank 3 by index (0.4200 squared L2)"
    more = " · exact similarity 0.7800 · the index differs by +0.0100"
    assert sentences.facts(staged) == "rank 2 after Filter" + more  # the table of stages tells the others
    assert sentences.ranked(staged.stages) == before
    staged = replace(staged, stages=(*staged.stages, Stage("Reranker", "rerank", 1, 2, 2.0)))
    assert sentences.facts(staged) == f"rank 1 by Reranker (2.0000){more}"
    assert sentences.ranked(staged.stages) == f"rank 1 by Reranker (2.0000); before that {before}"
    assert sentences.ranked((found, Stage("x", "rerank", None, 3))).startswith("by x (no score); before that rank 3 by")
    assert not sentences.ranked((found,))
    assert (
        sentences.missing(Hit(id="a", text=None, rank=1, score=0.42, metric="cosine"))
        == "No explanation (skipped): not asked for"
    )


def test_hostile_names_are_harmless() -> None:
    for text in HOSTILE:
        assert "\x1b" not in sentences.name(Token(text, 0, len(text)), 0)


def test_one_line_is_one_line_whatever_the_text_holds() -> None:
    assert sentences.one_line("a\nb\t\u2028c\x1b[2J\r\nd") == "a b c\ufffd[2J d"
    assert sentences.one_line("abcdef", 4) == "abc…"
    assert sentences.one_line("abcd", 4) == "abcd"
    assert sentences.one_line(None, 4) == "(no text)"
    # What would turn the rest of the line around is left out; what only joins letters stays.
    assert sentences.one_line("a\u202b\u2066b\u202ec \u200dd") == "abc \u200dd"


@given(st.text(), st.integers(1, 40))
def test_one_line_is_never_too_long(text: str, width: int) -> None:
    line = sentences.one_line(text, width)
    assert len(line) <= width
    assert line == " ".join(line.splitlines())


def test_every_stored_notice_is_shown() -> None:
    notes = (Notice(METHOD, "one cell"), Notice(MISMATCH, "another model"), Notice(OTHER_RANKING, "a reranker"))
    assert sentences.notices(explain().with_notices(*notes)) == [
        "Stand-in: another model; a reranker",
        "Note: one cell",
    ]
