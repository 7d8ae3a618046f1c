"""rag-explain doctor --device: what is missing, in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rag_explain import devices
from rag_explain.cli import main
from rag_explain.errors import CheckFailed
from tests.support.models import colbert, folder


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["doctor", str(folder("bert")), *arguments])
    return code, " ".join(capsys.readouterr().out.split())


def test_a_device_that_is_there_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    code, seen = said(capsys, "--device", "cpu")
    assert code == 0
    assert "✓" in seen
    assert "device" in seen


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch is built with CUDA here")
def test_a_build_without_cuda_is_said_before_a_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "a model that is nowhere", "--device", "cuda"])
    seen = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert code == 1
    assert "was built without CUDA: install the build for your card" in seen


def test_each_reason_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.missing("cpu") is None
    assert "knows no device of that name" in str(devices.missing("foo"))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "finds no such device: look for a card and its driver" in str(devices.missing("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert devices.missing("cuda:3") == "this machine has 1 of them, counted from 0"


def test_the_verdict_is_the_first_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    name = str(folder("bert"))
    assert main(["doctor", name]) == 0
    assert capsys.readouterr().out.split("\n")[0].rstrip() == f"Yes: {name} can be explained exactly."
    assert main(["doctor", name, "--device", "meta"]) == 1
    assert capsys.readouterr().out.startswith(f"No: {name} cannot be explained here. device meta: ")


def test_a_model_that_an_explainer_refuses_is_not_said_to_be_fine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*given: object, **options: object) -> None:
        raise CheckFailed("sum of rows + rest misses the embedding by 30.0%")

    monkeypatch.setattr("rag_explain.explainer.Explainer.__init__", refused)
    assert main(["doctor", str(folder("bert"))]) == 1
    assert capsys.readouterr().out.startswith("No: ")


def test_what_is_split_without_an_encoder_says_by_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    colbert().save_pretrained(str(tmp_path))
    assert main(["doctor", str(tmp_path)]) == 0
    assert "can be explained. alignment: its own score, part by part." in capsys.readouterr().out.split("\n")[0]
