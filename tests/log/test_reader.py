"""Reading what is not whole: one damaged file, one odd line, a clock that went back. Everything else is still read."""

from __future__ import annotations

import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from rag_explain.errors import FormatError, LogError
from rag_explain.log import ExplanationLog, erase, find, records, summaries
from rag_explain.log.diff import diff
from rag_explain.log.files import Folder
from rag_explain.log.record import PendingRecord, Record
from rag_explain.log.redaction import Policy
from rag_explain.log.verify import verify
from tests.support.samples import QUERY, hits


def one(number: int, **changes: Any) -> Record:
    return Record.of(PendingRecord(f"{QUERY} {number}", "answer", hits(), **changes), Policy(top=3))


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """Three sealed files of eight records each, and a growing one with one record."""
    folder = Folder(tmp_path / "log")
    for at in range(3):
        folder.append([one(8 * at + number).to_line() for number in range(8)])
        folder._seal()
    folder.append([one(24).to_line()])
    return folder


def sealed(folder: Folder) -> list[Path]:
    return sorted(folder.path.glob("log-*.gz"))


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 0x10
    path.write_bytes(raw)


def cut(path: Path, at: int) -> None:
    os.truncate(path, at)


DAMAGE: list[Callable[[Path, int], None]] = [flip, cut]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("part", [0.0, 0.001, 0.3, 0.9, 0.999])
def test_every_other_file_is_read_and_the_damaged_one_is_named_once(folder, caplog, damage, part):
    expected = [record.id for record in records(folder.path)]
    damaged = sealed(folder)[1]
    damage(damaged, int(part * damaged.stat().st_size))
    readers = {
        "records": lambda: [record.id for record in records(folder.path)],
        "summaries": lambda: [summary.id for summary in summaries(folder.path)],
        "log": lambda: [record.id for record in ExplanationLog(folder.path).records()],
    }
    for name, read in readers.items():
        caplog.clear()
        found = read()
        assert [one for one in expected if one in found] == found, name  # in order, each once, none invented
        assert set(expected[:8] + expected[16:]) <= set(found)
        assert [damaged.name in message for message in caplog.messages] == [True], name
    for record_id in expected[:8] + expected[16:]:
        assert find(folder.path, record_id).id == record_id
    verdicts = list(verify(folder.path))
    assert [(verdict.outcome, damaged.name in verdict.reason) for verdict in verdicts if verdict.reason] == [
        ("damaged", True)
    ]
    assert sum(verdict.outcome == "holds" for verdict in verdicts) == 2 * len(found)
    assert len(list(diff(folder.path, folder.path))) == 2 * len(found)


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_stands_before_the_damage_is_read(folder, damage):
    damaged = sealed(folder)[1]
    raw = damaged.read_bytes()
    expected = [record.id for record in records(damaged)]
    for at in range(40, len(raw), len(raw) // 23):
        damaged.write_bytes(raw)
        damage(damaged, at)
        before = zlib.decompressobj(wbits=31).decompress(raw[: at - 8]).count(b"\n")
        found = [record.id for record in records(damaged)]
        assert found[:before] == expected[:before]
        assert [one for one in expected if one in found] == found


def test_a_damaged_file_that_is_not_compressed_is_named(folder, caplog):
    flip(folder.current, 200)
    packed = sealed(folder)[0]
    packed.rename(packed.with_suffix(""))
    packed.with_suffix("").write_bytes(zlib.decompress(packed.with_suffix("").read_bytes(), 31)[:-40])
    assert len(list(records(folder.path))) == 23
    assert [packed.with_suffix("").name in caplog.messages[0], folder.current.name in caplog.messages[1]] == [
        True,
        True,
    ]
    damaged = [verdict.reason for verdict in verify(folder.path) if verdict.outcome == "damaged"]
    assert [reason.split(":")[0] for reason in damaged] == [packed.with_suffix("").name, folder.current.name]


def test_a_record_alone_is_verified_without_the_damage_elsewhere_and_not_without_its_own(folder):
    inside, outside = ([record.id for record in records(path)][-1] for path in (sealed(folder)[1], sealed(folder)[2]))
    cut(sealed(folder)[1], 300)
    assert {verdict.outcome for verdict in verify(folder.path, record_id=outside)} == {"holds"}
    (verdict,) = verify(folder.path, record_id=inside)
    assert (verdict.outcome, sealed(folder)[1].name in verdict.reason) == ("damaged", True)
    with pytest.raises(LogError, match="no record"):
        find(folder.path, inside)


def test_a_folder_in_the_place_of_a_file_does_not_stop_the_others(folder, caplog):
    (folder.path / "log-20200101T000000.000000Z-abcd.jsonl.gz").mkdir()
    assert len(list(records(folder.path))) == 25
    assert "Is a directory" in caplog.text


def signed(body: bytes) -> bytes:
    """A line whose digest is right."""
    return body + f',"check":"{hashlib.blake2b(body, digest_size=8).hexdigest()}"}}'.encode()


def odd_lines() -> Iterator[bytes]:
    """Lines whose digest is right and which are no records of this version."""
    line = one(0).to_line()
    body = line[: line.rindex(b',"check"')]
    for version in (b"1", b"4", b'"3"', b"null"):
        yield signed(body.replace(b'"version":3', b'"version":' + version, 1))
    for raw in (b"{", b'{"a":1', b"[1,2", b"\xff\xfe\x00", b"nonsense", b"[" * 100_000, b'{"format":"rag_explain.log"'):
        yield signed(raw)
    data = json.loads(line)
    del data["check"]
    changes: dict[str, Any] = {
        "id": 7,
        "time": "yesterday",
        "documents": [1],
        "query": ["x"],
        "hits": [3],
        "metadata": 1,
    }
    changes |= {"texts": "some", "explained": None, "library": {}, "query_hash": 5, "dropped": "many"}
    for name, value in changes.items():
        yield signed(json.dumps({**data, name: value}, separators=(",", ":")).encode()[:-1])
    hit = data["hits"][0]
    for name, value in {"id": None, "rank": "1", "score": 10**400, "text": 5, "around": ["x"], "status": "odd"}.items():
        changed = {**data, "hits": [{**hit, name: value}]}
        yield signed(json.dumps(changed, separators=(",", ":")).encode()[:-1])
    why = {"settings": 5, "notices": [["a", "b", "c", "d"]], "score": 10**400, "pairs": [[None] * 4 + [1]], "size": [1]}
    why["absolute"] = float("inf")
    for name, value in [*why.items(), ("pairs", [[0, 3, 0, 3, float("nan")]])]:
        changed = {**data, "hits": [{**hit, "explanation": {**hit["explanation"], name: value}}]}
        yield signed(json.dumps(changed, separators=(",", ":")).encode()[:-1])


ODD = list(odd_lines())


@pytest.mark.parametrize("odd", ODD, ids=range(len(ODD)))
def test_a_whole_line_that_is_no_record_of_this_version_is_reported_and_left_out(tmp_path, caplog, odd):
    folder = Folder(tmp_path)
    lines = [one(1).to_line(), odd, one(2).to_line()]
    folder.append(lines)
    assert [record.to_line() for record in records(tmp_path)] == [lines[0], lines[2]]
    assert ["log.jsonl" in message and "1 lines cannot be read" in message for message in caplog.messages] == [True]
    verdicts = list(verify(tmp_path))
    assert [verdict.outcome for verdict in verdicts] == ["holds"] * 4 + ["unknown"]
    assert verdicts[-1].reason.startswith("log.jsonl: 1 lines cannot be read")
    assert len(list(diff(tmp_path, tmp_path))) == 4
    assert {record.id for record in records(tmp_path)} <= {summary.id for summary in summaries(tmp_path)}


@pytest.mark.parametrize("hours", [-48, 48])
def test_a_record_is_found_by_its_id_after_the_clock_went_back_or_forth(tmp_path, hours):
    made = datetime.now(UTC) + timedelta(hours=hours)
    record_id = f"{int(made.timestamp() * 1000):012x}" + "0" * 20
    folder = Folder(tmp_path)
    folder.append([one(1, id=record_id, time=made).to_line()])
    folder._seal()
    folder.append([one(2).to_line()])
    assert find(tmp_path, record_id).id == record_id
    assert find(tmp_path, record_id[:20]).id == record_id


def test_a_likely_file_is_looked_into_first(folder, monkeypatch):
    opened = []
    last = next(records(sealed(folder)[2])).id
    for path, day in zip(sealed(folder)[:2], ("01", "02"), strict=True):
        path.rename(re.sub(r"log-\d{8}", f"log-202001{day}", str(path)))
    monkeypatch.setattr("rag_explain.log.files._unpacked", lambda file: opened.append(Path(file.name)) or iter(()))
    with pytest.raises(LogError, match="no record"):
        find(folder.path, last)
    assert [path.name[:12] for path in opened][1:] == ["log-20200101", "log-20200102"]


def test_an_id_that_no_encoding_knows_is_not_found(folder):
    with pytest.raises(LogError, match="no record"):
        find(folder.path, "\udcff")


@pytest.mark.parametrize("damage", DAMAGE)
def test_an_erasure_is_done_in_every_other_file_and_the_damaged_one_is_named(folder, damage):
    damaged = sealed(folder)[1]
    damage(damaged, damaged.stat().st_size // 2)
    raw = damaged.read_bytes()
    with pytest.raises(FormatError) as error:
        erase(folder.path, documents=["doc-1"])
    assert str(error.value).startswith("17 records of the log")
    assert f"{damaged.name} is damaged and cannot be rewritten" in str(error.value)
    assert "delete or restore" in str(error.value)
    assert damaged.read_bytes() == raw
    for path in (sealed(folder)[0], sealed(folder)[2], folder.current):
        assert {hit.id for record in records(path) for hit in record.hits} == {"", "doc-2"}
    damaged.unlink()
    assert erase(folder.path, documents=["doc-1"]) == 0


def test_an_erasure_keeps_the_lines_of_another_version_and_says_so(tmp_path):
    line = one(1).to_line()
    foreign = signed(line[: line.rindex(b',"check"')].replace(b'"version":3', b'"version":4', 1))
    Folder(tmp_path).append([one(2).to_line(), foreign])
    with pytest.raises(FormatError, match=r"1 records .* log\.jsonl holds lines .*version 4 cannot be read"):
        erase(tmp_path, documents=["doc-1"])
    assert foreign in Folder(tmp_path).current.read_bytes()


def test_torn_lines_that_an_erasure_removes_are_counted(folder, caplog):
    flip(folder.current, 200)
    assert erase(folder.path, documents=["doc-1"]) == 24
    assert "1 torn or damaged lines of log.jsonl were removed" in caplog.messages
    assert folder.current.read_bytes() == b""


def test_files_of_other_names_are_left_alone(folder):
    (folder.path / "log.jsonl.bak").write_text("mine")
    erase(folder.path, documents=["doc-1"])
    assert (folder.path / "log.jsonl.bak").read_text() == "mine"
