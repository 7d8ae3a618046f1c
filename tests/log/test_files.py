"""The folder: appends that are whole or absent, rotation, and files as a crash leaves them."""

from __future__ import annotations

import gzip
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from filelock import FileLock

from rag_explain.errors import LogError
from rag_explain.log import find, records, summaries
from rag_explain.log.files import Folder
from rag_explain.log.record import PendingRecord, Record, whole
from rag_explain.log.redaction import Policy
from rag_explain.log.verify import verify
from tests.support.answers import QUERY, hits
from tests.support.processes import environment


def made(count: int, query: str = QUERY) -> list[bytes]:
    return [one(f"{query} {number}").to_line() for number in range(count)]


def one(query: str = QUERY) -> Record:
    return Record.of(PendingRecord(query, "answer", hits()[:1]), Policy())


def lines_of(folder: Folder) -> Iterator[bytes]:
    return (line for file in folder.files() for line in file.records(bytes))


def names(path: Path) -> list[str]:
    return sorted(item.name for item in path.iterdir())


def test_only_the_owner_can_read_a_log(tmp_path):
    Folder(tmp_path / "log").append(made(1))
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "log" / "log.jsonl").stat().st_mode) == 0o600


@pytest.mark.parametrize("cut", [1, 2, 50, 400])
def test_a_torn_tail_is_never_read_and_never_joined_to_the_next_record(tmp_path, cut):
    folder = Folder(tmp_path)
    first, second, third = made(3)
    folder.append([first, second])
    os.truncate(folder.current, folder.current.stat().st_size - cut)
    assert [record.to_json().encode() for record in records(tmp_path)] == [first]
    folder.append([third])
    # Only the newline was missing: the record is whole after all.
    expected = [first, second, third] if cut == 1 else [first, third]
    assert [record.to_json().encode() for record in records(tmp_path)] == expected


def test_size_seals_and_compresses(tmp_path):
    lines = made(10)
    folder = Folder(tmp_path, max_bytes=3 * len(lines[0]) + 100)
    for line in lines:
        folder.append([line])
    assert len(list(tmp_path.glob("log-*.jsonl.gz"))) == 3
    assert [record.to_json().encode() for record in records(tmp_path)] == lines


def test_age_seals(tmp_path):
    folder = Folder(tmp_path, max_age=timedelta(hours=1))
    folder.append([replace(one(), time=datetime.now(UTC) - timedelta(hours=2)).to_line()])
    folder.append(made(1))
    assert len(list(tmp_path.glob("log-*.jsonl.gz"))) == 1
    folder.append(made(1))
    assert len(list(tmp_path.glob("log-*.jsonl.gz"))) == 1


def test_retention_deletes_old_files_only_when_asked_to(tmp_path):
    lines = made(3)
    for retention, left in ((None, 3), (timedelta(days=30), 2)):
        path = tmp_path / str(retention)
        folder = Folder(path, max_bytes=1, retention=retention)
        folder.append(lines[:1])
        folder.append(lines[1:2])
        (sealed,) = path.glob("log-*.gz")
        sealed.rename(path / "log-20200101T000000.000000Z-abcd.jsonl.gz")
        folder.append(lines[2:])
        assert len(list(records(path))) == left


@pytest.mark.parametrize("state", ["renamed", "half compressed", "compressed", "restored"])
def test_a_crash_while_sealing_loses_and_doubles_nothing(tmp_path, state):
    lines = made(4)
    folder = Folder(tmp_path, max_bytes=1)
    folder.append(lines[:3])
    sealed = tmp_path / "log-20261116T030000.000000Z-abcd.jsonl"
    folder.current.rename(sealed)
    packed = gzip.compress(sealed.read_bytes())
    if state == "half compressed":
        Path(f"{sealed}.gz.tmp").write_bytes(packed[:100])
    if state == "compressed":
        Path(f"{sealed}.gz").write_bytes(packed)
    if state == "restored":  # by a person, beside the damaged file
        Path(f"{sealed}.gz").write_bytes(packed[:100])
    assert [record.to_json().encode() for record in records(tmp_path)] == lines[:3]
    folder.append(lines[3:])
    folder.append(made(1))  # seals, and tidies up
    assert [record.to_json().encode() for record in records(tmp_path)][:4] == lines
    assert not list(tmp_path.glob("*.tmp"))
    assert not list(tmp_path.glob("log-*.jsonl"))


def test_a_file_of_a_log_can_be_read_alone(tmp_path):
    lines = made(2)
    folder = Folder(tmp_path, max_bytes=1)
    folder.append(lines[:1])
    folder.append(lines[1:])
    (sealed,) = tmp_path.glob("log-*.gz")
    assert [record.to_json().encode() for record in records(sealed)] == lines[:1]
    assert [record.to_json().encode() for record in records(folder.current)] == lines[1:]
    with pytest.raises(LogError, match="no log"):
        list(records(tmp_path / "nowhere"))
    with pytest.raises(LogError, match="not the folder"):
        Folder(sealed).rewrite(lambda line: line)


def test_a_reader_misses_nothing_while_the_file_is_sealed(tmp_path):
    lines = made(6)
    folder = Folder(tmp_path, max_bytes=1)
    folder.append(lines[:1])
    reading = lines_of(folder)
    folder.append(lines[1:2])
    first = next(reading)
    folder.append(lines[2:3])
    assert [first, *reading][:2] == lines[:2]


