"""The record format: round trips, what no-text and redaction leave out, what a digest notices."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rag_explain import Explainer
from rag_explain.errors import FormatError, InvalidInput
from rag_explain.log import patterns
from rag_explain.log.record import PendingRecord, Record, summary, whole
from rag_explain.log.redaction import Policy, digest
from rag_explain.results.deferred import Deferred
from rag_explain.results.notices import UNKNOWN
from rag_explain.results.stages import Stage
from rag_explain.texts.tokens import Token
from tests.support.answers import DOCUMENTS, QUERY, explanation, hit, hits, reranked
from tests.support.models import tiny


def line(policy: Policy | None = None, **changes) -> bytes:
    fields = {"query": QUERY, "answer": "By the sun.", "hits": hits(), "metadata": {"user": "anna", "hits": [1]}}
    return Record.of(PendingRecord(**{**fields, **changes}), policy or Policy()).to_line()


def test_a_record_carries_what_integrity_needs():
    data = json.loads(line())
    assert data["format"] == "rag_explain.log"
    assert data["version"] == 3
    assert data["library"]
    assert (data["query"], data["query_hash"]) == (QUERY, digest(QUERY))
    first = data["hits"][0]
    assert first["text_hash"] == digest(DOCUMENTS[0])
    assert digest("a") == "sha256:ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"
    why = first["explanation"]
    assert (why["method"], why["fingerprint"], why["settings"]) == ("bilrp", "f" * 32, {"layer": 0, "rules": "lrp"})
    assert why["gap"] == pytest.approx(1e-7, abs=1e-9)


def test_the_stages_of_a_hit_come_back_and_its_explanation_names_them():
    moved = reranked(hit())
    record = Record.from_line(line(hits=[moved]))
    (read,) = record.hits
    assert (read.rank, read.score, read.metric, read.stages) == (1, 2.0, "unknown", moved.stages)
    assert read.gap == pytest.approx(moved.gap)
    assert record.logged_hits[0].gap == moved.gap
    assert read.explanation.surrogate == moved.explanation.surrogate
    assert "ranked by Reranker" in read.explanation.surrogate
    masked = Record.from_line(line(Policy(redact=patterns("Rerank")), hits=[moved]))
    assert [stage.name for stage in masked.hits[0].stages] == ["VectorIndexRetriever", "██████er"]
    data = json.loads(line(hits=[moved]))
    assert data["hits"][0]["stages"][1] == {
        "name": "Reranker",
        "kind": "rerank",
        "rank": 1,
        "rank_before": 3,
        "score": 2.0,
        "metric": "unknown",
    }


def test_the_strongest_pairs_come_back_by_word_with_their_shares_among_all():
    record = Record.from_line(line(Policy(top=4)))
    original = hits()[0].explanation.by_word()
    for kept, expected in zip(record.pairs(0), original.top_pairs(4), strict=True):
        assert (kept.query.text, kept.document.text) == (expected.query.text, expected.document.text)
        assert kept.value == pytest.approx(expected.value, rel=1e-5)
        assert kept.share == pytest.approx(expected.share, rel=1e-4)


def test_without_the_matrix_the_explanation_is_the_kept_pairs_and_says_so():
    original = hits()[0].explanation
    read = Record.from_line(line(Policy(top=4))).hits[0].explanation
    assert read.score == original.score
    assert read.gap == pytest.approx(original.gap, abs=1e-6)
    n_q, n_d = original.by_word().pairs.shape
    (notice,) = read.notices
    assert (notice.code, notice.level) == ("kept-pairs", "warning")
    assert f"the strongest 4 of {n_q * n_d} pairs" in notice.text
    assert read.surrogate is None
    assert np.count_nonzero(read.pairs) == 4
    assert read.unit == "word"


def test_what_the_kept_pairs_leave_out_is_told_apart_from_what_no_word_carries():
    original = hits()[0].explanation.by_word()
    record = Record.from_line(line(Policy(top=4)))
    dropped = float(original.pairs.sum(dtype=np.float64)) - sum(pair.value for pair in record.pairs(0))
    assert abs(dropped) > 1e-3
    assert record.logged_hits[0].explanation.unattributed == original.unattributed
    assert record.hits[0].explanation.unattributed == pytest.approx(original.unattributed + dropped, abs=1e-5)
    everything = Record.from_line(line(Policy(top=1000)))
    assert not everything.hits[0].explanation.notices
    assert everything.hits[0].explanation.unattributed == pytest.approx(original.unattributed, abs=1e-5)


def test_reading_and_writing_again_gives_the_same_line():
    why = explanation(similarities=np.ones(explanation().pairs.shape, dtype=np.float32), surrogate="reranked")
    answer = {"query": "and those?", "hits": [hit(handle=Deferred.ready(why), around=("title: ", "!")), *hits()]}
    for policy in (Policy(), Policy(matrices=True), Policy(keep_text=False, matrices=True)):
        raw = line(policy, **answer)
        assert Record.from_line(raw).to_line() == raw


def test_where_a_chunk_stands_is_kept_and_older_records_have_none():
    raw = line(hits=[hit(chunk=(2, 9))])
    record = Record.from_line(raw)
    assert record.logged_hits[0].chunk == record.hits[0].chunk == (2, 9)
    assert record.to_line() == raw
    data = json.loads(raw)
    assert data["hits"][0].pop("chunk") == [2, 9]
    assert Record.from_line(json.dumps(data).encode()).hits[0].chunk is None


def test_with_the_matrix_the_explanation_comes_back_whole():
    original = hits()[0].explanation
    read = Record.from_line(line(Policy(matrices=True))).hits[0].explanation
    assert read.to_dict() == original.to_dict()


def test_similarities_come_back_too():
    n_q, n_d = explanation().pairs.shape
    similarities = np.arange(n_q * n_d, dtype=np.float32).reshape(n_q, n_d)
    why = explanation(similarities=similarities, additive=False)
    for policy in (Policy(matrices=True), Policy()):
        read = Record.from_line(line(policy, hits=[hit(handle=Deferred.ready(why))])).hits[0].explanation
        assert read.gap is None
    read = Record.from_line(line(Policy(matrices=True), hits=[hit(handle=Deferred.ready(why))])).hits[0].explanation
    assert np.array_equal(read.similarities, similarities)


def test_hits_come_back_as_hits():
    read = Record.from_line(line()).hits
    for back, original in zip(read, hits(), strict=True):
        for name in ("id", "text", "rank", "score", "metric", "status"):
            assert getattr(back, name) == getattr(original, name)
        assert dict(back.metadata) == dict(original.metadata)


def test_skipped_and_failed_hits_say_why():
    failing = Deferred(lambda: 1 / 0)
    record = Record.from_line(
        line(hits=[hit(handle=Deferred(None, status="skipped", reason="too long")), hit(handle=failing)])
    )
    assert [(h.status, h.reason) for h in record.hits] == [
        ("skipped", "too long"),
        ("failed", "ZeroDivisionError: division by zero"),
    ]
    assert record.explained == 0


def test_a_pending_hit_is_computed_or_left():
    pending = PendingRecord(QUERY, None, [hit(handle=Deferred(explanation))])
    left = Record.of(pending, Policy(), compute=False)
    assert left.logged_hits[0].status == "pending"
    assert pending.hits[0].status == "pending"
    assert left.hits[0].explanation is None
    assert "not computed" in left.hits[0].reason
    assert Record.of(pending, Policy(), compute=True).hits[0].explanation is not None


def test_no_text_means_no_text_anywhere():
    raw = line(
        Policy(keep_text=False, matrices=True),
        hits=[*hits(), hit(handle=Deferred(lambda: (_ for _ in ()).throw(ValueError(QUERY))))],
        metadata={},
    )
    lowered = raw.decode().lower()
    words = {word.strip("?.").lower() for word in f"{QUERY} {' '.join(DOCUMENTS)} bees.md".split()}
    assert not [word for word in words if len(word) > 3 and word in lowered]
    record = Record.from_line(raw)
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
    record = Record.from_line(raw)
    assert record.query == "How do ████ find their way home?"
    assert record.query_hash == digest(QUERY)
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
        read = Record.from_line(line(policy, hits=[found], metadata={})).hits[0].explanation
        assert any("anna" in token.piece for token in read.document_tokens) is kept


def test_what_was_not_read_is_kept_whatever_becomes_of_the_texts():
    with Explainer(tiny("bert")) as explainer:
        why = explainer.explain("the 🐝 of anna", "🚗 anna sat")
    assert {(UNKNOWN, "query"), (UNKNOWN, "document")} <= {(notice.code, notice.side) for notice in why.notices}
    found = [hit(text=why.document, handle=Deferred.ready(why))]
    for policy in (Policy(), Policy(keep_text=False), Policy(redact=patterns("anna")), Policy(top=1, matrices=True)):
        written = line(policy, query=why.query, hits=found, answer=None, metadata={})
        assert policy.keep_text or b"anna" not in written
        read = Record.from_line(written).hits[0].explanation
        assert read.notices[: len(why.notices)] == why.notices


def test_a_bad_redaction_hook_is_an_error_and_not_a_leak():
    with pytest.raises(InvalidInput, match="span"):
        line(Policy(redact=lambda text: [(0, len(text) + 1)]))


def test_a_key_makes_hashes_unguessable():
    key = b"0123456789abcdef"
    assert json.loads(line(Policy(hash_key=key)))["query_hash"] == digest(QUERY, key) != digest(QUERY)
    with pytest.raises(InvalidInput, match="16 bytes"):
        Policy(hash_key=b"short")


def test_a_query_that_the_chain_rewrote_is_kept_beside_its_hit():
    record = Record.from_line(line(query="and those insects?", hits=hits()))
    assert record.query == "and those insects?"
    assert record.asked(0) == QUERY
    assert record.hits[0].explanation.query == QUERY
    assert record.pairs(0)[0].query.text in QUERY


def test_a_hit_that_is_not_explained_says_what_it_was_found_by():
    bare = replace(hit(handle=Deferred(None, status="skipped", reason="no")), query="the bees")
    record = Record.from_line(line(hits=[bare, replace(hit(), query=QUERY)]))
    assert [record.asked(index) for index in range(2)] == ["the bees", QUERY]
    assert record.logged_hits[1].query is None
    assert record.hits[0].query == "the bees"
    masked = line(Policy(keep_text=False), hits=[bare])
    assert b"bees" not in masked
    assert Record.from_line(masked).asked(0) is None


def test_the_head_is_read_without_the_hits():
    raw = line(query='tricky ,"hits":[ "quoted"', hits=hits('tricky ,"hits":[ "quoted"'))
    read = summary(raw)
    assert read.query == 'tricky ,"hits":[ "quoted"'
    assert read.documents == ("doc-0", "doc-1", "doc-2")
    assert summary(raw[: raw.index(b'"hits":[', raw.index(b"documents")) - 1] + b"}") == read


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
    record = Record.from_line(line(query=query, answer=answer, hits=[]))
    assert (record.query, record.answer) == (query, answer)


def test_lone_surrogates_and_newlines_survive():
    odd = "a\ud800b\nc\u2028d\x85e"
    raw = line(query=odd, answer=odd, hits=[])
    assert b"\n" not in raw
    assert Record.from_line(raw).query == odd


def test_another_version_is_refused():
    for version in (1, 4):
        with pytest.raises(FormatError, match=f"version {version} cannot be read: this library reads 3"):
            Record.from_line(line().replace(b'"version":3', b'"version":%d' % version, 1))


def test_a_record_of_version_2_stays_readable():
    moved = reranked(hit())
    data = json.loads(line(hits=[moved]))
    names = ("name", "kind", "rank", "rank_before", "score", "metric")
    whole = [stage.to_dict() for stage in moved.stages]
    data["hits"][0]["stages"] = [[stage[name] for name in names] for stage in whole]
    old = json.dumps(data | {"version": 2}).encode()
    assert Record.from_line(old).hits[0].stages == moved.stages
    assert Record.from_line(Record.from_line(old).to_line()).hits[0].stages == moved.stages  # written as it is now


def test_what_a_stage_was_asked_is_kept_as_other_texts_are_and_its_document_by_name():
    asked = Stage(
        "Leg", "search", 1, None, 0.5, "cosine", 0.3, 0.01, query="call 555", document="doc-2", note="call 555"
    )
    fused = Stage("Fusion", "fusion", 1, score=0.01, metric="rrf", legs=1)
    given_hit = replace(hit(), stages=(asked, fused))
    assert Record.from_line(line(hits=[given_hit])).hits[0].stages == (asked, fused)
    masked = Record.from_line(line(Policy(redact=patterns("555")), hits=[given_hit])).hits[0].stages[0]
    assert (masked.query, masked.note, masked.document) == ("call ███", "call ███", "doc-2")
    bare = Record.from_line(line(Policy(keep_text=False), hits=[given_hit])).hits[0].stages[0]
    assert (bare.query, bare.note, bare.contribution) == (None, None, 0.01)


@pytest.mark.parametrize("odd", [["Leg"], {"name": "Leg"}, {"name": "Leg", "kind": "odd", "rank": 1}, 3, [1, 2, 3]])
def test_a_damaged_stage_is_refused(odd):
    data = json.loads(line(hits=[reranked(hit())]))
    data["hits"][0]["stages"] = [odd]
    with pytest.raises(FormatError, match="damaged"):
        Record.from_line(json.dumps(data).encode())
    with pytest.raises(FormatError, match="not a log record"):
        Record.from_line(b"{}")
    with pytest.raises(FormatError, match="not a log record"):
        Record.from_line(b"{")


def test_a_damaged_explanation_is_one_error():
    for member, value in (("pairs", [[1, 2]]), ("unit", "page"), ("score", None), ("model", 7), ("size", [1])):
        data = json.loads(line(Policy(matrices=True)))
        data["hits"][0]["explanation"][member] = value
        with pytest.raises(FormatError, match="damaged"):
            Record.from_line(json.dumps(data).encode())


def test_a_damaged_matrix_leaves_the_other_hits():
    data = json.loads(line(Policy(matrices=True)))
    data["hits"][0]["explanation"]["matrix"] = "AAAA"
    record = Record.from_line(json.dumps(data).encode())
    assert [hit.status for hit in record.hits] == ["failed", "ready", "ready"]
    assert "damaged" in record.hits[0].reason
    assert record.pairs(0)


def test_wrong_arguments_are_refused():
    with pytest.raises(InvalidInput, match="strings"):
        PendingRecord(None)
    with pytest.raises(InvalidInput, match="Hit objects"):
        PendingRecord(QUERY, None, [{"id": 1}])
    with pytest.raises(InvalidInput, match="top"):
        Policy(top=-1)


def test_numbers_that_json_has_no_word_for_are_read_as_nothing():
    data = json.loads(line())
    data["metadata"] = {"a": [float("nan")]}
    data["hits"][0]["metadata"] = {"b": float("inf")}
    record = Record.from_line(json.dumps(data).encode())
    assert (record.metadata, record.logged_hits[0].metadata) == ({"a": [None]}, {"b": None})
    assert whole(record.to_line())
