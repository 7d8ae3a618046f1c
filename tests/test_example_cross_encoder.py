"""The example that fine-tunes a cross-encoder, and the benchmark that measures its explanations, on next to nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rag_explain import Explainer
from tests.support.cross_encoders import cross, cross_folder
from tests.test_benchmarks import ROOT, run, write_data


@pytest.mark.slow
def test_a_cross_encoder_is_fine_tuned_saved_and_explained(tmp_path: Path) -> None:
    write_data(tmp_path)
    data = tmp_path / "stsbenchmark"
    (data / "sts-train.csv").write_text((data / "sts-dev.csv").read_text() * 3)
    command = [sys.executable, "examples/train_cross_encoder.py", "--data", str(data), "--out", str(tmp_path / "model")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    options = ["--model", str(cross_folder("bert")), "--steps", "2"]
    done = subprocess.run([*command, *options], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Spearman on 2 dev pairs" in done.stdout
    assert "notebook" in done.stdout
    assert "the model returned" in done.stdout
    trained = Explainer(tmp_path / "model")
    before = Explainer(cross("bert", dtype=torch.float32)).explain("a man plays", "a man is playing")
    after = trained.explain("a man plays", "a man is playing")
    assert after.score != pytest.approx(before.score)
    assert abs(after.gap or 0.0) < 1e-4


@pytest.mark.slow
def test_what_is_said_of_a_cross_encoder_is_measured_on_the_same_pairs(tmp_path: Path) -> None:
    write_data(tmp_path)
    result, printed = run("cross_encoder.py", tmp_path, "--model", str(cross_folder("bert")), "--pairs", "2")
    rows = {(row["set"], row["measure"]): row for row in result["rows"]}
    labels = rows["stsb", "deletion area"]["labels"]
    assert list(labels) == ["lrp", "attnlrp", "gradient-input", "pairs", "random"]
    assert labels["lrp"]["difference"] is None
    assert list(rows["edinburgh", "average precision"]["labels"]) == ["cut 1", "cut 2"]
    assert 0 < rows["edinburgh", "share in pairs"]["labels"]["cut 2"]["mean"] < 1
    assert "deletion area" in printed
