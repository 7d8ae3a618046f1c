"""Each fused pass on and off: the same rows, for fewer operations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rag_explain.encoder.model import Encoder
from rag_explain.linear import ATTN_LRP, JACOBIAN, LRP, AffineMap, Recorder, Rules
from rag_explain.linear.fusion import FUSED, Fusion
from tests.support.models import ARCHITECTURES, TEXTS, tiny

PASSES = ("heads", "token_local", "early_pooling")


def _freeze(encoder: Encoder, rules: Rules, fusion: Fusion) -> AffineMap:
    with Recorder(rules) as recorder:

        def visit(block: int, hidden: Tensor) -> Tensor:
            if block == 0:
                recorder.mark(hidden)
            return hidden

        embedding = encoder.run(encoder.read(TEXTS, "document"), visit)
    return recorder.freeze(embedding, fusion)


@torch.no_grad()
@pytest.mark.parametrize("rules", [LRP, ATTN_LRP, JACOBIAN], ids=lambda rules: rules.name)
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("fused", PASSES)
def test_a_pass_changes_no_row(fused: str, name: str, rules: Rules) -> None:
    encoder = Encoder(tiny(name))
    on, off = (_freeze(encoder, rules, fusion) for fusion in (FUSED, replace(FUSED, **{fused: False})))
    for (rows, rest), (other_rows, other_rest) in zip(
        (on.push_rows(), on.pull_rows()), (off.push_rows(), off.pull_rows()), strict=True
    ):
        assert float((rows - other_rows).norm() / rows.norm()) < 1e-10
        assert torch.allclose(rest, other_rest, atol=1e-10)
