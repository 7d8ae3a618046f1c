from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rag_explain.errors import InvalidInput, StoreError
from rag_explain.store import NewFactors, Store
from tests.support.synthetic import make_entry, make_factors, make_key


def test_memory_only() -> None:
    with Store() as store:
        assert store.precision == "fp32"
        kept = store.put([make_entry(0)])
        np.testing.assert_array_equal(kept[make_key(0)].block[:-1].numpy(), make_entry(0).factors.rows)
        found = store.get([make_key(0), make_key(1)])
        assert {key: item.tier for key, item in found.items()} == {make_key(0): "memory"}
        assert store.has([make_key(0), make_key(1)]) == {make_key(0)}
        assert store.verify() == {}
        with pytest.raises(StoreError, match="exported"):
            store.export(store)
    assert store.get([make_key(0)]) == {}


def test_disk_serves_a_new_process_and_memory_the_same_one(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.put([make_entry(0)])
        assert store.get([make_key(0)])[make_key(0)].tier == "memory"
    with Store(tmp_path) as store:
        assert store.has([make_key(0)]) == {make_key(0)}
        assert store.get([make_key(0)])[make_key(0)].tier == "disk"
        assert store.get([make_key(0)])[make_key(0)].tier == "memory"


@pytest.mark.parametrize("precision", ["fp16", "int8", "fp32"])
def test_what_is_served_does_not_depend_on_who_built_it(precision: str, tmp_path: Path) -> None:
    """Rows are rounded when they are kept, not when they are read back: today's answer is tomorrow's."""
    with Store(tmp_path, precision=precision) as store:  # type: ignore[arg-type]
        assert store.precision == precision
        built = store.build([make_key(0)], lambda keys: [make_entry(0)])[make_key(0)].placed
    with Store(tmp_path, precision=precision) as store:  # type: ignore[arg-type]
        read = store.get([make_key(0)])[make_key(0)].placed
    np.testing.assert_array_equal(built.block.numpy(), read.block.numpy())
    assert built.factors.error == read.factors.error
    assert built.factors.tokens == read.factors.tokens


def test_each_document_is_built_once_by_whichever_thread_asks_first(tmp_path: Path) -> None:
    built: list[bytes] = []

    def compute(keys: list[bytes]) -> list[NewFactors]:
        built.extend(keys)
        time.sleep(0.03)
        return [make_entry(seed) for seed in range(4) if make_key(seed) in keys]

    with Store(tmp_path) as store:
        threads = [
            threading.Thread(target=store.build, args=([make_key((i + j) % 4) for j in range(3)], compute))
            for i in range(12)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(built) == sorted(make_key(seed) for seed in range(4))


def test_an_error_is_raised_to_its_own_thread_and_the_others_compute_for_themselves() -> None:
    entered, release = threading.Event(), threading.Event()

    def failing(keys: list[bytes]) -> list[NewFactors]:
        entered.set()
        release.wait()
        raise RuntimeError("mine")

    def first() -> None:
        with pytest.raises(RuntimeError, match="mine"):
            store.build([make_key(0)], failing)

    with Store() as store, ThreadPoolExecutor() as threads:
        failed = threads.submit(first)
        entered.wait()
        second = threads.submit(store.build, [make_key(0), make_key(0)], lambda keys: [make_entry(0)])
        release.set()
        failed.result()
        assert second.result()[make_key(0)].tier == "built"
        assert store.build([make_key(0)], failing)[make_key(0)].tier == "memory"


def test_factors_that_cannot_be_kept_are_served(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = make_factors().rows.copy()
    rows[0, 0] = np.inf
    with Store(tmp_path) as store:
        for seed in range(3):
            assert store.put([make_entry(seed, rows=rows)])
    assert caplog.text.count("not kept") == 1


# ---------------------------------------------------------------------- forgetting


def test_forgetting_reaches_every_tier(tmp_path: Path) -> None:
    url = (tmp_path / "bucket").as_uri()
    with Store(tmp_path / "disk", remote=url) as store:
        store.put([make_entry(0, ids=("a",)), make_entry(1, ids=("b",)), make_entry(2)])
        store.link([(make_key(2), ["a"])])
        assert store.forget(["a"]) == 2
        assert set(store.get([make_key(seed) for seed in range(3)])) == {make_key(1)}
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    content = b"".join(path.read_bytes() for path in files)
    assert b"word0x" not in content
    assert b"word2x" not in content
    assert b"word1x" in content
    with Store(tmp_path / "disk", remote=url) as store:
        assert set(store.get([make_key(seed) for seed in range(3)])) == {make_key(1)}


def test_other_processes_drop_what_they_hold_in_memory(tmp_path: Path) -> None:
    with Store(tmp_path) as one, Store(tmp_path) as two:
        one.put([make_entry(0, ids=("a",))])
        two.get([make_key(0)])
        assert two.get([make_key(0)])[make_key(0)].tier == "memory"
        one.forget(["a"])
        assert two.get([make_key(0)]) == {}


@pytest.mark.parametrize("on_disk", [False, True])
def test_what_is_being_built_while_it_is_forgotten_is_not_kept(on_disk: bool, tmp_path: Path) -> None:
    with Store(tmp_path if on_disk else None) as store:

        def compute(keys: list[bytes]) -> list[NewFactors]:
            store.forget(["a"])
            return [make_entry(0, ids=("a",)), make_entry(1)]

        built = store.build([make_key(0), make_key(1)], compute)
        assert set(built) == {make_key(0), make_key(1)}
        assert set(store.get([make_key(0), make_key(1)])) == {make_key(1)}


def test_who_asks_after_something_was_forgotten_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, later = threading.Event(), list[Future[Any]]()
    with Store() as store, ThreadPoolExecutor() as threads:
        hold = store._building.hold

        def heard(keys: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                asked.set()
            return hold(keys)

        def compute(keys: list[bytes]) -> list[NewFactors]:
            if not later:
                store.forget(["a"])
                later.append(threads.submit(store.build, [make_key(0)], compute))
                assert asked.wait(300)  # and waits for what is computed here, which is not kept
            return [make_entry(0, ids=("a",))]

        monkeypatch.setattr(store._building, "hold", heard)
        store.build([make_key(0)], compute)
        assert later[0].result()[make_key(0)].tier == "built"
        assert set(store.get([make_key(0)])) == {make_key(0)}


def test_the_package_can_be_imported_where_there_is_no_fcntl() -> None:
    script = "import sys; sys.modules['fcntl'] = None; import rag_explain.store.store"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


def test_a_store_that_is_only_read_changes_nothing_and_refuses_to_forget(tmp_path: Path) -> None:
    url = (tmp_path / "bucket").as_uri()
    with Store(tmp_path / "disk", remote=url) as store:
        store.put([make_entry(0, ids=("a",))])
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with Store(tmp_path / "disk", remote=url, readonly=True) as store:
        store.put([make_entry(1)])
        store.link([(make_key(0), ["b"])])
        assert store.get([make_key(0)])[make_key(0)].tier == "disk"
        assert store.prune(0) == 0
        with pytest.raises(StoreError, match=r"not erased everywhere.*disk.*remote"):
            store.forget(["a"])
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files


def test_one_string_is_not_a_list_of_ids() -> None:
    with Store() as store, pytest.raises(InvalidInput, match="list"):
        store.forget("abc")


# ---------------------------------------------------------------------- looking after it


def test_verify_finds_and_deletes_damaged_rows(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.put([make_entry(seed) for seed in range(5)])
        assert store._disk is not None
        store._disk._file.write(
            lambda connection: connection.execute(
                "UPDATE rows SET data = substr(data, 1, 100) || zeroblob(length(data) - 100) WHERE key = ?",
                [make_key(3)],
            )
        )
        assert store.verify() == {"disk": {"rows": 5, "damaged": 1}}
        assert store.verify() == {"disk": {"rows": 4, "damaged": 0}}
        assert store.info()["disk"]["rows"] == 4


def test_export_copies_healthy_rows_with_their_owners(tmp_path: Path) -> None:
    with Store(tmp_path / "one") as one, Store(tmp_path / "two") as two:
        one.put([make_entry(seed, ids=(f"doc {seed}",)) for seed in range(5)])
        assert one.export(two) == 5
        assert len(two.get([make_key(seed) for seed in range(5)])) == 5
        assert two.forget(["doc 3"]) == 1
    with Store(tmp_path / "two") as two, Store(remote=(tmp_path / "bucket").as_uri()) as bucket:
        assert two.export(bucket) == 4
        assert bucket.forget(["doc 1"]) == 1
        assert len(bucket.get([make_key(seed) for seed in range(5)])) == 3


def test_prune(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.put([make_entry(seed, n=300) for seed in range(50)])
        assert store.prune(10**6) > 10
        assert store.info()["disk"]["file_bytes"] < 1.2 * 10**6


def test_each_kind_of_trouble_is_a_warning_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    rows = make_factors().rows.copy()
    rows[0, 0] = np.inf
    with Store(tmp_path) as store:
        (tmp_path / "factors.sqlite").write_bytes(b"this is not a database" * 999)
        for _ in range(3):
            assert store.get([make_key(0)]) == {}
        for seed in range(3):
            store.put([make_entry(seed, rows=rows)])
    messages = [(record.levelname, record.getMessage()) for record in caplog.records]
    for trouble, times in (("disk cannot be read", 6), ("not kept", 3)):
        levels = [level for level, message in messages if trouble in message]
        assert levels == ["WARNING"] + ["DEBUG"] * (times - 1)


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(InvalidInput, match="precision"):
        Store(precision="fp8")  # type: ignore[arg-type]


@pytest.mark.parametrize("ids", [[17], [None], [b"a"], "doc", 17, None])
def test_what_is_no_list_of_ids_is_not_forgotten_but_refused(ids: Any) -> None:
    with Store() as store, pytest.raises(InvalidInput, match="id"):
        store.forget(ids)


@pytest.mark.parametrize("folder", ["s3://bucket/factors", "file:///tmp/factors", "", 3])
def test_what_is_no_folder_is_not_made_one(folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput, match=r"Store\(remote=\.\.\.\)"):
        Store(folder)
    assert list(tmp_path.iterdir()) == []
