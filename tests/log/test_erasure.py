"""Of an erased document nothing stays that was made from it, whatever else stands in the record."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

from rag_explain.log import ExplanationLog, erase, records
from rag_explain.log.files import Folder
from rag_explain.log.record import PendingRecord, Record
from rag_explain.log.redaction import Policy
from tests.support.samples import DOCUMENT, OTHER, QUERY, hits

TOLD = "Forgot password"


def line(**more) -> bytes:
    """A record with members that this version does not know, with the right digest."""
    data = json.loads(Record.of(PendingRecord(QUERY, f"“{TOLD}”", hits()), Policy()).to_line())
    del data["check"]
    for hit in data["hits"]:
        hit["later"] = {"quote": DOCUMENT}
        hit["explanation"]["later"] = DOCUMENT
    body = json.dumps({**data, "later": {TOLD: DOCUMENT}, **more}, separators=(",", ":")).encode()[:-1]
    return body + f',"check":"{hashlib.blake2b(body, digest_size=8).hexdigest()}"}}'.encode()


def test_members_that_this_version_does_not_know_do_not_survive(tmp_path):
    Folder(tmp_path).append([line()])
    assert erase(tmp_path, documents=["doc-1"]) == 1
    raw = Folder(tmp_path).current.read_text()
    assert TOLD not in raw
    assert "later" not in raw
    (record,) = records(tmp_path)
    assert [hit.text for hit in record.hits] == [None, OTHER]


def test_metadata_keep_the_names_by_which_a_record_is_found_and_nothing_that_may_quote_the_document(tmp_path):
    metadata = {
        "user": "u-17",
        "session": ["5f0c-77", 3, None, True],
        "cited": "doc-1",
        "quote": DOCUMENT,
        "summary": "Open the page and choose the link.",
        "keyword": "sign-in",
        "source": "file-1.md",
        "affected": 1,
        DOCUMENT: 2,
        "小": "打开银行的登录页面",
    }
    with ExplanationLog(tmp_path) as log:
        log.record(query=QUERY, hits=hits(), metadata=metadata)
        kept = log.record(query=QUERY, hits=hits()[1:], metadata=metadata)
        assert log.erase(documents=["doc-1"]) == 1
        (first, second) = log.records()
    assert first.metadata == {
        "user": "u-17",
        "session": ["5f0c-77", 3, None, True],
        "cited": "█",
        "quote": "█",
        "summary": "█",
        "keyword": "█",
        "█": "█",  # "source" is a word of the document's own metadata
        "█ (2)": 1,
        "█ (3)": 2,
        "█ (4)": "█",
    }
    assert (second.id, second.metadata) == (kept, metadata)


def test_a_document_is_erased_by_an_id_that_was_a_number(tmp_path):
    with ExplanationLog(tmp_path) as log:
        log.record(query=QUERY, hits=[replace(hits()[0], id=17)])
        assert log.erase(documents=[17]) == 1
        (record,) = log.records()
    assert record.documents == ("",)
