"""Which token of a pair is whose, where it stands in the caller's text, and what could not be read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from sentence_transformers import CrossEncoder

from rag_explain import Explainer, Explanation
from rag_explain.encoder.cross_encoder import PairEncoder
from rag_explain.errors import UnsupportedModel
from rag_explain.texts.passage import Passage, as_passages
from tests.support.cross_encoders import CHAT, cross

QUERY, DOCUMENT = "the cat looked", "a dog sat on the moon"
LONG = "the old dog ran over the bridge and looked at the moon again and again " * 8


def parts(tokens: Sequence[Any]) -> list[tuple[str, str]]:
    return [(token.label, token.part) for token in tokens]


def text_of(explanation: Explanation, side: str) -> str:
    """The stretch of the caller's text that the tokens of a side cover."""
    tokens = explanation.query_tokens if side == "query" else explanation.document_tokens
    text = explanation.query if side == "query" else explanation.document
    assert text is not None
    own = [token for token in tokens if token.part == "text"]
    assert all(token.text == text[token.start : token.end] for token in tokens)
    return text[own[0].start : own[-1].end] if own else ""


@pytest.mark.parametrize("name", ["bert", "roberta", "xlm-roberta", "deberta-v2", "modernbert", "qwen3", "qwen3-chat"])
def test_tokens_stand_in_the_callers_texts(name: str) -> None:
    explanation = Explainer(cross(name)).explain(f" {QUERY} ", f"  {DOCUMENT}\n")
    assert text_of(explanation, "query").strip() == QUERY
    assert text_of(explanation, "document").strip() == DOCUMENT
    assert [token.text for token in explanation.by_word().document_tokens] == DOCUMENT.split()


def test_special_tokens_belong_to_the_text_before_them() -> None:
    explanation = Explainer(cross("roberta")).explain("cat", "dog")
    frames = [[token.label for token in side if token.part == "special"] for side in _sides(explanation)]
    assert frames == [["[CLS]", "[SEP]", "[SEP]"], ["[SEP]"]]


def _sides(explanation: Explanation) -> tuple[Any, Any]:
    return explanation.query_tokens, explanation.document_tokens


def test_a_prompt_stands_before_the_query_and_is_no_part_of_it() -> None:
    model = cross("bert", prompts={"find": "find the moon: "}, default_prompt_name="find")
    explanation = Explainer(model).explain(QUERY, DOCUMENT)
    found = parts(explanation.query_tokens)
    assert [label for label, part in found if part == "prompt"][:2] == ["f", "##in"]
    assert [label for label, part in found if part == "text"] == ["the", "cat", "look", "ed"]
    assert explanation.returned == pytest.approx(float(model.predict([(QUERY, DOCUMENT)])[0]), abs=1e-6)
    plain = cross("bert", prompts={"find": "find the moon: "})  # which nothing asks for
    assert not any(part == "prompt" for _, part in parts(Explainer(plain).explain(QUERY, DOCUMENT).query_tokens))


@pytest.mark.parametrize("name", ["bert", "qwen3-chat"])
def test_metadata_around_a_document_is_read_and_marked(name: str) -> None:
    passage = Passage(f"title: moon\n\n{DOCUMENT} in paris", 13, 13 + len(DOCUMENT))
    model = cross(name)
    explanation = Explainer(model).explain(QUERY, passage)
    assert explanation.document == DOCUMENT
    assert text_of(explanation, "document") == DOCUMENT
    assert sum(part == "metadata" for _, part in parts(explanation.document_tokens)) > 5
    assert explanation.returned == pytest.approx(float(model.predict([(QUERY, passage.string)])[0]), abs=1e-6)


@pytest.mark.parametrize("name", ["bert", "qwen3"])
@pytest.mark.parametrize(
    ("query", "document", "cut"),
    [(QUERY, LONG, ("document",)), (LONG, DOCUMENT, ("query",)), (LONG, LONG, ("query", "document"))],
    ids=["document", "query", "both"],
)
def test_what_does_not_fit_is_told_of_each_text(name: str, query: str, document: str, cut: tuple[str, ...]) -> None:
    model = cross(name)
    explanation = Explainer(model).explain(query, document)
    assert explanation.truncated == cut
    for side, text in (("query", query), ("document", document)):
        read = text_of(explanation, side).rstrip()  # a lone blank is nothing that is missed
        assert text.startswith(read)
        assert (len(read) < len(text.strip())) == (side in cut)
        if side in cut:
            told = next(notice.text for notice in explanation.notices if notice.side == side)
            assert f"only the first {len(read)} of {len(text)} characters of the {side}" in told
    assert explanation.returned == pytest.approx(float(model.predict([(query, document)])[0]), abs=1e-6)


