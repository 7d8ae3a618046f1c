"""What the papers warn of reaches the reader, measured on what is stored, and nothing is said when all is well."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rag_explain import Explainer, Explanation, Hit
from rag_explain.log import ExplanationLog
from rag_explain.render import sentences
from rag_explain.render.terminal import plain_text
from rag_explain.results.contrast import Contrast
from rag_explain.results.deferred import Deferred
from rag_explain.results.hits import Hits
from rag_explain.results.trust import Trust
from rag_explain.texts.segments import word_spans
from rag_explain.texts.tokens import Token
from tests.support.models import TEXTS, static, tiny
from tests.support.samples import explain

CANCELS = "most of it cancels, and negative values are less reliable"
ABOVE = "more than a score can be, and negative values are less reliable"
SPECIAL = Token("", 0, 0, "special", "[CLS]")


def made(pairs: Any, *, special: float = 0.0, rest: float = 0.0, **fields: Any) -> Explanation:
    """Two texts of two words after a special token, which carries `special` with the first word of the document."""
    text = "one two"
    tokens = (SPECIAL, Token("one", 0, 3), Token("two", 4, 7))
    matrix = np.zeros((4, 4), np.float32)
    matrix[1:3, 1:3], matrix[0, 1], matrix[3, 3] = pairs, special, rest
    texts: dict[str, Any] = {"query": text, "document": text, "query_tokens": tokens, "document_tokens": tokens}
    return Explanation(**texts, matrix=matrix, **{"score": float(matrix.sum()), "method": "bilrp", **fields})


def test_nothing_is_said_when_all_is_well() -> None:
    explanation = made([[0.5, 0.05], [0.05, -0.1]], special=0.1, settings={"layer": 0})
    trust = explanation.trust
    assert (trust.positive, trust.negative) == pytest.approx((0.6, -0.1))
    assert trust.no_word == pytest.approx(0.1 / 0.8)
    assert trust.doubts == ()
    assert sentences.trust(explanation) == ""
    assert "Trust" not in str(explanation) + explanation._repr_html_()


def test_values_that_cancel_are_said_to() -> None:
    # |sum| / sum of |pairs|: 0.2 / 0.9 is below a quarter, 0.3 / 1.0 is not.
    assert made([[0.5, 0.05], [0, -0.35]]).trust.doubts == (CANCELS,)
    assert made([[0.6, 0.05], [0, -0.35]]).trust.doubts == ()
    assert sentences.trust(made([[0.5, 0.05], [0, -0.35]])) == f"Trust: pairs +0.55 -0.35; {CANCELS}"


def test_a_not_that_hardly_counts_beside_the_strongest_word_is_named() -> None:
    def doubts(text: str, carried: dict[str, float]) -> tuple[str, ...]:
        tokens = tuple(Token(text[a:b], a, b) for a, b in word_spans(text))
        matrix = np.zeros((2, len(tokens) + 1), np.float32)
        matrix[0, :-1] = [carried.get(token.text, 0.0) for token in tokens]
        return replace(
            made([[0, 0], [0, 0]]), query="heal", query_tokens=(Token("heal", 0, 4),), document=text,
            document_tokens=tokens, matrix=matrix, score=float(matrix.sum()), unit="word",
        ).trust.doubts  # fmt: skip

    said = ("“not” hardly counts (+0.0100 beside heal)",)
    assert doubts("it does not heal", {"heal": 0.5, "not": 0.01}) == said
    assert doubts("it does not heal", {"heal": 0.5, "not": -0.06}) == ()  # more than a tenth
    assert doubts("it does heal", {"heal": 0.5}) == ()
    assert doubts("It heals. Do not sit.", {"heals": 0.5}) == ()  # another sentence
    assert doubts("It won't heal.", {"heal": 0.5}) == ("“won't” hardly counts (+0.0000 beside heal)",)


@pytest.mark.slow
def test_a_real_encoder_reads_over_not() -> None:
    with Explainer("all-MiniLM-L6-v2") as explainer:
        asked = "Does the drug work against migraine?"
        works, fails = explainer.explain_many(
            asked, [f"The drug {it} against migraine." for it in ("works", "does not work")]
        )
    assert fails.score > 0.85
    assert works.trust.doubts == ()
    assert [doubt for doubt in fails.trust.doubts if doubt.startswith("“not” hardly counts")]


def test_positive_values_above_any_score_are_said_to_be() -> None:
    assert made([[0.9, 0.2], [0, -0.2]]).trust.doubts == (ABOVE,)
    assert made([[0.9, 0.1], [0, -0.2]]).trust.doubts == ()
    # What has no largest value cannot exceed it.
    assert made([[9, 0.2], [0, -0.2]], measure="dot").trust.doubts == ()
    # With references the pairs can be as much more as the references are alike (paper 002, equation 4).
    left = {"f(a, r_b)": 0.0, "f(r_a, b)": 0.0, "f(r_a, r_b)": 0.9}
    assert ABOVE not in made([[1.7, 0.1], [0, 0]], rest=-0.9, references=left).trust.doubts
    assert ABOVE in made([[1.8, 0.2], [0, -0.1]], rest=-0.9, references=left).trust.doubts


def test_the_share_that_belongs_to_no_word_is_said_above_a_quarter() -> None:
    assert made([[0.5, 0.05], [0.05, 0.1]], special=0.2).trust.doubts == ()
    assert made([[0.5, 0.05], [0.05, 0.1]], special=0.3).trust.doubts == ("30% of all values belongs to no word",)
    assert made([[0.5, 0.05], [0.05, 0.1]], special=-0.15, rest=0.15).trust.no_word == pytest.approx(0.3)


def test_reference_terms_and_a_low_score_are_said() -> None:
    left = {"f(a, r_b)": 0.0, "f(r_a, b)": 0.05, "f(r_a, r_b)": 0.9}
    low = made([[0.8, 0.1], [0, 0]], rest=-0.85, references=left, method="ij")
    assert low.trust.doubts == ("+0.85 is the references', not the score's", "rough at a score below 0.5")
    assert low.trust.no_word is None  # the rest is references here
    high = made([[0.8, 0.1], [0, 0]], rest=-0.05, references=left, method="ij")
    assert high.trust.doubts == ()


def test_reference_terms_of_a_dot_product_are_measured_by_its_score() -> None:
    """0.1 and 0.5 are of cosines: a dot product has no such scale."""
    left = {"f(a, r_b)": 0.0, "f(r_a, b)": 0.4, "f(r_a, r_b)": 9.0}
    assert made([[8, 1], [0, 0]], rest=-0.8, references=left, method="ij", measure="dot").trust.doubts == ()
    assert made([[0.3, 0.1], [0, 0]], rest=0, references=left, method="ij", measure="dot").trust.doubts == ()
    told = made([[8, 1], [0, 0]], rest=-1, references=left, method="ij", measure="dot").trust.doubts
    assert told == ("+1.00 is the references', not the score's",)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"method": "bilrp"}, None),
        ({"method": "bilrp", "layer": 2}, "places at block 2"),
        ({"method": "ij"}, "places at block 1"),
        ({"method": "pooled"}, "last-layer vectors"),
        ({"method": "alignment"}, "last-layer vectors"),
        ({"method": "gradient", "layer": 1}, "places at block 1"),
    ],
    ids=str,
)
def test_positions_that_have_read_their_context_are_said_to(options: dict[str, Any], said: str | None) -> None:
    found = [doubt for doubt in Explainer(tiny(), **options).explain(*TEXTS).trust.doubts if "bare words" in doubt]
    assert [said in doubt for doubt in found if said] == ([True] if said else [])
    assert bool(found) == bool(said)


def test_static_word_vectors_are_bare_words() -> None:
    assert not [doubt for doubt in Explainer(static()).explain(*TEXTS).trust.doubts if "bare words" in doubt]


def test_what_only_ranks_has_no_sums_to_doubt() -> None:
    explanation = made([[0.5, 0.05], [0, -0.45]], additive=False, method="bti")
    assert explanation.trust.doubts == ("of last-layer vectors, which have read their texts, not of bare words",)
    assert sentences.trust(explanation).startswith("Trust: of last-layer vectors")


def test_tokens_and_their_words_are_trusted_alike() -> None:
    explanation = explain()
    assert explanation.trust == explanation.by_word().trust
    dropped = replace(explanation, query=None, document=None)  # which cannot be joined to words: nearly the same
    assert dropped.trust.no_word == pytest.approx(explanation.trust.no_word, abs=0.1)


def doubtful() -> Explanation:
    return made([[0.5, 0.05], [0, -0.35]], special=0.4, settings={"layer": 2})


LINE = (
    f"Trust: pairs +0.55 -0.35; {CANCELS}; 31% of all values belongs to no word; "
    "of places at block 2, which have read their texts, not of bare words"
)


def test_every_view_has_the_line_once() -> None:
    why = doubtful()
    hit = Hit(id="a", text=why.document, rank=1, score=0.6, metric="cosine", handle=Deferred.ready(why))
    for shown in (why, hit, Hits((hit,))):
        assert plain_text(shown._view(), 400).count(LINE) == 1
        assert shown._repr_html_().count(LINE) == 1
        assert shown.to_html().count(LINE) == 1
    contrast = plain_text(Contrast(why, why)._view(), 400)
    assert f"wanted: {LINE}" in contrast
    assert f"got: {LINE}" in contrast
    assert any("Trust: pairs" in text.get_text() for text in why.plot().texts)


def test_json_has_the_figures_and_reads_without_them() -> None:
    data = json.loads(doubtful().to_json())
    assert data["trust"]["positive"] == pytest.approx(0.55)
    assert len(data["trust"]["doubts"]) == 3
    del data["trust"]
    assert Explanation.from_dict(data).trust == doubtful().trust


@pytest.mark.parametrize("matrices", [True, False])
def test_a_logged_explanation_says_the_same(tmp_path: Path, matrices: bool) -> None:
    # More pairs than a log keeps: their sums are the original's all the same.
    why = explain().by_word()
    why = replace(why, matrix=why.matrix - why.pairs.mean(), settings={"layer": 2})
    why = replace(why, score=float(why.matrix.sum(dtype=np.float64)))
    hit = Hit(id="a", text=why.document, rank=1, score=0.6, metric="cosine", handle=Deferred.ready(why))
    with ExplanationLog(tmp_path, matrices=matrices) as log:
        log.record(query=str(why.query), answer="", hits=[hit])
    (record,) = ExplanationLog(tmp_path).records()
    logged = record.hits[0].explanation
    assert logged is not None
    assert (logged.pairs != 0).sum() == why.pairs.size if matrices else (logged.pairs != 0).sum() == 20
    expected = why.trust
    assert (logged.trust.positive, logged.trust.negative) == pytest.approx(
        (expected.positive, expected.negative), abs=1e-3
    )
    assert CANCELS in expected.doubts
    kept = [doubt for doubt in expected.doubts if matrices or "no word" not in doubt]  # which kept pairs do not tell
    assert list(logged.trust.doubts) == kept
    assert logged.trust.no_word == (pytest.approx(expected.no_word) if matrices else None)


def test_an_explanation_without_words_has_nothing_to_doubt() -> None:
    assert explain(query="", document="").trust.positive == 0
    empty = Explanation(
        query="", document="", query_tokens=(), document_tokens=(), matrix=np.zeros((1, 1)), score=0.0, method="bilrp"
    )
    assert empty.trust == Trust(0.0, 0.0, None, ())
