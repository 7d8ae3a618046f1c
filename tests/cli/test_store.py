from __future__ import annotations

import io
import json
from pathlib import Path

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


@pytest.mark.parametrize("command", ["info", "verify", "prune --max-size 0", "forget a"])
def test_no_store_is_begun_in_a_folder_that_has_none(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *options = command.split()
    assert main(["store", name, str(tmp_path), *options]) == 2
    assert "there is no store" in capsys.readouterr().err
    assert contents(tmp_path) == {}


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
