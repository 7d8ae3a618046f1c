"""Lookup: which text of a state is the question or the answer, and when none is."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import BaseModel

from rag_explain.errors import InvalidInput
from rag_explain.log.states import ANSWER_KEYS, Lookup, member


class Said(BaseModel):
    answer: str | None = None
    output: Any = None


@dataclass
class Result:
    result: Any


class Opaque:
    """Has an attribute of that name, and is no state."""

    answer = "of something else"


Pair = namedtuple("Pair", "answer pages")


def lookup(key: Any = None) -> Lookup:
    return Lookup("answer_key", key, ANSWER_KEYS, lambda value: value if isinstance(value, str) else None)


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ("said", "said"),
        ({"answer": "said", "output": "else"}, "said"),
        ({"answer": None, "output": "said"}, "said"),
        ({"output": {"result": "said"}}, "said"),
        (Said(answer="said"), "said"),
        (Said(output=Result("said")), "said"),
        (Pair("said", [7]), "said"),
        (("said", [7]), "said"),
        (("said", "or said"), None),
        (["said"], None),
        ({"draft": "a long text that is no answer"}, None),
        (Opaque(), None),
        (42, None),
        (None, None),
    ],
)
def test_only_where_a_text_stands_tells_that_it_is_the_answer(state, text):
    assert lookup().find(state) == text


def test_the_users_key_is_the_only_one_that_is_looked_at():
    assert lookup("final").find({"final": "said", "answer": "else"}) == "said"
    assert lookup("final").find({"answer": "else"}) is None
    assert lookup("final").find({"final": Said(answer="said")}) == "said"
    assert lookup(lambda state: state["final"]["text"]).find({"final": {"text": "said"}}) == "said"


def test_a_function_is_not_asked_about_nothing(caplog):
    assert lookup(lambda state: state["final"]).find(None) is None
    assert not caplog.text


def test_what_is_not_of_this_run_does_not_count():
    state = {"answer": "of an earlier turn", "response": "said"}
    assert lookup().find(state, lambda name: name != "answer") == "said"
    assert lookup("answer").find(state, lambda name: name != "answer") is None


def test_a_state_that_holds_itself_costs_only_the_text_and_is_said(caplog):
    state: dict[str, Any] = {}
    state["answer"] = state
    assert lookup().find(state) is None
    assert "answer_key: nothing can be told from a dict: RecursionError" in caplog.text


def test_a_key_that_is_neither_a_name_nor_a_function_is_refused():
    with pytest.raises(InvalidInput, match="answer_key must be the name of a key or a function of the state, not list"):
        lookup(["final"])


def test_a_member_of_what_is_no_state_is_none():
    assert member("text", "title") is None
    assert member(Opaque(), "answer") is None
