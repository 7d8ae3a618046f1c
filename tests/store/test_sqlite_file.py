"""The file under the disk tier: damage, forgery, full disks, killed and competing processes."""

from __future__ import annotations

import logging
import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from rag_explain.errors import StoreError
from rag_explain.store import Store
from rag_explain.store.codec import decode, encode
from rag_explain.store.disk import Disk
from rag_explain.store.sqlite_file import _inode
from rag_explain.store.tier import Row, owner
from tests.support.synthetic import make_entry, make_factors, make_key

ROOT = Path(__file__).parents[2]
WRITER = [sys.executable, "-m", "tests.store.writer"]


def make_row(seed: int = 0, n: int = 7) -> Row:
    return Row(make_key(seed), encode(make_key(seed), make_factors(seed, n=n)), (owner(f"doc {seed}"),))


# ---------------------------------------------------------------------- damage to the file


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def zero_tail(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:32768] + bytes(len(data) - 32768))


def garbage(path: Path) -> None:
    path.write_bytes(b"this is not a database" * 999)


@pytest.mark.parametrize("damage", [truncate, empty, zero, zero_tail, garbage])
@pytest.mark.parametrize("while_open", [False, True])
def test_a_damaged_file_is_a_miss_and_then_works_again(
    damage: Callable[[Path], None], while_open: bool, tmp_path: Path
) -> None:
    entries = [make_entry(seed, n=50) for seed in range(60)]
    keys = [entry.key for entry in entries]
    first = Store(tmp_path, precision="fp32")
    first.put(entries)
    if not while_open:
        first.close()
    damage(tmp_path / "factors.sqlite")
    with Store(tmp_path, precision="fp32") as store:
        first._memory.clear()
        for user in [store, first] if while_open else [store]:
            for entry in entries:
                found = user.get([entry.key])
                if found:
                    assert (found[entry.key].placed.block.numpy()[:-1] == entry.factors.rows).all()
        built = store.build(keys, lambda missing: [entry for entry in entries if entry.key in missing])
        assert set(built) == set(keys)
    if while_open:
        first.close()
    with Store(tmp_path, precision="fp32") as store:
        found = store.get(keys)
        assert set(found) == set(keys)
        assert {item.tier for item in found.values()} == {"disk"}
        for entry in entries:
            assert (found[entry.key].placed.block.numpy()[:-1] == entry.factors.rows).all()


def test_flipped_bits_anywhere_in_the_file_never_give_a_wrong_matrix(tmp_path: Path) -> None:
    entries = [make_entry(seed, n=30) for seed in range(30)]
    with Store(tmp_path / "origin", precision="fp32") as store:
        store.put(entries)
    original = (tmp_path / "origin" / "factors.sqlite").read_bytes()
    draw = random.Random(1)
    misses = 0
    for trial in range(12):
        folder = tmp_path / str(trial)
        folder.mkdir()
        broken = bytearray(original)
        for _ in range(40):
            broken[draw.randrange(len(broken))] ^= 1 << draw.randrange(8)
        (folder / "factors.sqlite").write_bytes(broken)
        with Store(folder, precision="fp32") as store:
            for entry in entries:
                found = store.get([entry.key])
                misses += not found
                if found:
                    assert (found[entry.key].placed.block.numpy()[:-1] == entry.factors.rows).all()
                    assert found[entry.key].placed.factors.tokens == entry.factors.tokens
            kept = store.put(entries)  # whatever happened to the file, work goes on
            assert len(kept) == len(entries)
    assert misses > 12


def test_one_damaged_file_is_set_aside_the_newest_and_forgetting_erases_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "factors.sqlite"
    for seed in range(2):
        with closing(Disk(tmp_path)) as disk:
            disk.put([make_row(seed, n=200)])
        with open(path, "r+b") as file:
            file.write(b"not a database")
    with Store(tmp_path) as store:
        assert caplog.text.count("starts anew") == 2
        assert store.info()["disk"]["set_aside"] == ["factors.sqlite.damaged"]
        content = (tmp_path / "factors.sqlite.damaged").read_bytes()
        assert b"word1x" in content
        assert b"word0x" not in content
        assert store.forget(["another"]) == 0
        assert store.info()["disk"]["set_aside"] == []
    assert b"word1x" not in b"".join(path.read_bytes() for path in tmp_path.iterdir())


def test_a_new_file_is_a_new_epoch(tmp_path: Path) -> None:
    """Else another process would keep in memory what was forgotten as often in the new file as in the old one."""
    with Store(tmp_path) as store:
        assert store._disk is not None
        before = store._disk.epoch()
        garbage(tmp_path / "factors.sqlite")
        store.put([make_entry(0)])
        assert store._disk.epoch() != before