def test_a_reader_reads_each_record_once_when_the_file_is_sealed_after_it_listed_the_folder(tmp_path):
    lines = made(2)
    writing = Folder(tmp_path, max_bytes=1)
    writing.append(lines[:1])

    class Interrupted(Folder):
        interrupted = False

        def _sealed(self) -> list[Path]:
            listed = super()._sealed()
            if not self.interrupted:
                self.interrupted = True
                writing.append(lines[1:])
            return listed

    assert list(lines_of(Interrupted(tmp_path))) == lines


def test_a_reader_finds_a_file_that_is_compressed_while_it_reads_an_earlier_one(tmp_path):
    lines = made(4)
    folder = Folder(tmp_path, max_bytes=1)
    for name, line in (("20261115", lines[0]), ("20261116", lines[1])):
        folder.append([line])
        folder.current.rename(tmp_path / f"log-{name}T030000.000000Z-abcd.jsonl")
    folder.append(lines[2:3])
    reading = lines_of(folder)
    first = next(reading)
    folder.append(lines[3:])  # seals, and compresses what was renamed
    assert not list(tmp_path.glob("log-*.jsonl"))
    assert [first, *reading] == lines[:3]


def test_readers_write_nothing(tmp_path):
    Folder(tmp_path).append(made(2))
    (tmp_path / "log.lock").unlink()
    listed = [summary.id for summary in summaries(tmp_path)]
    assert [record.id for record in records(tmp_path)] == listed
    assert find(tmp_path, listed[0]).id == listed[0]
    assert [verdict.outcome for verdict in verify(tmp_path)] == ["holds", "holds"]
    assert names(tmp_path) == ["log.jsonl"]


def test_a_lock_that_is_never_released_is_an_error_and_no_deadlock(tmp_path, monkeypatch):
    monkeypatch.setattr("rag_explain.log.files._LOCK_SECONDS", 0.1)
    held, free = threading.Event(), threading.Event()

    def hold() -> None:
        with FileLock(tmp_path / "log.lock"):
            held.set()
            free.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(60)
    with pytest.raises(LogError, match="held the log"):
        Folder(tmp_path).append(made(1))
    free.set()
    holder.join()
    Folder(tmp_path).append(made(1))


def test_a_full_disk_leaves_no_half_record(tmp_path):
    line = made(1)[0]
    limit = int(2.5 * len(line))
    program = f"""
import resource
from rag_explain.errors import LogError
from rag_explain.log.files import Folder
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
folder = Folder({str(tmp_path)!r}, max_bytes=10**9)
line = {line!r}
for _ in range(5):
    try:
        folder.append([line])
        print("ok", flush=True)
    except LogError as error:
        print(error, flush=True)
"""
    done = run(program)
    assert done.stdout.split().count("ok") == 2
    assert done.stdout.count("cannot be written: File too large") == 3
    assert (tmp_path / "log.jsonl").read_bytes() == (line + b"\n") * 2
    Folder(tmp_path).append([line])
    assert len(list(records(tmp_path))) == 3


def run(program: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True, env=environment()
    )


WRITER = """
import sys
from tests.support.answers import QUERY, hits
from rag_explain.log.files import Folder
from rag_explain.log.record import PendingRecord, Record
from rag_explain.log.redaction import Policy
folder = Folder(sys.argv[1], max_bytes=60_000)
number = 0
while True:
    record = Record.of(PendingRecord(f"{sys.argv[2]} {number}", "answer", hits()), Policy())
    folder.append([record.to_line()])
    print(record.id, flush=True)
    number += 1
    if number == int(sys.argv[3]):
        break
"""


def writer(path: Path, name: str, count: int) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), name, str(count)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )


def test_two_processes_write_one_log(tmp_path):
    """Through rotation too, with a reader beside them; no record is overwritten."""
    processes = [writer(tmp_path, name, 80) for name in ("left", "right")]
    while any(process.poll() is None for process in processes):
        if tmp_path.exists():
            ids = [record.id for record in records(tmp_path)]
            assert len(ids) == len(set(ids))
    acknowledged = {line.strip() for process in processes for line in process.stdout}
    assert all(process.returncode == 0 for process in processes)
    for process in processes:
        process.stdout.close()
    read = [record.id for record in records(tmp_path)]
    assert len(read) == 160
    assert set(read) == acknowledged
    assert len(list(tmp_path.glob("log-*.gz"))) > 2


def test_kill_9_loses_no_acknowledged_record_and_leaves_no_torn_one(tmp_path):
    acknowledged: set[str] = set()
    for round_ in range(5):
        process = writer(tmp_path, f"round {round_}", 0)
        acknowledged |= {process.stdout.readline().strip() for _ in range(1 + 4 * round_)}
        process.kill()
        acknowledged |= {line.strip() for line in process.stdout if line.endswith("\n")}
        process.stdout.close()
        process.wait()
    assert len(acknowledged) > 10
    read = [record.id for record in records(tmp_path)]
    assert acknowledged <= set(read)
    assert len(read) == len(set(read))
    for file in Folder(tmp_path).files():
        assert all(whole(line) or not line.endswith(b"}") for line in file.lines(unfinished=False))


def test_records_of_another_version_stay_in_a_file_of_their_own(tmp_path, monkeypatch):
    (line,) = made(1)
    monkeypatch.setattr("rag_explain.log.record.VERSION", 1)
    (old,) = made(1)
    monkeypatch.undo()
    folder = Folder(tmp_path)
    folder.append([old])
    folder.append([line])
    assert folder.current.read_bytes() == line + b"\n"
