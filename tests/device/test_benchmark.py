"""`benchmarks/gpu.py` as the first person with a graphics card will run it: here on the CPU and on the test device."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from tests.support.models import tiny


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tiny("bert", dtype=torch.float32).save(str(tmp_path / "model"))
    return tmp_path / "model"


@pytest.mark.parametrize("name", ["cpu", "toy", "toy:1"])
def test_it_checks_and_prints_one_table(
    name: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    command = [
        "gpu.py",
        "--device",
        name,
        "--model",
        str(saved),
        "--documents",
        "20",
        "--rounds",
        "1",
        "--json",
        str(out),
    ]
    monkeypatch.setattr(sys, "argv", command)
    assert gpu.main() == 0
    printed = capsys.readouterr().out
    assert "the numbers are the CPU's" in printed
    found = json.loads(out.read_text())
    assert found["miss"] < 1e-5
    assert [row["work"] for row in found["work"]][-2:] == ["warm top 20", "precompute 20"]
    assert all(row["seconds"] > 0 for row in found["work"])
    assert all((row["peak_bytes"] is None) == (name == "cpu") for row in found["work"])


def test_a_device_with_other_numbers_is_not_timed(
    saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "toy", "--model", str(saved), "--documents", "6"])
    monkeypatch.setattr(gpu, "EXACT", 1e-12)
    assert gpu.main() == 1
    assert "computes other numbers than the CPU: off by" in capsys.readouterr().out
