from __future__ import annotations

import os
import shutil
import sqlite3
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from rag_explain.errors import StoreError
from rag_explain.store import Store
from rag_explain.store.codec import encode
from rag_explain.store.disk import Disk
from rag_explain.store.tier import Row, owner
from tests.support.synthetic import make_entry, make_factors, make_key


def make_row(seed: int = 0, ids: tuple[str, ...] = (), n: int = 7) -> Row:
    return Row(make_key(seed), encode(make_key(seed), make_factors(seed, n=n)), tuple(map(owner, ids)))


def forget(disk: Disk, *ids: str) -> set[bytes]:
    owners = list(map(owner, ids))
    gone = disk.owned_by(owners)
    disk.forget(owners, gone)
    return gone


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with closing(Disk(tmp_path / "store")) as disk:
        yield disk


def test_rows_come_back(disk: Disk) -> None:
    rows = [make_row(seed, (f"doc {seed}",)) for seed in range(450)]
    disk.put(rows)
    keys = [row.key for row in rows] + [make_key(999)]
    assert disk.get(keys) == {row.key: row for row in rows}
    assert disk.has(keys) == {row.key for row in rows}
    assert disk.get([]) == {}
    assert disk.info()["rows"] == 450


def test_another_store_on_the_same_folder_sees_them(disk: Disk) -> None:
    disk.put([make_row()])
    with closing(Disk(disk.folder)) as other:
        assert make_key() in other.get([make_key()])
        other.put([make_row(1)])
    assert disk.has([make_key(1)]) == {make_key(1)}


def test_threads_read_and_write_at_once(disk: Disk) -> None:
    trouble: list[BaseException] = []

    def work(base: int) -> None:
        try:
            for seed in range(base, base + 12):
                disk.put([make_row(seed)])
                assert disk.get([make_key(seed)])
        except BaseException as error:
            trouble.append(error)

    threads = [threading.Thread(target=work, args=(base,)) for base in range(0, 80, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert trouble == []
    assert disk.info()["rows"] == 48


def test_the_rows_used_longest_ago_go_when_the_limit_is_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1_000_000
    monkeypatch.setattr("rag_explain.store.disk.time.time", lambda: now)
    limit = 6 * 2**20
    with closing(Disk(tmp_path, max_bytes=limit)) as disk:
        for step in range(120):
            now += 1
            disk.put([make_row(step, n=2000)])  # about 90 kB each, 11 MB in all
            disk.get([make_key(0)])
        info = disk.info()
        assert info["file_bytes"] < 1.5 * limit
        assert 20 < info["rows"] < 80
        assert disk.has([make_key(0), make_key(119)]) == {make_key(0), make_key(119)}
        assert disk.has([make_key(1)]) == set()
        before = info["file_bytes"]
        assert disk.prune(10**6) > 0
        assert disk.info()["file_bytes"] < before / 3
        assert disk.has([make_key(119)]) == {make_key(119)}


# ---------------------------------------------------------------------- erasing


def everything_on_disk(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.iterdir()))


def test_a_forgotten_document_leaves_no_byte_behind(disk: Disk) -> None:
    disk.put([make_row(seed, (f"person {seed}",), n=300) for seed in range(60)])
    disk.put([make_row(7, ("person 7", "second name of 7"), n=300)])
    disk.delete(make_key(8))
    disk.put([make_row(8, ("person 8",), n=300)])
    assert b"word7x" in everything_on_disk(disk.folder)
    gone = forget(disk, "person 7", "person 8", "nobody")
    assert gone == {make_key(7), make_key(8)}
    content = everything_on_disk(disk.folder)
    owners = [owner(name) for name in ("person 7", "person 8", "second name of 7")]
    for trace in (b"word7x", b"word8x", make_key(7), make_key(8), *owners):
        assert trace not in content
    assert b"word9x" in content
    assert disk.info()["rows"] == 58
    assert forget(disk, "person 7") == set()


def test_a_file_with_a_write_ahead_log_is_a_store_too_and_loses_its_log(disk: Disk) -> None:
    disk.put([make_row(seed, (f"person {seed}",)) for seed in range(3)])
    with closing(sqlite3.connect(disk.folder / "factors.sqlite")) as other:
        other.execute("PRAGMA journal_mode=WAL")
        other.execute("UPDATE uses SET used = 0")
        other.commit()
        assert len(disk.get([make_key(seed) for seed in range(3)])) == 3
    with closing(Disk(disk.folder)) as new:
        assert len(new.get([make_key(seed) for seed in range(3)])) == 3
        assert forget(new, "person 1") == {make_key(1)}
        assert b"word1x" not in everything_on_disk(disk.folder)
        assert b"word2x" in everything_on_disk(disk.folder)
        with new._file._connection() as connection:
            assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)


