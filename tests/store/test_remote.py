from __future__ import annotations

import logging
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from rag_explain.errors import MissingExtra, StoreError
from rag_explain.store import Store
from rag_explain.store.codec import MAX_BYTES, encode
from rag_explain.store.remote import Bucket, Remote
from rag_explain.store.tier import Row, owner
from tests.support.synthetic import make_entry, make_factors, make_key


def make_row(seed: int = 0, ids: tuple[str, ...] = ()) -> Row:
    return Row(make_key(seed), encode(make_key(seed), make_factors(seed)), tuple(map(owner, ids)))


def forget(remote: Remote, *ids: str) -> set[bytes]:
    owners = list(map(owner, ids))
    gone = remote.owned_by(owners)
    remote.forget(owners, gone)
    return gone


@pytest.fixture(params=["file", "memory"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path) -> Bucket:
    return Bucket((tmp_path / "a bucket").as_uri() if request.param == "file" else "memory://")


class Trouble:
    """A real bucket behind a line that can be cut, slowed down or made to corrupt what it carries."""

    def __init__(self) -> None:
        self.bucket = Bucket("memory://")
        self.down = False
        self.clear = threading.Event()
        self.clear.set()
        self.corrupt = False
        self.calls = 0

    def _line(self) -> None:
        self.calls += 1
        self.clear.wait()
        if self.down:
            raise ConnectionError("no route to host")

    def get(self, names: Sequence[str]) -> Mapping[str, bytes]:
        self._line()
        found = self.bucket.get(names)
        if self.corrupt:
            return {name: data[:50] + b"?" + data[51:] for name, data in found.items()}
        return found

    def put(self, items: Mapping[str, bytes]) -> None:
        self._line()
        self.bucket.put(items)

    def delete(self, names: Sequence[str]) -> None:
        self._line()
        self.bucket.delete(names)

    def names(self, prefix: str) -> list[str]:
        self._line()
        return list(self.bucket.names(prefix))


def test_rows_come_back(bucket: Bucket) -> None:
    remote = Remote(bucket)
    rows = [make_row(seed, ("a", f"doc {seed}")[: seed % 3]) for seed in range(30)]
    remote.put(rows)
    assert remote.get([row.key for row in rows] + [make_key(99)]) == {row.key: row for row in rows}
    assert remote.has([make_key(0), make_key(99)]) == {make_key(0)}
    assert remote.info()["rows"] == 30
    assert {row.key: row for row in remote.scan()} == {row.key: row for row in rows}
    remote.delete(make_key(3))
    assert remote.get([make_key(3)]) == {}


def test_asking_what_is_kept_fetches_nothing_where_the_place_can_tell() -> None:
    line = Trouble()
    Remote(line).put([make_row(0), make_row(1)])
    assert Remote(line).has([make_key(0), make_key(99)]) == {make_key(0)}  # four methods will do
    line.bucket.get = None  # type: ignore[assignment, method-assign]
    assert Remote(line.bucket).has([make_key(0), make_key(99)]) == {make_key(0)}


def test_a_forgotten_document_is_gone_from_the_bucket(bucket: Bucket) -> None:
    remote = Remote(bucket)
    remote.put([make_row(1, ("a",)), make_row(2, ("a", "b/../c")), make_row(3)])
    remote.link([(make_key(3), [owner("d")]), (make_key(77), [owner("d")])])
    assert remote.get([make_key(3)])[make_key(3)].owners == (owner("d"),)
    assert forget(remote, "b/../c", "nobody") == {make_key(2)}
    assert forget(remote, "a", "d") >= {make_key(1), make_key(3)}
    assert list(bucket.names("factors/")) == []
    assert remote.get([make_key(1), make_key(2), make_key(3)]) == {}


def test_an_object_that_is_too_large_is_not_fetched(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_BYTES == 256 * 2**20
    Remote(bucket).put([make_row(0)])
    monkeypatch.setattr("rag_explain.store.remote.MAX_BYTES", 10)
    assert Remote(bucket).get([make_key(0)]) == {}


def test_two_machines_share_what_one_has_built(tmp_path: Path) -> None:
    url = (tmp_path / "bucket").as_uri()
    with Store(tmp_path / "one", remote=url) as one, Store(tmp_path / "two", remote=url) as two:
        kept = one.put([make_entry(0)])
        found = two.get([make_key(0)])[make_key(0)]
        assert found.tier == "remote"
        np.testing.assert_array_equal(found.placed.block.numpy(), kept[make_key(0)].block.numpy())
        assert two.get([make_key(0)])[make_key(0)].tier == "memory"
    with Store(tmp_path / "two") as two:
        assert two.get([make_key(0)])[make_key(0)].tier == "disk"


def test_a_document_is_forgotten_on_a_machine_that_only_fetched_it(tmp_path: Path) -> None:
    """Another machine has erased it from the bucket by then: this one's disk must still know whose it is."""
    url = (tmp_path / "bucket").as_uri()
    with Store(tmp_path / "one", remote=url) as one, Store(tmp_path / "two", remote=url) as two:
        one.put([make_entry(0, ids=("a",))])
        assert two.get([make_key(0)])[make_key(0)].tier == "remote"
        assert one.forget(["a"]) == 1
        assert two.forget(["a"]) == 1
        assert two.get([make_key(0)]) == {}
    assert b"word0x" not in b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_remote_that_is_down_means_local_work_and_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    line = Trouble()
    line.down = True
    with Store(remote=line) as store:
        for seed in range(5):
            assert store.get([make_key(seed)]) == {}
            built = store.build([make_key(seed)], lambda keys, seed=seed: [make_entry(seed)])
            assert built[make_key(seed)].tier == "built"
        assert store.get([make_key(0)])[make_key(0)].tier == "memory"
    assert len(warnings_in(caplog)) <= 2  # one for reading, one for writing
    assert "no route to host" in warnings_in(caplog)[0]
    assert line.calls == 1  # after the first failure it is left alone


def test_a_slow_remote_costs_one_timeout(caplog: pytest.LogCaptureFixture) -> None:
    line = Trouble()
    line.clear.clear()
    with Store() as store:
        store._tiers = [Remote(line, timeout=0.1, patience=0.1)]
        for seed in range(20):
            assert store.get([make_key(seed)]) == {}
            store.build([make_key(seed)], lambda keys, seed=seed: [make_entry(seed)])
    line.clear.set()
    assert line.calls == 1
    assert "no answer within 0.1 s" in warnings_in(caplog)[0]


def test_a_remote_that_comes_back_is_used_again() -> None:
    line = Trouble()
    line.down = True
    remote = Remote(line)
    with pytest.raises(StoreError, match="no route"):
        remote.put([make_row(0)])
    line.down = False
    with pytest.raises(StoreError, match="a moment ago"):
        remote.get([make_key(0)])
    remote._resume = time.monotonic()  # the pause is over
    remote.put([make_row(0)])
    assert remote.get([make_key(0)])


def test_a_corrupting_remote_is_a_miss_and_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    line = Trouble()
    with Store(remote=line) as other:
        other.put([make_entry(seed) for seed in range(5)])
    line.corrupt = True
    with Store(remote=line) as store:
        for seed in range(5):
            assert store.get([make_key(seed)]) == {}
    assert len(warnings_in(caplog)) == 1
    line.corrupt = False


def test_forgetting_raises_when_the_remote_cannot_be_reached() -> None:
    line = Trouble()
    with Store(remote=line) as store:
        store.put([make_entry(0, ids=("a",))])
        line.down = True
        with pytest.raises(StoreError, match=r"not erased everywhere.*remote"):
            store.forget(["a"])
        line.down = False
        assert store.forget(["a"]) == 1  # even though the remote failed a moment ago
        assert list(line.bucket.names("factors/")) == []
        assert store.get([make_key(0)]) == {}


def test_a_remote_that_only_pretends_to_delete_is_found_out() -> None:
    line = Trouble()
    line.delete = lambda names: None  # type: ignore[method-assign]
    remote = Remote(line)
    remote.put([make_row(0, ("a",))])
    with pytest.raises(StoreError, match="still there"):
        forget(remote, "a")


def test_a_hanging_remote_does_not_keep_the_process_alive() -> None:
    script = (
        "import time\n"
        "from rag_explain.store.remote import Remote\n"
        "class Hangs:\n"
        "    def get(self, names): time.sleep(600)\n"
        "try: Remote(Hangs(), timeout=0.05).get([b'k'])\n"
        "except Exception as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert "no answer" in done.stdout
    assert done.returncode == 0


def test_it_can_be_used_inside_an_event_loop(bucket: Bucket) -> None:
    import asyncio

    async def main() -> int:
        remote = Remote(bucket)
        remote.put([make_row(0)])
        return len(remote.get([make_key(0)]))

    assert asyncio.run(main()) == 1


def test_many_threads(bucket: Bucket) -> None:
    remote = Remote(bucket)
    threads = [threading.Thread(target=remote.put, args=([make_row(seed)],)) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(remote.get([make_key(seed) for seed in range(16)])) == 16


def test_a_missing_extra_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(MissingExtra, match=r"pip install \"rag-explain\[remote\]\""):
        Bucket("memory://")


@pytest.mark.parametrize("url", ["foo://x", "s3://", "://", "", "folder"])
def test_a_place_that_is_no_bucket_is_refused_in_words(url: str) -> None:
    with pytest.raises(StoreError, match=r"cannot be opened .*: give s3://"):
        Store(remote=url)


def test_a_bucket_in_a_folder_is_for_its_owner_only_and_not_made_to_be_read(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no store at file://"):
        Store(remote=(tmp_path / "none").as_uri(), readonly=True)
    assert list(tmp_path.iterdir()) == []
    before = os.umask(0)
    try:
        with Store(remote=(tmp_path / "bucket").as_uri()) as store:
            store.put([make_entry(0)])
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "bucket").stat().st_mode) == 0o700
    with Store(remote=(tmp_path / "bucket").as_uri(), readonly=True) as store:
        assert store.has([make_key(0)]) == {make_key(0)}
