"""rag-explain doctor --device: what is missing, in one sentence."""

from __future__ import annotations

import pytest
import torch

from rag_explain import devices
from rag_explain.cli import main
from tests.support.models import folder


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
