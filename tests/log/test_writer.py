"""ExplanationLog: it never makes the host wait, and it owns up to what it lost."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from rag_explain.errors import InvalidInput, LogError
from rag_explain.log import ExplanationLog, find, patterns, records, summaries
from rag_explain.results.deferred import Deferred
from tests.support.answers import DOCUMENTS, QUERY, explanation, hit, hits
from tests.support.processes import environment


@pytest.fixture
def log(tmp_path):
    with ExplanationLog(tmp_path / "log") as log:
        yield log


def test_record_and_read_back(log):
    record_id = log.record(query=QUERY, answer="By the sun.", hits=hits(), metadata={"user": 7})
    record = log.find(record_id)
    assert (record.query, record.answer, record.metadata) == (QUERY, "By the sun.", {"user": 7})
    assert [hit.id for hit in record.hits] == ["doc-0", "doc-1", "doc-2"]
    assert record.hits[0].explanation.method == "bilrp"
    assert log.counts.written == 1
    assert log.find(record_id[:8]).id == record_id
    with pytest.raises(LogError, match="no record"):
        log.find("0" * 32)


def test_a_log_without_records_is_empty(log):
    assert list(log.records()) == []


def test_the_caller_may_change_its_metadata_afterwards(log):
    metadata, source = {"user": ["anna"]}, {"page": 1}
    record_id = log.record(query=QUERY, hits=[hit(metadata=source)], metadata=metadata)
    metadata["user"].append("bert")
    source["page"] = 2
    record = log.find(record_id)
    assert record.metadata == {"user": ["anna"]}
    assert record.hits[0].metadata == {"page": 1}


def test_metadata_that_cannot_be_written_cost_no_answer(log):
    endless: dict = {}
    endless["self"] = endless
    record = log.find(log.record(query=QUERY, hits=[hit(metadata=endless)], metadata=endless))
    assert record.metadata == {"unreadable": "RecursionError"}
    assert record.hits[0].metadata == {"unreadable": "RecursionError"}
    assert record.hits[0].explanation is not None


class Gate:
    """A redaction hook that holds the background thread until it is opened."""

    def __init__(self):
        self.open = threading.Event()
        self.reached = threading.Event()

    def __call__(self, text):
        self.reached.set()
        self.open.wait(30)
        return []


def test_a_full_queue_drops_at_once_and_the_log_says_so(tmp_path, caplog):
    gate = Gate()
    log = ExplanationLog(tmp_path, redact=gate, queue=10)
    log.record(query="held")
    assert gate.reached.wait(10)
    for number in range(50):  # while the background is held: a record that waited for it would never return
        log.record(query=f"{number}")
    assert log.counts.dropped == 40
    assert "drops records: 10 records are waiting" in caplog.text
    gate.open.set()
    assert log.flush(10)
    log.record(query="afterwards")
    assert log.close()
    assert log.counts.written == 12
    told = [summary.dropped for summary in summaries(tmp_path)]
    assert sum(told) == 40
    assert max(told) == 40


def test_explanations_are_computed_in_the_background(log):
    threads = []

    def compute():
        threads.append(threading.current_thread().name)
        return explanation()

    record_id = log.record(query=QUERY, hits=[hit(handle=Deferred(compute))])
    assert log.find(record_id).hits[0].explanation is not None
    assert threads == ["rag-explain-log"]


def test_the_background_gives_way_to_the_host(log):
    found = []
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def compute():
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return explanation()

    log.record(query=QUERY, hits=[hit(handle=Deferred(compute))])
    log.flush()
    assert found == [min(19, before + 10)]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


def test_pending_can_be_left(tmp_path):
    with ExplanationLog(tmp_path, pending="leave") as log:
        original = hit(handle=Deferred(explanation))
        record = log.find(log.record(query=QUERY, hits=[original]))
    assert original.status == "pending"
    assert record.logged_hits[0].status == "pending"
    assert record.logged_hits[0].explanation is None


def test_computing_stops_before_dropping_starts(tmp_path):
    started, go_on = threading.Event(), threading.Event()

    def slow():
        started.set()
        go_on.wait(30)
        return explanation()

    with ExplanationLog(tmp_path, queue=10) as log:
        first = log.record(query="slow", hits=[hit(handle=Deferred(slow)), hit(handle=Deferred(explanation))])
        assert started.wait(10)
        for number in range(10):
            log.record(query=f"{number}", hits=[hit(handle=Deferred(explanation))])
        go_on.set()
        assert log.flush(30)
        assert log.counts.dropped == 0
        states = [record.logged_hits[0].status for record in log.records()]
        assert log.find(first).explained == 2
    assert states.count("pending") == 4  # while more than half of the queue was waiting
    assert states.count("ready") == 7


def test_closing_computes_what_is_pending_when_there_is_time(tmp_path):
    with ExplanationLog(tmp_path) as log:
        record_id = log.record(query=QUERY, hits=[hit(handle=Deferred(explanation))])
    assert find(tmp_path, record_id).hits[0].explanation is not None


@pytest.mark.parametrize("closing", [{"timeout": 0, "compute": False}, {"timeout": 0.1}])
def test_closing_stops_computing_when_there_is_none_or_when_asked_to(tmp_path, closing):
    started, go_on = threading.Event(), threading.Event()

    def slow():
        started.set()
        go_on.wait(30)
        return explanation()

    log = ExplanationLog(tmp_path)
    log.record(query="slow", hits=[hit(handle=Deferred(slow))])
    assert started.wait(10)
    late = hit(handle=Deferred(explanation))
    log.record(query="late", hits=[late])
    assert not log.close(**closing)
    go_on.set()
    assert log.close(30)
    assert late.status == "pending"
    assert [record.logged_hits[0].status for record in records(tmp_path)] == ["ready", "pending"]


def test_a_closed_log_drops_and_counts(tmp_path):
    log = ExplanationLog(tmp_path)
    log.close()
    log.record(query=QUERY)
    assert log.counts.dropped == 1


def test_a_hook_that_raises_writes_nothing_and_tells_no_text(tmp_path, caplog):
    def hook(text):
        raise ValueError(text)

    with ExplanationLog(tmp_path, redact=hook) as log:
        log.record(query="my secret")
        assert log.flush(10)
        assert log.counts.failed == 1
    assert "secret" not in caplog.text
    assert "ValueError" in caplog.text
    assert not (tmp_path / "log.jsonl").exists()


@pytest.mark.parametrize("stop", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_a_hook_or_a_sink_that_ends_the_program_costs_one_record_and_no_later_one(tmp_path, caplog, stop):
    class Sink:
        def context(self):
            return None

        def export(self, record, context):
            raise stop(record.query)

    def hook(text):
        if "secret" in text:
            raise stop(text)
        return []

    log = ExplanationLog(tmp_path, redact=hook, export=Sink())
    for query in ("before", "my secret", "after"):
        log.record(query=query)
    assert log.flush(10)
    log.record(query="later")
    assert log.close(10)
    assert [record.query for record in records(tmp_path)] == ["before", "after", "later"]
    assert (log.counts.written, log.counts.failed) == (3, 1)
    assert "secret" not in caplog.text


def test_without_the_background_a_hook_that_ends_the_program_ends_it(tmp_path):
    def hook(text):
        raise SystemExit

    log = ExplanationLog(tmp_path, redact=hook, background=False)
    with pytest.raises(SystemExit):
        log.record(query=QUERY)
    assert log.flush(10)
    assert log.counts.failed == 1


def log_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "rag-explain-log"]


def test_logs_that_are_dropped_without_close_write_what_waits_and_leave_no_thread(tmp_path):
    before, gate = log_threads(), Gate()
    for number in range(40):
        log = ExplanationLog(tmp_path / str(number), redact=gate)
        for query in ("one", "two", "three"):
            log.record(query=query, hits=[hit(handle=Deferred(explanation))])
    del log
    started = [thread for thread in log_threads() if thread not in before]
    assert len(started) == 40
    gate.open.set()
    for thread in started:
        thread.join(30)
        assert not thread.is_alive()
    for number in range(40):
        assert [record.explained for record in records(tmp_path / str(number))] == [1, 1, 1]


def test_an_idle_log_that_is_dropped_ends_its_thread_at_once(tmp_path):
    log = ExplanationLog(tmp_path)
    log.record(query=QUERY)
    assert log.flush(10)
    thread = log._thread
    del log
    thread.join(10)
    assert not thread.is_alive()


def test_a_log_that_is_dropped_before_the_process_ends_or_forks_loses_nothing(tmp_path):
    program = """
