"""Rows by group: one tangent per group of tokens gives the sum of the tokens' rows."""

from __future__ import annotations

import pytest
import torch

from rag_explain.encoder.model import Encoder
from rag_explain.linear import ATTN_LRP, JACOBIAN, LRP
from rag_explain.methods.frozen import freeze
from tests.support.models import ARCHITECTURES, TEXTS, tiny

POOLINGS = ("cls", "max", "lasttoken", "weightedmean", "mean_sqrt_len_tokens")
CASES = [*((name, "mean") for name in ARCHITECTURES), *(("bert", pooling) for pooling in POOLINGS)]


def _groups(length: int) -> torch.Tensor:
    """Three groups in the first text, one of them of one token; two in the second; tokens in none."""
    groups = torch.full((2, length), -1)
    groups[0, 1:4], groups[0, 4], groups[0, 5:9] = 0, 1, 2
    groups[1, ::2], groups[1, 3] = 1, 0
    return groups


@torch.no_grad()
@pytest.mark.parametrize("rules", [LRP, ATTN_LRP, JACOBIAN], ids=lambda rules: rules.name)
@pytest.mark.parametrize(("name", "pooling"), CASES)
def test_a_group_is_the_sum_of_its_tokens(name, pooling, rules):
    encoder = Encoder(tiny(name, pooling))
    frozen = freeze(encoder, encoder.read(TEXTS, "document"), 0, rules)[0]
    groups = _groups(frozen.hidden.shape[1])
    tokens, rest = frozen.push_rows()
    expected = torch.stack([(tokens * (groups == group).unsqueeze(-1)).sum(dim=1) for group in range(3)], dim=1)
    for rows, same_rest in (frozen.push_rows(groups=groups), frozen.pull_rows(groups=groups)):
        assert torch.allclose(rows, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))
        assert torch.allclose(same_rest, rest, atol=1e-10)
        assert not rows[1, 2].any()


@torch.no_grad()
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_chunks_of_groups_and_other_values_change_nothing(count, monkeypatch):
    encoder = Encoder(tiny("bert"))
    frozen = freeze(encoder, encoder.read(TEXTS, "document"), 1, LRP)[0]
    groups, weights = _groups(frozen.hidden.shape[1]), torch.randn_like(frozen.hidden)
    rows, rest = frozen.push_rows(weights=weights, groups=groups)
    monkeypatch.setattr(frozen, "chunk", lambda max_bytes, total: count)
    for chunked, same_rest in (frozen.push_rows(weights=weights, groups=groups), frozen.pull_rows(1, weights, groups)):
        assert torch.allclose(rows, chunked, atol=1e-10)
        assert torch.allclose(rest, same_rest, atol=1e-10)


@torch.no_grad()
def test_the_number_of_groups_decides_which_way_is_shorter(monkeypatch):
    encoder = Encoder(tiny("bert"))
    frozen = freeze(encoder, encoder.read([" ".join(TEXTS)], "document"), 0, LRP)[0]
    every = torch.arange(frozen.hidden.shape[1])[None]
    for way in ("push_rows", "pull_rows"):
        monkeypatch.setattr(frozen, way, lambda *_, way=way: way)
    assert frozen.rows(groups=every) == frozen.rows() == "pull_rows"
    assert frozen.rows(groups=every // 8) == "push_rows"


@torch.no_grad()
def test_without_any_group_only_the_rest_is_left():
    encoder = Encoder(tiny("bert"))
    frozen = freeze(encoder, encoder.read(TEXTS, "document"), 0, LRP)[0]
    rows, rest = frozen.rows(groups=torch.full(frozen.hidden.shape[:2], -1))
    assert rows.shape == (2, 0, 16)
    assert torch.allclose(rest, frozen.rows()[1])
