"""Each fused pass on and off: the same rows, for fewer operations."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from rag_explain.encoder import Encoder
from rag_explain.linear import ATTN_LRP, JACOBIAN, LRP, Rules
from rag_explain.linear.fusion import FUSED, Fusion
from tests.support.maps import freeze_with
from tests.support.models import ARCHITECTURES, TEXTS, tiny

PASSES = [field.name for field in fields(Fusion)]


@torch.no_grad()
@pytest.mark.parametrize("rules", [LRP, ATTN_LRP, JACOBIAN], ids=lambda rules: rules.name)
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("fused", PASSES)
def test_a_pass_changes_no_row(fused: str, name: str, rules: Rules) -> None:
    encoder = Encoder(tiny(name))
    batch = encoder.tokenize(TEXTS, "document")
    on, off = (freeze_with(fusion, encoder, batch, rules) for fusion in (FUSED, replace(FUSED, **{fused: False})))
    for (rows, rest), (other_rows, other_rest) in zip(
        (on.push_rows(), on.pull_rows()), (off.push_rows(), off.pull_rows()), strict=True
    ):
        assert float((rows - other_rows).norm() / rows.norm()) < 1e-10
        assert torch.allclose(rest, other_rest, atol=1e-10)
