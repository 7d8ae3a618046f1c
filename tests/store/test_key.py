from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rag_explain.errors import InvalidInput
from rag_explain.store import factors_key
from rag_explain.texts.passage import Passage

SETTINGS = {
    "role": "document",
    "fingerprint": "aa",
    "method": "bilrp",
    "settings": {"layer": 0, "rules": "lrp"},
    "precision": "fp16",
}
CHANGES = [
    {},
    {"role": "query"},
    {"fingerprint": "ab"},
    {"method": "hxp"},
    {"settings": {"layer": 1, "rules": "lrp"}},
    {"settings": {"layer": 0}},
    {"settings": {"layer": 0.5, "rules": "lrp"}},
    {"precision": "int8"},
]


def test_every_part_of_the_key_changes_it() -> None:
    keys = [factors_key("a text", **{**SETTINGS, **change}) for change in CHANGES]
    texts = ["a text ", "A text", "", Passage("a text", 2, 6), Passage("a text", 0, 5)]
    keys += [factors_key(text, **SETTINGS) for text in texts]
    for left, right in combinations(keys, 2):
        assert left != right
    assert {len(key) for key in keys} == {32}


def test_the_same_text_has_the_same_key_however_it_is_given() -> None:
    settings = {"rules": "lrp", "layer": 0}
    assert factors_key(Passage("a text"), **SETTINGS) == factors_key("a text", **{**SETTINGS, "settings": settings})


@settings(deadline=None)  # a busy machine is slow, not wrong
@given(st.text(), st.text())
def test_fields_cannot_run_into_each_other(left: str, right: str) -> None:
    """The same characters, split differently between two fields, are two keys."""
    whole = left + right
    for cut in range(len(whole) + 1):
        other = {**SETTINGS, "fingerprint": whole[:cut], "method": whole[cut:]}
        ours = {**SETTINGS, "fingerprint": left, "method": right}
        assert (factors_key("x", **other) == factors_key("x", **ours)) == (cut == len(left))


def test_settings_that_are_not_plain_data_are_refused() -> None:
    with pytest.raises(InvalidInput, match="plain data"):
        factors_key("a", **{**SETTINGS, "settings": {"f": object()}})


def test_a_lone_surrogate_has_a_key() -> None:
    assert factors_key("\ud800", **SETTINGS) != factors_key("?", **SETTINGS)