def test_a_set_aside_file_does_not_hide_a_new_one_that_another_process_made(tmp_path: Path) -> None:
    with closing(Disk(tmp_path)) as slow, closing(Disk(tmp_path)) as quick:
        slow.put([make_row(0)])
        bad = _inode(slow._file.path)
        quick._file._prepare(bad=bad)
        quick.put([make_row(1)])
        slow._file._prepare(bad=bad)
        assert slow.has([make_key(1)]) == {make_key(1)}


def test_the_journal_of_a_file_that_was_removed_is_not_played_into_a_new_one(tmp_path: Path) -> None:
    with closing(Disk(tmp_path)) as disk:
        disk.put([make_row(seed, n=200) for seed in range(20)])
        with disk._file._connection() as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("DELETE FROM rows")
            journal = (tmp_path / "factors.sqlite-journal").read_bytes()
            connection.execute("ROLLBACK")
    (tmp_path / "factors.sqlite").unlink()
    (tmp_path / "factors.sqlite-journal").write_bytes(journal)
    with closing(Disk(tmp_path)) as disk:
        disk.put([make_row(99)])
        assert disk.has([make_key(0), make_key(99)]) == {make_key(99)}
        assert disk.info()["set_aside"] == []


def test_a_new_file_that_was_not_finished_is_begun_again(tmp_path: Path) -> None:
    for name in ("factors.sqlite.new", "factors.sqlite.new-journal"):
        (tmp_path / name).write_bytes(b"killed here")
    with closing(Disk(tmp_path)) as disk:
        disk.put([make_row(0)])
        assert disk.has([make_key(0)]) == {make_key(0)}
    assert {path.name for path in tmp_path.iterdir()} == {"factors.sqlite", "factors.lock"}


# ---------------------------------------------------------------------- forgery


def tampered(folder: Path, script: str) -> None:
    with closing(Disk(folder)) as disk:
        disk.put([make_row(0)])
    with closing(sqlite3.connect(folder / "factors.sqlite")) as connection:
        connection.executescript(script)


