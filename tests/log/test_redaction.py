"""What may not be written is written nowhere: in no key, no notice, no setting; and names that programs need stay."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rag_explain import Explainer
from rag_explain.errors import InvalidInput
from rag_explain.log import patterns
from rag_explain.log.record import PendingRecord, Record
from rag_explain.log.redaction import Policy, digest, mask
from rag_explain.methods import METHODS
from rag_explain.results.deferred import Deferred
from rag_explain.results.hits import Hit
from rag_explain.results.notices import OTHER_RANKING, TRUNCATED, Notice
from rag_explain.texts.tokens import Token
from tests.support.models import model_for
from tests.support.samples import QUERY, explain, hits, hostile

SECRET = "Zanzibar"
LEAK = f"The letter of {SECRET} says so"


def everywhere(text: str) -> PendingRecord:
    """An answer in which every string but the ids holds `text`."""
    query_tokens = (Token("", 0, 0, "prompt", text), *explain(text, text).query_tokens[1:])
    odd: dict[str, Any] = {"query_tokens": query_tokens, "measure": text, "provenance": {text: {text: [text]}, "n": 1}}
    notices = (Notice(text, text), Notice(OTHER_RANKING, text, "note", "query"))
    found = []
    for hit in hostile(text):
        why = hit.explanation
        handle = hit.handle if why is None else Deferred.ready(replace(why, **odd, notices=notices))
        found.append(replace(hit, id="doc", handle=handle, around=(text, text)))
    for status, reason in (("failed", f"ValueError: {text}"), ("skipped", text.replace(" ", ""))):
        handle = Deferred(None, status=status, reason=reason)
        found.append(replace(found[0], handle=handle, metadata={"deep": [{text: {text: (text,)}}]}))
    return PendingRecord(text, text, found, {text: text, "deep": [{text: text}]})


@pytest.mark.parametrize("text", [LEAK, SECRET])
@pytest.mark.parametrize("policy", [{"redact": patterns(SECRET)}, {"keep_text": False}])
def test_no_channel_lets_a_text_through(policy, text):
    pending = everywhere(text)
    if "keep_text" in policy:
        pending.metadata = {}  # the caller's own metadata are kept
    raw = Record.of(pending, Policy(matrices=True, **policy)).to_line()
    assert SECRET.lower() not in raw.decode().lower()
    record = Record.from_line(raw)
    assert record.to_line() == raw
    why = record.hits[0].explanation
    assert why is not None
    assert why.surrogate  # a stand-in is still known as one
    assert [notice.level for notice in why.notices] == ["warning", "note"]
    assert why.notices[1].code == OTHER_RANKING
    assert why.provenance["n" if "redact" in policy else digest("n")] == 1


def test_keys_are_masked_and_keys_that_become_equal_lose_no_value():
    given = {"anna": 1, "bert": 2, "note": {"anna": "bert", "bert": "anna"}, "████ (2)": 3, "cleo": [{"cleo": 4}]}
    masked = mask(given, patterns("anna|bert|cleo"))
    assert masked == {
        "████": 1,
        "████ (2)": 2,
        "note": {"████": "████", "████ (2)": "████"},
        "████ (2) (2)": 3,
        "████ (3)": [{"████": 4}],
    }


@pytest.mark.parametrize("method", METHODS)
def test_without_texts_the_librarys_own_words_stay(method):
    why = Explainer(model_for(method), method).explain(QUERY, "The bank is closed.")
    hit = replace(hits()[0], handle=Deferred.ready(why))
    record = Record.of(PendingRecord(QUERY, None, [hit]), Policy(keep_text=False))
    read = record.logged_hits[0].explanation.outline
    for name in ("method", "measure", "settings", "references", "provenance", "fingerprint"):
        assert getattr(read, name) == getattr(why, name), name
    assert read.model == digest(why.model)
    assert [(n.code, n.level, n.side) for n in read.notices] == [(n.code, n.level, n.side) for n in why.notices]
    assert (read.surrogate is None) == (why.surrogate is None)
    assert record.logged_hits[0].metric == "cosine"


def test_a_redacted_record_says_what_programs_must_know():
    """A hook that masks everything leaves codes, ids, hashes and the library's own words."""
    why = explain(limit=5, surrogate="reranked by hand")
    hit = replace(hits()[0], handle=Deferred.ready(why))
    record = Record.of(PendingRecord(QUERY, None, [hit]), Policy(redact=lambda text: [(0, len(text))]))
    read = record.hits[0].explanation
    assert read.truncated == ("document",)
    assert set(read.surrogate) == {"█"}
    assert (record.hits[0].id, record.hits[0].metric, read.method) == ("doc-1", "cosine", "bilrp")
    assert read.notices[0] == why.notices[0]  # it counts characters, and quotes none
    assert read.notices[0].code == TRUNCATED


def test_ids_are_never_masked():
    """Erasing a document, and finding a record, take its id."""
    hit = replace(hits()[0], id="anna-17")
    data = json.loads(Record.of(PendingRecord(QUERY, None, [hit]), Policy(redact=patterns("anna"))).to_line())
    assert (data["documents"], data["hits"][0]["id"]) == (["anna-17"], "anna-17")


def test_ids_and_numbers_of_other_kinds_are_written_as_what_a_reader_expects():
    hit = replace(hits()[0], id=17, rank=np.int64(2), score=np.float32(0.5))
    record = Record.from_line(Record.of(PendingRecord(QUERY, None, [hit]), Policy()).to_line())
    assert (record.documents, record.hits[0].rank, record.hits[0].score) == (("17",), 2, 0.5)


@pytest.mark.parametrize(
    "given", [iter, tuple, lambda found: (hit for hit in found), lambda found: dict.fromkeys(found)]
)
def test_hits_may_come_from_any_iterable(given):
    record = Record.of(PendingRecord(QUERY, None, given(hits())), Policy())
    assert record.documents == ("doc-1", "doc-2")


@pytest.mark.parametrize("given", [None, 7, hits()[0]])
def test_hits_that_are_no_list_are_refused_in_words(given):
    with pytest.raises(InvalidInput, match="hits must be"):
        PendingRecord(QUERY, None, given)


def test_a_hit_that_is_no_hit_is_refused_inside_a_generator_too():
    assert isinstance(hits()[0], Hit)
    with pytest.raises(InvalidInput, match="Hit objects, not str"):
        PendingRecord(QUERY, None, (item for item in [*hits(), "odd"]))