import os, sys
from tests.support.answers import QUERY, hits
from rag_explain.log import ExplanationLog
def answer(name, count):
    log = ExplanationLog(sys.argv[1])
    for number in range(count):
        log.record(query=f"{name} {number}", hits=hits())
answer("parent", 100)
child = os.fork()
if child == 0:
    answer("child", 50)
else:
    answer("later", 50)
    os.waitpid(child, 0)
"""
    done = run(program, str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    asked = sorted(record.query.split()[0] for record in records(tmp_path))
    assert asked == ["child"] * 50 + ["later"] * 50 + ["parent"] * 100


def test_a_generator_of_hits_is_logged(log):
    assert log.find(log.record(query=QUERY, hits=(item for item in hits()))).documents == ("doc-0", "doc-1", "doc-2")


def test_a_log_that_cannot_be_written_never_raises_into_the_host(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("rag_explain.log.writer._RETRIES", (0.01,))
    (tmp_path / "file").write_text("")
    with ExplanationLog(tmp_path / "file") as log:
        log.record(query=QUERY)
        assert log.flush(10)
        assert log.counts.failed == 1
    assert "1 records are lost" in caplog.text


def test_a_short_failure_is_tried_again(tmp_path, monkeypatch):
    log = ExplanationLog(tmp_path)
    append, calls = log.folder.append, []

    def failing(lines):
        calls.append(lines)
        if len(calls) == 1:
            raise LogError("the disk is full")
        append(lines)

    monkeypatch.setattr(log.folder, "append", failing)
    log.record(query=QUERY)
    assert log.flush(10)
    assert log.counts.written == 1
    log.close()


def test_without_the_background_a_record_is_on_disk_when_it_returns(tmp_path):
    log = ExplanationLog(tmp_path / "log", background=False)
    record_id = log.record(query=QUERY, hits=hits())
    assert find(tmp_path / "log", record_id).query == QUERY
    (tmp_path / "file").write_text("")
    with pytest.raises(LogError, match="cannot be written"):
        ExplanationLog(tmp_path / "file", background=False).record(query=QUERY)
    log.close()
    with pytest.raises(LogError, match="closed"):
        log.record(query=QUERY)


def test_many_threads_record_at_once(log):
    with ThreadPoolExecutor(16) as pool:
        ids = list(pool.map(lambda n: log.record(query=f"q{n}", answer=f"a{n}", hits=hits(f"q{n} bees")), range(200)))
    read = {record.id: record for record in log.records()}
    assert list(map(len, (ids, read))) == [200, 200]
    for number, record_id in enumerate(ids):
        record = read[record_id]
        assert (record.query, record.answer) == (f"q{number}", f"a{number}")
        assert record.asked(0) == f"q{number} bees"


def test_erasing_a_record(log):
    keep, gone = (log.record(query=f"{word} {QUERY}", hits=hits()) for word in ("keep", "gone"))
    assert log.erase(records=[gone]) == 1
    assert [record.id for record in log.records()] == [keep]
    assert b"gone" not in (log.folder.current).read_bytes()


def test_erasing_a_document_removes_all_that_was_made_from_it(tmp_path):
    with ExplanationLog(tmp_path, max_bytes=1) as log:  # one file per record: sealed ones are rewritten too
        for number in range(3):
            log.record(query=f"{QUERY} {number}", answer="Honeybees navigate", hits=hits())
            log.flush()
        other = log.record(query=QUERY, answer="kept", hits=hits()[1:])
        log.flush()
        with (tmp_path / "log.jsonl").open("ab") as file:
            file.write(b'{"format":"rag_explain.log", Honeybees')  # a writer was killed here
        assert log.erase(documents=["doc-0"]) == 3
        read = list(log.records())
    assert len(read) == 4
    for record in read[:3]:
        assert record.answer is None
        assert [hit.id for hit in record.hits] == ["", "doc-1", "doc-2"]
        assert record.hits[0].reason == "erased"
        assert record.hits[0].text is None
        assert record.explained == 2
        assert record.hits[1].explanation is not None
    assert log.find(other).answer == "kept"
    files = [path for path in tmp_path.iterdir() if path.suffix in (".gz", ".jsonl")]
    for path in files:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        assert b"Honeybees" not in raw
        assert b"doc-0" not in raw


def test_erasing_nothing_is_refused(log):
    with pytest.raises(InvalidInput, match="nothing to erase"):
        log.erase()
    with pytest.raises(InvalidInput, match="list"):
        log.erase(documents="doc-0")


def test_wrong_settings_are_refused(tmp_path):
    with pytest.raises(InvalidInput, match="pending"):
        ExplanationLog(tmp_path, pending="maybe")
    with pytest.raises(InvalidInput, match="queue"):
        ExplanationLog(tmp_path, queue=0)
    with pytest.raises(InvalidInput, match="regular expression"):
        patterns("(")


def run(program: str, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment(), check=False)


def test_the_end_of_the_process_flushes(tmp_path):
    program = """