def test_a_shorter_limit_is_obeyed() -> None:
    explanation = Explainer(cross("bert", max_length=12)).explain(QUERY, DOCUMENT)
    assert explanation.truncated == ("document",)
    assert sum(map(len, _sides(explanation))) == 12


def test_the_end_of_a_chat_is_put_back_where_the_document_was_cut() -> None:
    model = cross("qwen3-chat")
    explanation = Explainer(model).explain(QUERY, LONG)
    assert explanation.truncated == ("document",)
    found = parts(explanation.document_tokens)
    assert [label for label, part in found if part == "special"] == ["Ċ", "f", "ou", "nd", ":", "Ġ"]
    assert found[-1][1] == "special"
    assert LONG.startswith(text_of(explanation, "document"))
    assert explanation.returned == pytest.approx(float(model.predict([(QUERY, LONG)])[0]), abs=1e-6)


def test_a_query_that_leaves_no_room_for_the_document_in_a_chat_is_told() -> None:
    explanation = Explainer(cross("qwen3-chat")).explain(LONG, DOCUMENT)
    assert explanation.truncated == ("query", "document")
    assert any("read nothing of the document" in notice.text for notice in explanation.notices)
    assert explanation.by_word().document_tokens == ()
    assert abs(explanation.gap or 0.0) < 1e-5


def test_the_prompt_of_a_chat_is_its_system_message() -> None:
    model = cross("qwen3-chat", prompts={"judge": "be fair"}, default_prompt_name="judge")
    explanation = Explainer(model).explain(QUERY, DOCUMENT)
    assert explanation.returned == pytest.approx(float(model.predict([(QUERY, DOCUMENT)])[0]), abs=1e-6)
    plain = Explainer(cross("qwen3-chat")).explain(QUERY, DOCUMENT)
    assert len(explanation.query_tokens) > len(plain.query_tokens)


@pytest.mark.parametrize(
    ("template", "is_told"),
    [
        (CHAT, True),
        (CHAT.replace("first }}", "first | upper }}"), False),
        (CHAT.replace("| trim", "| trim | truncate(9, True)"), False),
        (CHAT.replace("query {{", "query {{ 'twice' if messages else '' }} {{"), True),
    ],
    ids=["as it is", "in capitals", "cut", "with more"],
)
def test_a_template_must_say_both_texts_as_they_are(template: str, is_told: bool) -> None:
    model = cross("qwen3-chat")
    model[0].tokenizer.chat_template = template
    if is_told:
        assert text_of(Explainer(model).explain(QUERY, DOCUMENT), "document") == DOCUMENT
    else:
        with pytest.raises(UnsupportedModel, match="does not put both texts into its prompt as they are"):
            Explainer(model)


def test_a_template_may_put_the_document_first() -> None:
    model = cross("qwen3-chat")
    model[0].tokenizer.chat_template = (
        "{{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }} answers "
        "{{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }} found: "
    )
    explanation = Explainer(model).explain(QUERY, DOCUMENT)
    assert (text_of(explanation, "query"), text_of(explanation, "document")) == (QUERY, DOCUMENT)
    assert abs(explanation.gap or 0.0) < 1e-5


def test_a_text_that_is_said_twice_or_is_the_templates_own_is_found() -> None:
    explainer = Explainer(cross("qwen3-chat"))
    for query, document in (("document", "query"), ("found: ", "found: "), (DOCUMENT, DOCUMENT)):
        explanation = explainer.explain(query, document)
        assert (text_of(explanation, "query").strip(), text_of(explanation, "document").strip()) == (
            query.strip(),
            document.strip(),
        )


@pytest.mark.parametrize("name", ["bert", "qwen3-chat"])
def test_positions_are_those_of_the_sequence_whatever_the_padding(name: str) -> None:
    model: CrossEncoder = cross(name)
    encoder = PairEncoder(model)
    documents = as_passages([DOCUMENT, f"{DOCUMENT} and {DOCUMENT}"])
    pairs = encoder.read_pairs(Passage(QUERY), documents)
    alone = encoder.read_pairs(Passage(QUERY), documents[:1])
    ids = pairs.features["input_ids"]
    for side in (0, 1):
        (one, places), (other, own) = pairs.text(0, side), alone.text(0, side)
        assert parts(one.tokens) == parts(other.tokens)
        assert torch.equal(ids[0, places], alone.features["input_ids"][0, own])
    both = torch.cat([pairs.text(0, side)[1] for side in (0, 1)])
    assert sorted(both.tolist()) == pairs.positions(0).tolist()
    assert pairs.select([1, 0]).sides == (pairs.sides[1], pairs.sides[0])


def test_unknown_words_are_told_of_the_side_they_are_on() -> None:
    explanation = Explainer(cross("bert")).explain("the cat ✓✓", DOCUMENT)
    told = [notice for notice in explanation.notices if notice.code == "unknown"]
    assert [notice.side for notice in told] == ["query"]
