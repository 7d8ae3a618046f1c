"""An explanation is read again from a log by its question and its document, or the log says what it has instead."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rag_explain.errors import InvalidInput, LogError
from rag_explain.log import ExplanationLog, erase, explain_again, find_explanation, patterns
from rag_explain.log.compact import KEPT_PAIRS
from rag_explain.log.record import Record
from rag_explain.results.deferred import Deferred
from rag_explain.results.explanation import Explanation
from rag_explain.results.notices import MISMATCH
from rag_explain.retrieval import RetrievedDocument
from rag_explain.texts.passage import Passage
from tests.support.answers import DOCUMENTS, QUERY, explanation, hit, hits

KEY = b"a key of sixteen bytes"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log"


def written(path: Path, *queries: str, **options: Any) -> ExplanationLog:
    """A log of these questions, all about the same documents; the explanations of each have other numbers."""
    with ExplanationLog(path, background=False, **options) as log:
        for seed, query in enumerate(queries):
            found = [hit(text, rank, query, seed=10 * seed + rank) for rank, text in enumerate(DOCUMENTS)]
            log.record(query=query, hits=found)
    return log


def test_the_newest_explanation_of_this_question_and_document_is_read(path: Path) -> None:
    log = written(path, "another?", QUERY, QUERY, "one more?")
    expected = explanation(QUERY, DOCUMENTS[1], seed=21)
    for source in (log, path, str(path), path / "log.jsonl"):
        found = find_explanation(source, QUERY, id="doc-1", text=DOCUMENTS[1])
        assert found.score == expected.score
        assert (found.query, found.document) == (QUERY, DOCUMENTS[1])
        assert KEPT_PAIRS in [notice.code for notice in found.notices]


def test_whole_matrices_are_read_where_they_were_kept(path: Path) -> None:
    log = written(path, QUERY, matrices=True)
    found = find_explanation(log, QUERY, id="doc-0", text=DOCUMENTS[0])
    np.testing.assert_array_equal(found.matrix, explanation(QUERY, DOCUMENTS[0], seed=0).matrix)
    assert KEPT_PAIRS not in [notice.code for notice in found.notices]


@pytest.mark.parametrize(
    "known", [{"id": "doc-2"}, {"text": DOCUMENTS[2]}, {"id": "its name in another store", "text": DOCUMENTS[2]}]
)
def test_a_document_is_known_by_its_id_or_else_by_its_text(path: Path, known: dict[str, str]) -> None:
    written(path, QUERY)
    assert find_explanation(path, QUERY, **known).document == DOCUMENTS[2]


def test_of_equal_texts_the_one_of_that_name_is_read(path: Path) -> None:
    with ExplanationLog(path, background=False) as log:
        log.record(query=QUERY, hits=[hit(DOCUMENTS[0], rank, seed=rank, id=f"copy-{rank}") for rank in range(3)])
    for rank in range(3):
        found = find_explanation(path, QUERY, id=f"copy-{rank}", text=DOCUMENTS[0])
        assert found.score == explanation(QUERY, DOCUMENTS[0], seed=rank).score


def test_a_text_that_changed_under_its_id_is_said_and_its_old_text_is_preferred(path: Path) -> None:
    written(path, QUERY)
    found = find_explanation(path, QUERY, id="doc-0", text="Honeybees dance.")
    assert found.document == DOCUMENTS[0]
    assert MISMATCH in [notice.code for notice in found.notices]
    assert "is another text now: explained is the one that was logged" in (found.surrogate or "")
    with ExplanationLog(path, background=False) as log:
        log.record(query=QUERY, hits=[hit("Honeybees dance.", 0, id="doc-0")])
    for text in (DOCUMENTS[0], "Honeybees dance."):
        found = find_explanation(path, QUERY, id="doc-0", text=text)
        assert (found.document, found.surrogate) == (text, None)


def test_what_was_embedded_around_a_text_counts_where_it_is_told(path: Path) -> None:
    around = ("bees.md\n", "")
    with ExplanationLog(path, background=False) as log:
        log.record(query=QUERY, hits=[hit(around=around)])
    whole = "".join((around[0], DOCUMENTS[0]))
    same = Passage(whole, len(around[0]))
    for text in (same, DOCUMENTS[0], None):
        assert find_explanation(path, QUERY, id="doc-0", text=text).surrogate is None
    for other in (Passage(DOCUMENTS[0]), Passage("wasps.md\n" + DOCUMENTS[0], 9)):
        for name in ("doc-0", None):
            assert "is another text now" in (find_explanation(path, QUERY, id=name, text=other).surrogate or "")


def test_a_question_that_a_chain_rewrote_is_found_by_both_of_its_wordings(path: Path) -> None:
    with ExplanationLog(path, background=False) as log:
        log.record(query="and how do they?", hits=hits(QUERY))
    for asked in ("and how do they?", QUERY):
        assert find_explanation(log, asked, text=DOCUMENTS[0]).query == QUERY


@pytest.mark.parametrize(
    "options",
    [
        {"keep_text": False},
        {"keep_text": False, "matrices": True},
        {"keep_text": False, "hash_key": KEY},
        {"redact": patterns(r"\w*bees?\w*")},
        {"redact": patterns(r"\w*bees?\w*"), "matrices": True, "hash_key": KEY},
    ],
)
def test_words_that_the_log_did_not_keep_are_those_of_the_texts_that_are_given(
    path: Path, options: dict[str, Any]
) -> None:
    log = written(path, QUERY, **options)
    found = find_explanation(log, QUERY, id="doc-0", text=DOCUMENTS[0])
    assert (found.query, found.document) == (QUERY, DOCUMENTS[0])
    expected = explanation(QUERY, DOCUMENTS[0], seed=0).in_words().top_pairs(3)
    assert [(one.query.text, one.document.text) for one in found.in_words().top_pairs(3)] == [
        (one.query.text, one.document.text) for one in expected
    ]
    by_name = find_explanation(log, QUERY, id="doc-0")  # without its text there are no words, or masked ones
    assert by_name.document is None or "█" in by_name.document
    assert by_name.score == found.score


def test_a_key_that_came_later_hides_nothing_from_before(path: Path) -> None:
    written(path, QUERY)
    log = written(path, "another?", hash_key=KEY)
    assert find_explanation(log, QUERY, id="doc-0").query == QUERY
    assert find_explanation(log, "another?", id="doc-0").query == "another?"


@pytest.mark.parametrize(
    ("asked", "known", "options", "said"),
    [
        ("never asked?", {"id": "doc-0"}, {}, "has no record of this question: it was not logged, was worded"),
        (QUERY, {"id": "doc-9"}, {}, "has this question without this document: another search found that"),
        (QUERY, {"text": "?"}, {"keep_text": False}, "has this question without this document"),
        (QUERY, {"id": "doc-0"}, {"hash_key": KEY}, r"by hashes with a key: pass log=ExplanationLog\(path, hash_key="),
    ],
)
def test_what_is_not_in_the_log_is_said(
    path: Path, asked: str, known: dict[str, str], options: dict[str, Any], said: str
) -> None:
    written(path, QUERY, **options)
    with pytest.raises(LogError, match=f"the log .* {said}"):
        find_explanation(path, asked, **known)


def test_a_question_without_documents_is_a_question_of_the_log(path: Path) -> None:
    with ExplanationLog(path, background=False) as log:
        log.record(query=QUERY)
    with pytest.raises(LogError, match="has this question without this document"):
        find_explanation(path, QUERY, id="doc-0")


def test_erased_documents_and_records_are_gone(path: Path) -> None:
    written(path, QUERY)
    erase(path, documents=["doc-0"])
    with pytest.raises(LogError, match=r"has this question without this document: .* or it was erased"):
        find_explanation(path, QUERY, id="doc-0", text=DOCUMENTS[0])
    (record,) = ExplanationLog(path).records()
    erase(path, records=[record.id])
    with pytest.raises(LogError, match=r"has no record of this question: .* or was erased"):
        find_explanation(path, QUERY, id="doc-1")
    with pytest.raises(LogError, match="there is no log at"):
        find_explanation(path / "elsewhere", QUERY, id="doc-1")


def test_one_that_was_not_explained_says_why_and_an_earlier_explanation_is_read(path: Path) -> None:
    skipped: Deferred[Explanation] = Deferred.skipped("it did not fit into the time limit")
    with ExplanationLog(path, background=False) as log:
        log.record(query=QUERY, hits=[hit(handle=skipped)])
        with pytest.raises(LogError, match=r"no explanation of this document .*: it did not fit into the time limit"):
            find_explanation(log, QUERY, id="doc-0")
        log.record(query=QUERY, hits=hits())
        log.record(query=QUERY, hits=[hit(handle=skipped)])
        assert find_explanation(log, QUERY, id="doc-0").score == explanation(seed=0).score


def test_what_waits_to_be_written_is_found(path: Path) -> None:
    with ExplanationLog(path) as log:
        log.record(query=QUERY, hits=hits())
        assert find_explanation(log, QUERY, id="doc-0").query == QUERY


def test_one_record_of_thousands_is_parsed_and_older_files_are_not_opened(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = written(path, QUERY, *(f"question {number}?" for number in range(300)), max_bytes=200_000)
    parsed: list[bytes] = []
    original = Record.from_line.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(Record, "from_line", classmethod(lambda cls, line: parsed.append(line) or original(cls, line)))
    (oldest, *_) = sorted(path.glob("log-*.gz"))
    assert find_explanation(log, QUERY, id="doc-0").query == QUERY
    assert len(parsed) == 1
    oldest.write_bytes(oldest.read_bytes()[:100])
    with caplog.at_level(logging.WARNING):
        assert find_explanation(log, "question 299?", id="doc-0").query == "question 299?"
        assert not caplog.records
        with pytest.raises(LogError, match="no record of this question"):
            find_explanation(log, QUERY, id="doc-0")
    assert "was not read whole" in caplog.text


def test_what_is_asked_of_a_log_must_be_a_question_and_a_document(path: Path) -> None:
    document = RetrievedDocument(id="doc-0", text=DOCUMENTS[0])
    with pytest.raises(InvalidInput, match="takes a question, and the id or the text"):
        find_explanation(path, QUERY)
    with pytest.raises(InvalidInput, match="log must be an ExplanationLog or its folder, not dict"):
        find_explanation({}, QUERY, id="doc-0")  # type: ignore[arg-type]
    for query, log in ((QUERY, None), (None, path)):
        with pytest.raises(InvalidInput, match="pass query= and, with it, log= or explainer="):
            explain_again(document, query, log, None)
    with pytest.raises(InvalidInput, match=r"explainer must be a rag_explain.Explainer, not str"):
        explain_again(document, QUERY, None, "model")  # type: ignore[arg-type]
