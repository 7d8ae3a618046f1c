"""Pooling before the operations that treat every position alike: the same rows, for fewer operations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rag_explain.encoder.model import Encoder
from rag_explain.linear import ATTN_LRP, JACOBIAN, LRP, Recorder, Rules
from tests.support.models import ARCHITECTURES, TEXTS, tiny
from tests.support.operation_count import operations

CASES = [*((name, "mean") for name in ARCHITECTURES), ("bert", "weightedmean"), ("bert", "mean_sqrt_len_tokens")]


@torch.no_grad()
@pytest.mark.parametrize("rules", [LRP, ATTN_LRP, JACOBIAN], ids=lambda rules: rules.name)
@pytest.mark.parametrize(("name", "pooling"), CASES)
def test_it_changes_no_row_and_saves_operations(name: str, pooling: str, rules: Rules) -> None:
    encoder = Encoder(tiny(name, pooling))
    with Recorder(rules) as recorder:

        def visit(block: int, hidden: Tensor) -> Tensor:
            if block == 0:
                recorder.mark(hidden)
            return hidden

        embedding = encoder.run(encoder.read(TEXTS, "document"), visit)
    early, late = recorder.freeze(embedding), recorder.freeze(embedding, early_pooling=False)
    for way in ("push_rows", "pull_rows"):
        (rows, rest), (late_rows, late_rest) = getattr(early, way)(), getattr(late, way)()
        assert float((rows - late_rows).norm() / rows.norm()) < 1e-10
        assert torch.allclose(rest, late_rest, atol=1e-10)
    if rules is LRP and name == "bert":
        assert operations(early.push_rows) < 0.95 * operations(late.push_rows)
