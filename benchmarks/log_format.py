"""Which file should a log of explanations be: JSON lines or SQLite?

    python benchmarks/log_format.py [RECORDS]

Both hold the same records (5 documents of 900 characters, 20 word pairs each). One row per thing a log is asked to do.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

_BATCH = 100
_SINGLE = 200


def make_records(count: int) -> list[tuple[str, bytes]]:
    """(id, one line of JSON) of records as large as real ones."""
    random.seed(0)
    words = [f"{random.choice('bcdfglmnprst')}{random.choice('aeiou')}{n:x}" for n in range(4000)]
    made = []
    for number in range(count):
        hits = [
            {
                "id": f"doc-{random.randrange(5000)}",
                "rank": rank,
                "score": random.random(),
                "text": " ".join(random.choices(words, k=150)),
                "sha256": f"{random.getrandbits(256):064x}",
                "explanation": {
                    "method": "bilrp",
                    "fingerprint": "0" * 32,
                    "settings": {"layer": 0, "rules": "lrp"},
                    "pairs": [[1, 5, n * 7, n * 7 + 5, round(random.random() / 9, 6)] for n in range(20)],
                },
            }
            for rank in range(5)
        ]
        key = f"{number:032x}"
        text = " ".join(random.choices(words, k=12))
        made.append((key, json.dumps({"id": key, "time": number, "query": text, "hits": hits}).encode()))
    return made


def seconds(work: Callable[[], object]) -> float:
    """How long `work` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def json_lines(folder: Path, records: list[tuple[str, bytes]]) -> dict[str, float]:
    """One file, appended to with one write and one fsync per batch."""
    path = folder / "log.jsonl"

    def append(lines: list[bytes]) -> None:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(handle, b"".join(line + b"\n" for line in lines))
        os.fsync(handle)
        os.close(handle)

    single = seconds(lambda: [append([line]) for _, line in records[:_SINGLE]]) / _SINGLE
    path.unlink()
    lines = [line for _, line in records]
    batched = seconds(lambda: [append(lines[at : at + _BATCH]) for at in range(0, len(lines), _BATCH)]) / len(lines)
    wanted = records[len(records) // 2][0].encode()

    def find() -> None:
        with path.open("rb") as file:
            json.loads(next(line for line in file if wanted in line))

    def rewrite() -> None:
        with path.open("rb") as file, (folder / "new").open("wb") as new:
            new.writelines(line for line in file if wanted not in line)
            new.flush()
            os.fsync(new.fileno())
        (folder / "new").replace(path)

    def listing() -> None:
        with path.open("rb") as file:
            for line in file:
                json.loads(line[: line.index(b', "hits": [')] + b"}")["query"]

    packed = len(gzip.compress(b"\n".join(lines), 6))
    return {
        "append one, synced (ms)": single * 1e3,
        f"append {_BATCH} at once, each (ms)": batched * 1e3,
        "bytes a record": path.stat().st_size / len(records),
        "  sealed and gzipped": packed / len(records),
        "list all (s)": seconds(listing),
        "find one by id (ms)": seconds(find) * 1e3,
        "erase one (ms)": seconds(rewrite) * 1e3,
    }


def sqlite(folder: Path, records: list[tuple[str, bytes]], journal: str) -> dict[str, float]:
    """A table with the columns that a listing needs and the record as JSON; synced at each commit."""

    def connect(name: str) -> sqlite3.Connection:
        base = sqlite3.connect(folder / f"{journal}-{name}.sqlite", isolation_level=None)
        base.execute(f"PRAGMA journal_mode={journal}")
        base.execute("PRAGMA synchronous=FULL")
        base.execute("PRAGMA secure_delete=ON")
        base.execute("CREATE TABLE IF NOT EXISTS records (id TEXT PRIMARY KEY, query TEXT, record TEXT) WITHOUT ROWID")
        return base

    def append(base: sqlite3.Connection, part: list[tuple[str, bytes]]) -> None:
        base.execute("BEGIN IMMEDIATE")
        rows = [(key, json.loads(line)["query"], line.decode()) for key, line in part]
        base.executemany("INSERT INTO records VALUES (?, ?, ?)", rows)
        base.execute("COMMIT")

    with connect("single") as base:
        single = seconds(lambda: [append(base, [record]) for record in records[:_SINGLE]]) / _SINGLE
    with connect("all") as base:
        parts = [records[at : at + _BATCH] for at in range(0, len(records), _BATCH)]
        batched = seconds(lambda: [append(base, part) for part in parts]) / len(records)
        base.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        size = (folder / f"{journal}-all.sqlite").stat().st_size
        wanted = records[len(records) // 2][0]
        return {
            "append one, synced (ms)": single * 1e3,
            f"append {_BATCH} at once, each (ms)": batched * 1e3,
            "bytes a record": size / len(records),
            "  sealed and gzipped": float("nan"),
            "list all (s)": seconds(base.execute("SELECT id, query FROM records").fetchall),
            "find one by id (ms)": seconds(
                lambda: base.execute("SELECT record FROM records WHERE id = ?", (wanted,)).fetchone()
            )
            * 1e3,
            "erase one (ms)": seconds(lambda: base.execute("DELETE FROM records WHERE id = ?", (wanted,))) * 1e3,
        }


def main() -> None:
    """Print the table."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    records = make_records(count)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        columns = {
            "JSON lines": json_lines(folder, records),
            "SQLite, rollback journal": sqlite(folder, records, "DELETE"),
            "SQLite, WAL": sqlite(folder, records, "WAL"),
        }
    print(f"{count} records, SQLite {sqlite3.sqlite_version}")
    print(f"{'':32}" + "".join(f"{name:>26}" for name in columns))
    for row in columns["JSON lines"]:
        print(f"{row:32}" + "".join(f"{column[row]:26.3f}" for column in columns.values()))


if __name__ == "__main__":
    main()