@pytest.mark.parametrize(
    "script",
    [
        "CREATE TRIGGER t AFTER INSERT ON rows BEGIN DELETE FROM rows; END",
        "CREATE TRIGGER t AFTER DELETE ON uses BEGIN INSERT INTO epoch VALUES (1); END",
        "CREATE VIEW v AS SELECT 1",
        "DROP TABLE uses; CREATE VIEW uses AS WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x FROM c)"
        " SELECT x AS key, 1 AS used, 1 AS size FROM c",
        "DROP TABLE rows; CREATE TABLE rows (key BLOB PRIMARY KEY, data BLOB DEFAULT (randomblob(9)))",
        "CREATE TABLE more (a)",
        "PRAGMA application_id=7",
        "DROP TABLE epoch",
        "PRAGMA user_version=1",
    ],
)
def test_a_database_with_another_schema_is_set_aside_unread(
    script: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tampered(tmp_path, script)
    before = (tmp_path / "factors.sqlite").read_bytes()
    with Store(tmp_path) as store:
        assert store.get([make_key(0)]) == {}
        store.put([make_entry(5)])
        store.verify()
        assert (tmp_path / "factors.sqlite.damaged").read_bytes() == before
    with Store(tmp_path) as store:
        assert set(store.get([make_key(0), make_key(5)])) == {make_key(5)}
    assert "starts anew" in caplog.text


def test_a_store_of_a_newer_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    tampered(tmp_path, "PRAGMA user_version=4")
    before = (tmp_path / "factors.sqlite").read_bytes()
    with pytest.raises(StoreError, match="newer"):
        Store(tmp_path)
    assert (tmp_path / "factors.sqlite").read_bytes() == before


@pytest.mark.parametrize(
    "value",
    ["zeroblob(2000000)", "'text'", "17", "x'52584631'", "CAST(x'ff' AS TEXT)", "randomblob(5000)"],
)
def test_forged_rows_are_misses(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Disk(tmp_path)) as disk:
        disk.put([make_row(0), make_row(1)])
    with closing(sqlite3.connect(tmp_path / "factors.sqlite")) as connection:
        connection.execute(f"UPDATE rows SET data = {value} WHERE key = ?", [make_key(0)])
        connection.commit()
    monkeypatch.setattr("rag_explain.store.sqlite_file.MAX_BYTES", 10**6)
    with Store(tmp_path) as store:
        assert set(store.get([make_key(0), make_key(1)])) == {make_key(1)}
        store.put([make_entry(0)])
    with Store(tmp_path) as store:
        assert make_key(0) in store.get([make_key(0)])


def test_a_row_that_was_moved_to_another_key_is_a_miss(tmp_path: Path) -> None:
    with closing(Disk(tmp_path)) as disk:
        disk.put([Row(make_key(1), make_row(0).data)])
    with Store(tmp_path) as store:
        assert store.get([make_key(1)]) == {}
        assert store.info()["disk"]["rows"] == 0


# ---------------------------------------------------------------------- a full disk


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Writes beyond `size` fail as they do on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_costs_a_warning_and_nothing_that_was_acknowledged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Store(tmp_path) as store:
        store.put([make_entry(seed, n=200) for seed in range(10)])
        with file_size_limit((tmp_path / "factors.sqlite").stat().st_size + 50_000):
            for seed in range(10, 40):
                assert store.put([make_entry(seed, n=200)])  # served all the same
            assert store.get([make_key(39)])[make_key(39)].tier == "memory"
        assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1
        store.put([make_entry(50, n=200)])  # room again
    with Store(tmp_path) as store:
        found = store.get([make_key(seed) for seed in range(51)])
        assert {make_key(seed) for seed in [*range(10), 50]} <= set(found)


def test_a_store_can_be_opened_while_another_process_writes(tmp_path: Path) -> None:
    with closing(Disk(tmp_path)) as disk:
        disk.put([make_row(0)])
        with closing(sqlite3.connect(tmp_path / "factors.sqlite", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with closing(Disk(tmp_path, timeout=0.1)) as second:
                assert second.get([make_key(0)])
            other.execute("ROLLBACK")


def test_a_new_store_on_a_full_disk_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with file_size_limit(4096), pytest.raises(StoreError, match="cannot be opened"):
        Disk(tmp_path)


def test_a_transaction_that_does_not_fit_leaves_nothing_behind(tmp_path: Path) -> None:
    with closing(Disk(tmp_path)) as disk:
        disk.put([make_row(0)])
        limit = (tmp_path / "factors.sqlite").stat().st_size + 100_000
        with file_size_limit(limit), pytest.raises(StoreError, match="failed"):
            disk.put([make_row(seed, n=200) for seed in range(1, 100)])
        assert disk.has([make_key(seed) for seed in range(100)]) == {make_key(0)}


# ---------------------------------------------------------------------- processes


def start_writer(folder: Path, first: int, count: int, batch: int, *more: str) -> subprocess.Popen[str]:
    arguments = [*WRITER, str(folder), str(first), str(count), str(batch), *more]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def readable(disk: Disk, seeds: set[int]) -> None:
    """Every one of these rows is there, and is the right one."""
    found = disk.get([make_key(seed) for seed in seeds])
    for seed in seeds:
        factors = decode(make_key(seed), found[make_key(seed)].data)
        assert factors.tokens == make_factors(seed, n=20, h=64).tokens


@pytest.fixture
def nursery() -> Iterator[subprocess.Popen[str]]:
    """A process that forks a writer whenever it is told to."""
    with subprocess.Popen(WRITER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as it:
        yield it


def test_a_process_killed_while_it_writes_loses_nothing_that_was_acknowledged(
    tmp_path: Path, nursery: subprocess.Popen[str]
) -> None:
    """50 kills, at any point of a transaction."""
    assert nursery.stdin is not None
    assert nursery.stdout is not None
    draw = random.Random(7)
    acknowledged: set[int] = set()
    for trial in range(50):
        nursery.stdin.write("\t".join((str(tmp_path), str(trial * 10_000), "10000", "5")) + "\n")
        nursery.stdin.flush()
        pid = int(nursery.stdout.readline())
        assert nursery.stdout.readline() == "ready\n"
        lines = [nursery.stdout.readline() for _ in range(draw.randrange(20))]
        time.sleep(draw.uniform(0.0, 0.02))
        os.kill(pid, signal.SIGKILL)
        while (line := nursery.stdout.readline()) != "ended\n":
            lines.append(line)
        acknowledged |= set(map(int, lines))
    with closing(Disk(tmp_path)) as disk:
        readable(disk, acknowledged)
        assert disk.info()["set_aside"] == []
    assert len(acknowledged) > 250


def test_four_writing_processes_and_readers_lose_nothing(tmp_path: Path) -> None:
    writers = [start_writer(tmp_path, first, 120, 4) for first in range(0, 4000, 1000)]
    seen: set[bytes] = set()
    wanted = {make_key(first + step) for first in range(0, 4000, 1000) for step in range(120)}
    with Store(tmp_path, memory_bytes=0) as store, closing(Disk(tmp_path)) as disk:
        while any(writer.poll() is None for writer in writers):
            seen.update(store.get(sorted(wanted)))
            time.sleep(0.01)
        for writer in writers:
            output, _ = writer.communicate()
            assert writer.returncode == 0
            assert len(output.splitlines()) == 121
        readable(disk, {first + step for first in range(0, 4000, 1000) for step in range(120)})
        assert disk.info()["set_aside"] == []
    assert seen