def test_what_was_dropped_for_space_is_not_left_in_the_file_either(tmp_path: Path) -> None:
    with closing(Disk(tmp_path, max_bytes=2 * 2**20)) as disk:
        for seed in range(0, 100, 5):
            disk.put([make_row(step, (f"person {step}",), n=500) for step in range(seed, seed + 5)])
        left = disk.has([make_key(seed) for seed in range(100)])
        content = everything_on_disk(tmp_path)
        dropped = [seed for seed in range(100) if make_key(seed) not in left]
        assert len(dropped) > 30
        assert not [seed for seed in dropped if f"word{seed}x".encode() in content]


def test_the_epoch_tells_other_processes_of_forgetting_and_of_nothing_else(disk: Disk) -> None:
    with closing(Disk(disk.folder)) as other:
        before = other.epoch()
        disk.put([make_row(0, ("a",))])
        assert other.epoch() == before
        forget(disk, "a")
        assert other.epoch() != before
        assert other.epoch() == disk.epoch()


def test_documents_can_own_rows_that_are_there_already(disk: Disk) -> None:
    disk.put([make_row(1)])
    disk.link([(make_key(1), [owner("a")]), (make_key(2), [owner("a")])])
    assert disk.get([make_key(1)])[make_key(1)].owners == (owner("a"),)
    assert forget(disk, "a") == {make_key(1)}


def test_a_set_aside_file_is_erased_too(tmp_path: Path) -> None:
    (tmp_path / "factors.sqlite.damaged").write_bytes(b"word7x")
    with closing(Disk(tmp_path)) as disk:
        forget(disk, "anyone")
    assert b"word7x" not in everything_on_disk(tmp_path)


# ---------------------------------------------------------------------- damaged rows


def test_a_deleted_row_is_a_miss_until_it_is_written_again_and_keeps_its_owners(disk: Disk) -> None:
    disk.put([make_row(0, ("a",)), make_row(1)])
    disk.delete(make_key(0))
    assert set(disk.get([make_key(0), make_key(1)])) == {make_key(1)}
    assert disk.info()["rows"] == 1
    disk.put([make_row(0)])
    assert set(disk.get([make_key(0)])) == {make_key(0)}
    assert forget(disk, "a") == {make_key(0)}


# ---------------------------------------------------------------------- a file that stays locked