import sys
from tests.support.answers import QUERY, hits
from rag_explain.log import ExplanationLog
log = ExplanationLog(sys.argv[1])
for number in range(300):
    log.record(query=f"{QUERY} {number}", hits=hits())
"""
    done = run(program, str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert len(list(records(tmp_path))) == 300


def test_a_full_disk_is_counted_and_the_host_goes_on(tmp_path):
    program = """
import resource, sys
from tests.support.answers import QUERY, hits
from rag_explain.log import ExplanationLog
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
log = ExplanationLog(sys.argv[1])
for number in range(20):
    log.record(query=f"{QUERY} {number}", hits=hits())
    log.flush(0.1)
log.close()
print(log.counts.written, log.counts.failed)
"""
    done = run(program, str(tmp_path))
    written, failed = map(int, done.stdout.split())
    assert written + failed == 20
    assert 0 < written < 20
    assert "File too large" in done.stderr
    assert len(list(records(tmp_path))) == written


def test_kill_9_keeps_what_was_flushed(tmp_path):
    program = """
import os, signal, sys
from tests.support.answers import QUERY, hits
from rag_explain.log import ExplanationLog
log = ExplanationLog(sys.argv[1])
for number in range(50):
    print(log.record(query=f"{QUERY} {number}", hits=hits()), flush=True)
