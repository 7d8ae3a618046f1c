"""A passage's text lies in its string; anything else is refused when the passage is made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rag_explain.errors import InvalidInput
from rag_explain.texts.passage import Passage


@pytest.mark.parametrize(
    "arguments",
    [
        ("hello", -5),
        ("hello", 3, 2),
        ("hello", 6),
        ("hello", 0, 6),
        ("hello", 0, -2),
        ("hello", "1"),
        ("hello", 1.0),
        ("hello", True),
        ("hello", 0, None),
        ("hello", np.array([1, 2])),
        (None,),
        (b"hello", 0, 1),
    ],
)
def test_a_text_that_does_not_lie_in_the_string_is_refused(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidInput, match="must"):
        Passage(*arguments)


def test_where_the_text_stands() -> None:
    assert Passage("hello").text == "hello"
    assert Passage("hello", 2).around == ("he", "")
    assert Passage("hello", 5).text == Passage("").text == ""
    passage = Passage("hello", np.int64(1), np.int32(3))  # type: ignore[arg-type]  # as numpy and pandas give them
    assert passage == Passage("hello", 1, 3)
    assert type(passage.start) is int