def test_a_locked_file_is_waited_for_once_and_then_not_asked_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rag_explain.store.sqlite_file._READ_PATIENCE", 0.1)
    with closing(Disk(tmp_path, timeout=0.1)) as disk:
        disk.put([make_row(0)])
        with closing(sqlite3.connect(tmp_path / "factors.sqlite", isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            waited: list[float] = []
            patiently = disk._file._patiently
            monkeypatch.setattr(disk._file, "_patiently", lambda *work: waited.append(work[0]) or patiently(*work))
            for _ in range(50):
                with pytest.raises(StoreError, match="locked"):
                    disk.get([make_key(seed) for seed in range(50)])
            assert len(waited) == 1
            with pytest.raises(StoreError, match="stayed locked"):
                disk.put([make_row(1)])
            other.execute("ROLLBACK")
        monkeypatch.setattr(disk._file, "_resume", 0.0)
        assert disk.get([make_key(0)])
        assert disk.info()["set_aside"] == []


# ---------------------------------------------------------------------- folders


def test_files_are_made_for_their_owner_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with closing(Disk(tmp_path / "store")) as disk:
            disk.put([make_row()])
            with disk._file._connection() as connection:
                connection.execute("BEGIN IMMEDIATE")
                connection.execute("DELETE FROM rows")  # a journal is there until the transaction ends
                rights = {path.name: stat.S_IMODE(path.stat().st_mode) for path in disk.folder.iterdir()}
                connection.execute("ROLLBACK")
    finally:
        os.umask(before)
    assert rights == dict.fromkeys({"factors.sqlite", "factors.lock", "factors.sqlite-journal"}, 0o600)
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o700


def test_a_store_that_is_opened_to_be_read_makes_nothing(tmp_path: Path) -> None:
    with closing(Disk(tmp_path / "absent", readonly=True)) as disk:
        assert disk.get([make_key()]) == {}
    assert not (tmp_path / "absent").exists()
    with closing(Disk(tmp_path)) as disk:
        disk.put([make_row()])
    before = everything_on_disk(tmp_path)
    with closing(Disk(tmp_path, readonly=True)) as disk:
        assert disk.readonly
        assert not disk.info()["readonly"]
        assert set(disk.get([make_key(0), make_key(1)])) == {make_key(0)}
        with pytest.raises(StoreError, match="cannot be written"):
            disk.put([make_row(1)])
    assert everything_on_disk(tmp_path) == before
    assert {path.name for path in tmp_path.iterdir()} == {"factors.sqlite", "factors.lock"}


@contextmanager
def nobody() -> Iterator[None]:
    """Run as a user who is not allowed everything, when the tests run as one who is."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder that `nobody` may enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


def test_a_read_only_store_is_read_and_never_written(public_folder: Path) -> None:
    folder = public_folder / "store"
    with closing(Disk(folder)) as disk:
        disk.put([make_row()])
    os.chmod(folder / "factors.sqlite", 0o444)
    os.chmod(folder, 0o555)
    with nobody(), closing(Disk(folder)) as disk:
        assert disk.readonly
        assert set(disk.get([make_key(0), make_key(1)])) == {make_key(0)}
        with pytest.raises(StoreError, match="cannot be written"):
            disk.put([make_row(1)])
        with pytest.raises(StoreError, match="cannot be written"):
            disk.forget([], [make_key(0)])
        assert disk.info()["readonly"]
    os.chmod(folder, 0o755)


def test_the_file_of_another_user_is_a_miss_and_a_warning(
    public_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Store(public_folder) as store:
        store.put([make_entry(0)])
    os.chmod(public_folder / "factors.sqlite", 0)
    with nobody(), Store(public_folder) as store:
        assert store.get([make_key(0)]) == {}
        assert store.put([make_entry(0)])
    assert caplog.text.count("disk cannot be read") == 1


def test_an_empty_read_only_folder_is_an_empty_store(public_folder: Path) -> None:
    os.chmod(public_folder, 0o555)
    with nobody(), closing(Disk(public_folder)) as disk:
        assert disk.get([make_key()]) == {}
        assert disk.info()["rows"] == 0
        assert disk.epoch() == []


def test_a_file_is_not_a_store(tmp_path: Path) -> None:
    path = tmp_path / "report.pdf"
    path.write_bytes(b"precious")
    with pytest.raises(StoreError, match="folder"):
        Disk(path)
    assert path.read_bytes() == b"precious"


def test_a_folder_that_cannot_be_made(public_folder: Path) -> None:
    os.chmod(public_folder, 0o555)
    with nobody(), pytest.raises(StoreError, match="cannot be made"):
        Disk(public_folder / "new")


def test_a_store_that_is_removed_while_it_is_used_starts_anew(disk: Disk) -> None:
    disk.put([make_row()])
    for path in disk.folder.iterdir():
        path.unlink()
    assert disk.get([make_key()]) == {}
    disk.put([make_row(1)])
    assert disk.has([make_key(1)]) == {make_key(1)}


def test_a_folder_that_is_removed_while_it_is_used_is_made_again_for_its_owner_only(disk: Disk) -> None:
    disk.put([make_row()])
    shutil.rmtree(disk.folder)
    assert disk.get([make_key()]) == {}
    assert stat.S_IMODE(disk.folder.stat().st_mode) == 0o700


def test_a_closed_store_says_so(disk: Disk) -> None:
    disk.close()
    with pytest.raises(StoreError, match="closed"):
        disk.get([make_key()])


def test_odd_names_of_folders(tmp_path: Path) -> None:
    with closing(Disk(tmp_path / "a b?mode=memory#%41 é")) as disk:
        disk.put([make_row()])
    assert (tmp_path / "a b?mode=memory#%41 é" / "factors.sqlite").stat().st_size > 0


def test_a_child_process_does_not_use_its_parents_connections(disk: Disk) -> None:
    disk.put([make_row()])
    pid = os.fork()
    if pid == 0:
        try:
            disk.put([make_row(1)])
            os._exit(0 if disk.get([make_key(0)]) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    disk.put([make_row(2)])
    assert len(disk.get([make_key(seed) for seed in range(3)])) == 3


def test_bytes_are_flushed_before_they_are_acknowledged(disk: Disk) -> None:
    with disk._file._connection() as connection:
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
        assert connection.execute("PRAGMA secure_delete").fetchone() == (1,)
        assert connection.execute("PRAGMA trusted_schema").fetchone() == (0,)
        assert connection.execute("PRAGMA mmap_size").fetchone() == (0,)
        with pytest.raises(sqlite3.DatabaseError):
            connection.execute("SELECT zeroblob(1000000000)").fetchone()
