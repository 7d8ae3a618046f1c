"""The record format: round trips, what no-text and redaction leave out, what a digest notices."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rag_explain.errors import FormatError, InvalidInput
from rag_explain.log import patterns
from rag_explain.log.record import Entry, Policy, decode, digest, encode, head, whole
from rag_explain.results.deferred import Deferred
from rag_explain.texts.tokens import Token
from tests.support.answers import DOCUMENTS, QUERY, explanation, hit, hits


def line(policy: Policy | None = None, **changes) -> bytes:
    fields = {"query": QUERY, "answer": "By the sun.", "hits": hits(), "metadata": {"user": "anna", "hits": [1]}}
    return encode(Entry.of(**{**fields, **changes}), policy or Policy())


def test_a_record_carries_what_integrity_needs():
    data = json.loads(line())
    assert data["format"] == "rag_explain.log"
    assert data["version"] == 1
    assert data["library"]
    assert data["query"] == {"text": QUERY, "hash": digest(QUERY)}
    first = data["hits"][0]
    assert first["hash"] == digest(DOCUMENTS[0])
    assert digest("a") == "sha256:ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"
    why = first["explanation"]
    assert (why["method"], why["fingerprint"], why["settings"]) == ("bilrp", "f" * 32, {"layer": 0, "rules": "lrp"})
    assert why["gap"] == pytest.approx(1e-7, abs=1e-9)


def test_the_strongest_pairs_come_back_by_word_with_their_shares_among_all():
    record = decode(line(Policy(top=4)))
    original = hits()[0].explanation.by_word()
    for kept, expected in zip(record.pairs(0), original.top_pairs(4), strict=True):
        assert (kept.query.text, kept.document.text) == (expected.query.text, expected.document.text)
        assert kept.value == pytest.approx(expected.value, rel=1e-5)
        assert kept.share == pytest.approx(expected.share, rel=1e-4)


def test_without_the_matrix_the_explanation_is_the_kept_pairs_and_says_so():
    original = hits()[0].explanation
    read = decode(line(Policy(top=4))).hits[0].explanation
    assert read.score == original.score
    assert read.gap == pytest.approx(original.gap, abs=1e-6)
    n_q, n_d = original.by_word().pairs.shape
    assert read.provenance["kept"] == f"the strongest 4 of {n_q * n_d} pairs"
    assert np.count_nonzero(read.pairs) == 4
    assert read.unit == "word"


def test_with_the_matrix_the_explanation_comes_back_whole():
    original = hits()[0].explanation
    read = decode(line(Policy(matrices=True))).hits[0].explanation
    assert read.to_dict() == original.to_dict()


def test_similarities_come_back_too():
    n_q, n_d = explanation().pairs.shape
    similarities = np.arange(n_q * n_d, dtype=np.float32).reshape(n_q, n_d)
    why = explanation(similarities=similarities, additive=False)
    for policy in (Policy(matrices=True), Policy()):
        read = decode(line(policy, hits=[hit(handle=Deferred.ready(why))])).hits[0].explanation
        assert read.gap is None
    read = decode(line(Policy(matrices=True), hits=[hit(handle=Deferred.ready(why))])).hits[0].explanation
    assert np.array_equal(read.similarities, similarities)


def test_hits_come_back_as_hits():
    read = decode(line()).hits
    for back, original in zip(read, hits(), strict=True):
        for name in ("id", "text", "rank", "score", "metric", "status"):
            assert getattr(back, name) == getattr(original, name)
        assert dict(back.metadata) == dict(original.metadata)


def test_skipped_and_failed_hits_say_why():
    failing = Deferred(lambda: 1 / 0)
    record = decode(line(hits=[hit(handle=Deferred(None, status="skipped", reason="too long")), hit(handle=failing)]))
    assert [(h.status, h.reason) for h in record.hits] == [
        ("skipped", "too long"),
        ("failed", "ZeroDivisionError: division by zero"),
    ]
    assert record.data["explained"] == 0


def test_a_pending_hit_is_computed_or_left():
    entry = Entry.of(QUERY, None, [hit(handle=Deferred(explanation))], None)
    left = decode(encode(entry, Policy(), compute=False))
    assert left.data["hits"][0]["status"] == "pending"
    assert entry.hits[0].status == "pending"
    assert left.hits[0].explanation is None
    assert "not computed" in left.hits[0].reason
    assert decode(encode(entry, Policy(), compute=True)).hits[0].explanation is not None


def test_no_text_means_no_text_anywhere():
    raw = line(
        Policy(keep_text=False, matrices=True),
        hits=[*hits(), hit(handle=Deferred(lambda: (_ for _ in ()).throw(ValueError(QUERY))))],
        metadata={},
    )
    lowered = raw.decode().lower()
    words = {word.strip("?.").lower() for word in f"{QUERY} {' '.join(DOCUMENTS)} bees.md".split()}
    assert not [word for word in words if len(word) > 3 and word in lowered]
    record = decode(raw)
    assert record.query is None
    assert record.answer is None
    read = record.hits[0].explanation
    assert np.array_equal(read.matrix, hits()[0].explanation.matrix)
    assert {token.label for token in read.document_tokens} == {"", "[CLS]", "[SEP]"}
    assert record.hits[-1].reason == "ValueError"
    assert record.pairs(0)[0].document.end > 0


def test_redaction_masks_every_string_and_keeps_offsets():
    policy = Policy(redact=patterns("(?i)bees", "anna"), matrices=True, top=1000)
    raw = line(policy, answer="bees do", metadata={"user": "anna", "deep": [{"x": "bees"}]})
    assert "bees" not in raw.decode().lower().replace("bees.md", "")
    assert "anna" not in raw.decode()
    record = decode(raw)
    assert record.query == "How do ████ find their way home?"
    assert record.data["query"]["hash"] == digest(QUERY)
    assert record.hits[0].text.startswith("Honey████ navigate")
    assert record.metadata == {"user": "████", "deep": [{"x": "████"}]}
    pieces = {token.piece for token in record.hits[0].explanation.document_tokens}
    assert "navigate" in pieces
    assert "honeybees" not in pieces
    words = {pair.document.text for pair in record.pairs(0)}
    assert "Honey████" in words


def test_metadata_that_was_embedded_does_not_slip_past_the_redaction():
    why = explanation()
    tokens = (*why.document_tokens[:-1], Token("", 0, 0, "metadata", "anna@example.org"))
    found = hit(handle=Deferred.ready(explanation(document_tokens=tokens)))
    for policy, kept in ((Policy(matrices=True), True), (Policy(matrices=True, redact=patterns("anna")), False)):
        read = decode(line(policy, hits=[found], metadata={})).hits[0].explanation
        assert any("anna" in token.piece for token in read.document_tokens) is kept


def test_a_bad_redaction_hook_is_an_error_and_not_a_leak():
    with pytest.raises(InvalidInput, match="span"):
        line(Policy(redact=lambda text: [(0, len(text) + 1)]))


def test_a_key_makes_hashes_unguessable():
    key = b"0123456789abcdef"
    assert json.loads(line(Policy(hash_key=key)))["query"]["hash"] == digest(QUERY, key) != digest(QUERY)
    with pytest.raises(InvalidInput, match="16 bytes"):
        Policy(hash_key=b"short")


def test_a_query_that_the_chain_rewrote_is_kept_beside_its_hit():
    record = decode(line(query="and those insects?", hits=hits()))
    assert record.query == "and those insects?"
    assert record.asked(0) == QUERY
    assert record.hits[0].explanation.query == QUERY
    assert record.pairs(0)[0].query.text in QUERY


def test_the_head_is_read_without_the_hits():
    raw = line(query='tricky ,"hits":[ "quoted"', hits=hits('tricky ,"hits":[ "quoted"'))
    read = head(raw)
    assert read["query"]["text"] == 'tricky ,"hits":[ "quoted"'
    assert read["documents"] == ["doc-0", "doc-1", "doc-2"]
    assert "hits" not in read


@settings(deadline=None)  # time is not what is tested
@given(st.data())
def test_half_a_line_or_a_flipped_bit_is_never_a_record(data: st.DataObject):
    raw = line(hits=hits()[:1])
    assert whole(raw)
    assert not whole(raw[: data.draw(st.integers(0, len(raw) - 1))])
    at = data.draw(st.integers(0, len(raw) - 1))
    bit = 1 << data.draw(st.integers(0, 7))
    assert not whole(raw[:at] + bytes([raw[at] ^ bit]) + raw[at + 1 :])


@settings(deadline=None)
@given(st.text(), st.text())
def test_any_text_survives(query: str, answer: str):
    record = decode(line(query=query, answer=answer, hits=[]))
    assert (record.query, record.answer) == (query, answer)


def test_lone_surrogates_and_newlines_survive():
    odd = "a\ud800b\nc\u2028d\x85e"
    raw = line(query=odd, answer=odd, hits=[])
    assert b"\n" not in raw
    assert decode(raw).query == odd


def test_another_version_is_refused():
    with pytest.raises(FormatError, match="version 2"):
        decode(line().replace(b'"version":1', b'"version":2', 1))
    with pytest.raises(FormatError, match="not a log record"):
        decode(b"{}")
    with pytest.raises(FormatError, match="not a log record"):
        decode(b"{")


def test_a_damaged_explanation_is_one_error():
    data = json.loads(line(Policy(matrices=True)))
    data["hits"][0]["explanation"]["matrix"]["cells"] = "AAAA"
    with pytest.raises(FormatError, match="damaged"):
        _ = decode(json.dumps(data).encode()).hits


def test_wrong_arguments_are_refused():
    with pytest.raises(InvalidInput, match="strings"):
        Entry.of(None, None, [], None)
    with pytest.raises(InvalidInput, match="Hit objects"):
        Entry.of(QUERY, None, [{"id": 1}], None)
    with pytest.raises(InvalidInput, match="top"):
        Policy(top=-1)
