"""The doctor says what is true of a model, and its exit code agrees."""

from __future__ import annotations

import pytest
import torch
from sentence_transformers.base.modules import Dense
from torch import nn

from rag_explain import Explainer
from rag_explain.cli import main
from rag_explain.errors import UnsupportedModel
from rag_explain.methods.checks import examine
from rag_explain.scorers import resolve
from tests.support.models import ARCHITECTURES, folder, tiny


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_every_architecture_is_found_healthy(architecture):
    findings = {finding.subject: finding for finding in examine(resolve(tiny(architecture, dtype=torch.float32)))}
    assert all(finding.ok for finding in findings.values()), findings
    assert ARCHITECTURES[architecture].model in findings["architecture"].seen
    assert "3 blocks" in findings["architecture"].seen
    for check in ("embedding as encoded", "rows + rest = embedding", "push = pull", "derivative = autograd"):
        assert check in findings


def test_what_is_not_supported_is_said():
    model = tiny("bert", after=lambda: [Dense(16, 8, activation_function=nn.Sigmoid())])
    assert [finding.seen for finding in examine(resolve(model)) if not finding.ok] == [
        "this encoder cannot be explained exactly: the activation sigmoid(x) is 0.5 at zero, so it is no multiple of "
        "its input in Dense (module 2)"
    ]


def test_a_prompt_that_leaves_no_room_for_a_text_is_refused():
    model = tiny("bert", prompts={"document": "the cat sat on the mat: "})
    model.max_seq_length = 5
    with pytest.raises(UnsupportedModel, match="no room"):
        Explainer(model)


def test_the_command(capsys):
    assert main(["doctor", str(folder("distilbert"))]) == 0
    out = capsys.readouterr().out
    assert "DistilBertModel" in out
    assert "rest's share" in out
    assert main(["doctor", "nowhere/nothing"]) == 2
    assert "could not be loaded" in capsys.readouterr().err
