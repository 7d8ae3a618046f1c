from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from rag_explain.cli import main
from rag_explain.cli.store import parse_size
from rag_explain.errors import InvalidInput
from rag_explain.store import Store
from tests.support.synthetic import make_entry, make_key


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with Store(tmp_path / "store") as store:
        store.put([make_entry(seed, ids=(f"doc {seed}",), n=100) for seed in range(30)])
    return tmp_path / "store"


def test_info(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "info", str(folder)]) == 0
    info = json.loads(capsys.readouterr().out)
    assert (info["disk"]["rows"], info["disk"]["documents"]) == (30, 30)


def test_verify(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "verify", str(folder)]) == 0
    with Store(folder) as store:
        assert store._disk is not None
        store._disk._file.write(
            lambda connection: connection.execute("UPDATE rows SET data = 'x' WHERE key = ?", [make_key(3)])
        )
    assert main(["store", "verify", str(folder)]) == 1
    assert main(["store", "verify", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "disk: 30 rows, 0 damaged",
        "disk: 30 rows, 1 damaged",
        "disk: 29 rows, 0 damaged",
    ]


def test_verify_a_bucket(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bucket = tmp_path / "bucket"
    main(["store", "export", str(folder), bucket.as_uri()])
    (bucket / "factors" / make_key(3).hex()).write_bytes(b"damaged")
    assert main(["store", "verify", bucket.as_uri()]) == 1
    assert main(["store", "verify", bucket.as_uri()]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["remote: 30 rows, 1 damaged", "remote: 29 rows, 0 damaged"]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("command", ["info", "verify"])
def test_a_store_that_is_only_looked_at_is_not_changed(command: str, folder: Path) -> None:
    (folder / "factors.lock").unlink()
    before = contents(folder)
    assert main(["store", command, str(folder)]) == 0
    assert contents(folder) == before


@pytest.mark.parametrize("command", ["info", "verify", "prune --max-size 0", "forget a", "export TARGET"])
def test_no_store_is_begun_where_there_is_none(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *options = command.replace("TARGET", str(tmp_path / "target")).split()
    for place in (str(tmp_path), str(tmp_path / "none"), (tmp_path / "none").as_uri()):
        assert main(["store", name, place, *options]) == 2
        assert "there is no store" in capsys.readouterr().err
    assert contents(tmp_path) == {}


@pytest.mark.parametrize("command", ["info", "verify"])
def test_a_bucket_beside_a_store_is_not_begun_either(
    command: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["store", command, str(folder), "--remote", (tmp_path / "none").as_uri()]) == 2
    assert "there is no store" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("command", ["info", "verify", "prune --max-size 0", "forget a", "export TARGET"])
def test_a_url_that_names_no_bucket_is_one_line(
    command: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *options = command.replace("TARGET", str(tmp_path / "target")).split()
    for place, more in (("foo://x", []), (str(folder), ["--remote", "foo://x"])):
        assert main(["store", name, place, *options, *more]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "cannot be opened" in error
    assert main(["store", "export", str(folder), "foo://x"]) == 2


def test_an_exported_store_is_only_read(folder: Path, tmp_path: Path) -> None:
    (folder / "factors.lock").unlink()
    before = contents(folder)
    assert main(["store", "export", str(folder), str(tmp_path / "target")]) == 0
    assert contents(folder) == before


@pytest.mark.parametrize(
    ("stdin", "reason"),
    [(None, "is closed"), (io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"), "in UTF-8")],
)
def test_standard_input_that_cannot_be_read(
    stdin: object, reason: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", stdin)
    assert main(["store", "forget", str(folder), "-"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert reason in error


def test_a_damaged_file_is_reported_and_left_where_it_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "factors.sqlite").write_bytes(b"this is not a database" * 999)
    before = contents(folder)
    for command in ("info", "verify"):
        assert main(["store", command, str(folder)]) == 2
        assert "cannot be read" in capsys.readouterr().err
    assert contents(folder) == before


def test_prune(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "prune", str(folder), "--max-size", "0"]) == 0
    assert capsys.readouterr().out == "30 rows dropped\n"


def test_export_to_a_folder_and_to_a_bucket(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bucket = (tmp_path / "bucket").as_uri()
    assert main(["store", "export", str(folder), str(tmp_path / "copy")]) == 0
    assert main(["store", "export", str(folder), bucket]) == 0
    assert main(["store", "verify", bucket]) == 0
    assert "remote: 30 rows, 0 damaged" in capsys.readouterr().out
    with Store(tmp_path / "copy") as copy:
        assert len(copy.get([make_key(seed) for seed in range(30)])) == 30


def test_forget(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = (tmp_path / "bucket").as_uri()
    main(["store", "export", str(folder), bucket])
    assert main(["store", "forget", str(folder), "doc 1", "doc 2", "--remote", bucket]) == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("doc 3\ndoc 4\ndoc 1\n"))
    assert main(["store", "forget", str(folder), "-"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["2 rows erased", "2 rows erased"]
    with Store(folder, remote=bucket) as store:
        assert store.get([make_key(1), make_key(2)]) == {}
        assert store.get([make_key(3)])[make_key(3)].tier == "remote"
    assert main(["store", "forget", str(folder)]) == 2


def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "info", str(tmp_path / "typo")]) == 2
    assert "there is no store" in capsys.readouterr().err
    assert not (tmp_path / "typo").exists()


@pytest.mark.parametrize(
    ("text", "size"), [("1000", 1000), ("2k", 2000), ("1.5 GB", 1_500_000_000), ("3mb", 3_000_000), ("1T", 10**12)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "many", "-1", "5 X", "1e9"])
def test_wrong_sizes(text: str) -> None:
    with pytest.raises(InvalidInput, match="not a size"):
        parse_size(text)


OTHER_USER = """
import os, sys
import rag_explain.faiss  # now: root's own files cannot be imported afterwards
from rag_explain.cli import main
from rag_explain.errors import StoreError
from rag_explain.store import Store

if os.geteuid() == 0:  # who may read every file
    os.seteuid(65534)
assert main(["store", "info", sys.argv[1]]) == main(["store", "forget", sys.argv[1], "x"]) == 2
assert main(["search", "x", "--index", sys.argv[2]]) == 2
try:
    Store(sys.argv[1])
except StoreError as error:
    print(error, file=sys.stderr)
"""


def test_what_another_user_keeps_is_not_said_to_be_missing_or_damaged() -> None:
    with TemporaryDirectory() as name:  # not pytest's, which no other user may enter
        places = [Path(name, "store"), Path(name, "index")]
        Path(name).chmod(0o711)
        for place in places:
            place.mkdir(mode=0)
        command = [sys.executable, "-c", OTHER_USER, *map(str, places)]
        ran = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [line for line in ran.stderr.splitlines() if name in line]
    assert ["may not be read by this user" in line for line in lines] == [True, True, True, False]
    assert "cannot be opened (PermissionError" in lines[-1]