log.flush()
for number in range(50, 500):
    log.record(query=f"{QUERY} {number}", hits=hits())
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = run(program, str(tmp_path))
    assert done.returncode == -9
    flushed = done.stdout.split()
    assert len(flushed) == 50
    assert [record.id for record in records(tmp_path)][:50] == flushed


def test_a_forked_process_logs_for_itself(tmp_path):
    program = """
import os, sys
from rag_explain.log import ExplanationLog
log = ExplanationLog(sys.argv[1])
log.record(query="before the fork")
child = os.fork()
log.record(query="child" if child == 0 else "parent")
if child:
    os.waitpid(child, 0)
"""
    done = run(program, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert sorted(record.query for record in records(tmp_path)) == ["before the fork", "child", "parent"]


def test_ten_thousand_records_are_listed_by_their_heads_and_one_is_found_by_parsing_one(tmp_path, monkeypatch):
    answers = [hit(document, rank) for rank, document in enumerate(DOCUMENTS)]
    answers = [replace(item, handle=Deferred.ready(item.explanation.by_word())) for item in answers]
    log = ExplanationLog(tmp_path, queue=20_000)
    for number in range(10_000):
        log.record(query=QUERY, answer=f"answer {number}", hits=answers)
    assert log.close(120)
    assert log.counts.dropped == 0
    parsed: list[int] = []
    monkeypatch.setattr("rag_explain.log.record.json", Counting(parsed))
    listed = list(summaries(tmp_path))
    assert len(listed) == len(parsed) == 10_000
    written = log.folder.current.stat().st_size + sum(
        len(gzip.decompress(p.read_bytes())) for p in tmp_path.glob("*.gz")
    )
    assert sum(parsed) < written / 8
    parsed.clear()
    assert find(tmp_path, listed[5000].id).answer == listed[5000].answer
    assert len(parsed) == 1


class Counting:
    """The json module, counting the characters that it parses."""

    def __init__(self, parsed):
        self.parsed = parsed

    def loads(self, raw):
        self.parsed.append(len(raw))
        return json.loads(raw)


def test_importing_the_log_loads_no_torch():
    done = run("import sys, rag_explain.log; print('torch' in sys.modules)")
    assert done.stdout.strip() == "False"
