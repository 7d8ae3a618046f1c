"""Every handler in the registry against torch's own reverse mode: one row per operation, or a few.

A row is a function of a hidden state (1, 3, 4). Its recorded map is compared with the Jacobian that autograd finds, in
both directions, and, under rules that conserve, with the value itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from rag_explain.errors import UnsupportedOperation
from rag_explain.linear import ATTN_LRP, JACOBIAN, Recorder, Rules
from rag_explain.linear.registry import registered

aten = torch.ops.aten
Function = Callable[[Tensor], Tensor]


def _fixed(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def _flat(x: Tensor) -> Tensor:
    return x.reshape(3, 4)


def _plus(function: Function) -> Function:
    """A frozen result is a coefficient: as autograd has it too, where it cannot be differentiated."""
    return lambda x: x * function(x).to(x.dtype).reshape(-1)[:1] + x


MASK = torch.tensor([[True, False, True, True], [False, True, True, False], [True, True, False, True]])
INDEX = torch.tensor([[[2, 0, 1, 1]]])

# Operation, function of x (1, 3, 4).
FOLLOWED: list[tuple[Any, Function]] = [
    (aten.clone, lambda x: x.clone()),
    (aten.alias, lambda x: aten.alias(x)),
    (aten._to_copy, lambda x: aten._to_copy(x, dtype=torch.float64)),
    (aten.contiguous, lambda x: x.transpose(1, 2).contiguous()),
    (aten.view, lambda x: x.view(4, 3)),
    (aten._unsafe_view, lambda x: aten._unsafe_view(x, [4, 3])),
    (aten.reshape, lambda x: x.transpose(1, 2).reshape(3, 4)),
    (aten.unsqueeze, lambda x: x.unsqueeze(2)),
    (aten.squeeze, lambda x: x.squeeze(0)),
    (aten.flatten, lambda x: x.flatten(1)),
    (aten.unflatten, lambda x: x.unflatten(2, (2, 2))),
    (aten.permute, lambda x: x.permute(2, 0, -2)),
    (aten.transpose, lambda x: x.transpose(-1, 1)),
    (aten.t, lambda x: _flat(x).t()),
    (aten.t, lambda x: x.flatten().t()),
    (aten.expand, lambda x: x.expand(2, -1, -1)),
    (aten.slice, lambda x: x[:, :, 1::2]),
    (aten.slice, lambda x: x[:, -2:]),
    (aten.select, lambda x: x[:, -1]),
    (aten.unbind, lambda x: x.unbind(1)[1] + x.unbind(-1)[0].sum()),
    (aten.split, lambda x: x.split(2, dim=1)[1]),
    (aten.split_with_sizes, lambda x: x.split([1, 3], dim=-1)[1]),
    (aten.chunk, lambda x: x.chunk(2, dim=-1)[0] - x.chunk(2, -1)[1]),
    (aten.gather, lambda x: x.gather(-2, INDEX)),
    (aten.max, lambda x: x.max(dim=1).values),
    (aten.max, lambda x: x.max(dim=-1, keepdim=True).values),
    (aten.amax, lambda x: x.amax(dim=1)),
    (aten.amax, lambda x: x.amax(dim=-1, keepdim=True)),
    (aten.cat, lambda x: torch.cat([x, _fixed(1, 2, 4), 2 * x], dim=1)),
    (aten.cat, lambda x: torch.cat([x, torch.empty(0, dtype=x.dtype)])),
    (aten.stack, lambda x: torch.stack([x, _fixed(1, 3, 4)], dim=-1)),
    (aten.index, lambda x: x[:, [2, 0, 0]]),
    (aten.index_select, lambda x: x.index_select(1, torch.tensor([1, 1]))),
    (aten.constant_pad_nd, lambda x: F.pad(x, (1, 2))),
    (aten.repeat, lambda x: x.repeat(1, 2, 1)),
    (aten.roll, lambda x: x.roll(1, dims=1)),
    (aten.flip, lambda x: x.flip(1)),
    (aten.masked_fill, lambda x: x.masked_fill(MASK, 2.0)),
    (aten.masked_fill, lambda x: x.masked_fill(MASK, torch.tensor(-1.5, dtype=x.dtype))),
    (aten.mm, lambda x: _flat(x) @ _fixed(4, 2)),
    (aten.addmm, lambda x: torch.addmm(_fixed(2), _flat(x), _fixed(4, 2), beta=0.5)),
    (aten.bmm, lambda x: torch.bmm(x, _fixed(1, 4, 2)) + torch.bmm(_fixed(1, 3, 3), x)[..., :2]),
    (aten.bmm, lambda x: torch.bmm(x, x.transpose(1, 2))),
    (aten.baddbmm, lambda x: torch.baddbmm(_fixed(1, 3, 2), x, _fixed(1, 4, 2))),
    (aten.linear, lambda x: F.linear(x, _fixed(5, 4), _fixed(5))),
    (aten.add, lambda x: torch.add(x, x.sum(dim=1, keepdim=True), alpha=0.5) + _fixed(4) + 1),
    (aten.sub, lambda x: torch.sub(_fixed(3, 4), x[:, :1] - 2, alpha=3)),
    (aten.rsub, lambda x: torch.rsub(x, _fixed(3, 4), alpha=2) + (1 - x)),
    (aten.sum, lambda x: x.sum(dim=(0, -1), keepdim=True) + x.sum()),
    (aten.mean, lambda x: x.mean(dim=1) + x.mean()),
    (aten.where, lambda x: torch.where(MASK, x, _fixed(3, 4)) + torch.where(MASK, 2.0, x * 2)),
    (aten.mul, lambda x: x * _fixed(4) * 3 * x.sum(dim=1, keepdim=True)),
    (aten.div, lambda x: x / _fixed(4) / 2),
    (aten.native_layer_norm, lambda x: F.layer_norm(x, (4,), _fixed(4), _fixed(4))),
    (aten.linalg_vector_norm, lambda x: x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)),
    (aten._softmax, lambda x: x.softmax(dim=1)),
    (aten.scaled_dot_product_attention, lambda x: F.scaled_dot_product_attention(x, x, x)),
    (aten.scaled_dot_product_attention, lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True, scale=2.0)),
    (aten.gelu, F.gelu), (aten.gelu, lambda x: F.gelu(x, approximate="tanh")), (aten.relu, F.relu), (aten.silu, F.silu),
    (aten.tanh, torch.tanh), (aten.erf, torch.erf), (aten.abs, torch.abs), (aten.neg, torch.neg), (aten.sin, torch.sin),
    (aten.hardtanh, F.hardtanh), (aten.hardswish, F.hardswish), (aten.leaky_relu, F.leaky_relu), (aten.elu, F.elu),
    (aten.mish, F.mish), (aten.expm1, torch.expm1), (aten.square, torch.square), (aten.pow, lambda x: x**3),
    (aten.log, lambda x: x.exp().log()), (aten.log1p, lambda x: torch.log1p(x.abs())),
    (aten.sqrt, lambda x: x.abs().sqrt()),
    (aten.clamp, lambda x: x.clamp(-0.5, 0.3)), (aten.clamp_min, lambda x: x.clamp_min(0)),
    (aten.clamp, lambda x: x.clamp(min=torch.tensor(-0.2, dtype=x.dtype))), (aten.clamp_max, lambda x: x.clamp_max(0)),
    (aten.rsqrt, lambda x: x * (x.pow(2).mean(dim=-1, keepdim=True) + 1e-6).rsqrt()),
    (aten.reciprocal, lambda x: x * x.pow(2).sum(dim=-1, keepdim=True).sqrt().reciprocal()),
]  # fmt: skip

# Followed by derivatives; not zero at zero, so that no ratio conserves.
DERIVED: list[tuple[Any, Function]] = [
    (aten.sigmoid, torch.sigmoid), (aten.exp, torch.exp), (aten.softplus, F.softplus), (aten.cos, torch.cos),
    (aten.hardsigmoid, F.hardsigmoid), (aten.log_sigmoid_forward, F.logsigmoid),
    (aten.div, lambda x: _fixed(4) / x.exp()),
]  # fmt: skip

# What decides without being summed is a coefficient, and none of these has a derivative of its own.
FROZEN: list[tuple[Any, Function]] = [
    (aten.eq, lambda x: x == 0), (aten.ne, lambda x: x != 0), (aten.lt, lambda x: x < 0), (aten.le, lambda x: x <= 0),
    (aten.gt, lambda x: x > 0), (aten.ge, lambda x: x >= 0), (aten.isnan, torch.isnan), (aten.isinf, torch.isinf),
    (aten.argmax, torch.argmax), (aten.argmin, torch.argmin), (aten.argsort, torch.argsort),
    (aten.zeros_like, torch.zeros_like), (aten.ones_like, torch.ones_like), (aten.any, torch.any),
    (aten.all, torch.all),
    (aten.empty_like, lambda x: torch.empty_like(x).isnan() * 0), (aten.full_like, lambda x: torch.full_like(x, 2)),
    (aten.new_zeros, lambda x: x.new_zeros(2)), (aten.new_ones, lambda x: x.new_ones(2)),
    (aten.new_empty, lambda x: x.new_empty(2).isnan() * 0), (aten.new_full, lambda x: x.new_full((2,), 3)),
    (aten.sym_size, lambda x: torch.tensor(aten.sym_size(x, 1))),
]  # fmt: skip

# In evaluation a detached value is the value; dropout, in training, is chance.
SPECIAL = (aten.detach, aten.dropout)


def _record(function: Function, rules: Rules) -> tuple[Recorder, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(1, 3, 4, dtype=torch.float64)
    with torch.no_grad(), Recorder(rules) as recorder:
        recorder.mark(hidden)
        out = function(hidden).reshape(1, -1)
    return recorder, hidden, out


def _packets(recorder: Recorder) -> set[Any]:
    return {step.info.func.overloadpacket for step in recorder.steps}


def _names(rows: list[tuple[Any, Function]]) -> list[str]:
    return [str(packet).removeprefix("aten.") for packet, _ in rows]


def test_every_registered_operation_has_a_row() -> None:
    covered = {packet for rows in (FOLLOWED, DERIVED, FROZEN) for packet, _ in rows} | set(SPECIAL)
    assert {str(packet) for packet in registered()} == {str(packet) for packet in covered}


@pytest.mark.parametrize(("packet", "function"), FOLLOWED + DERIVED, ids=_names(FOLLOWED + DERIVED))
def test_the_recorded_map_is_the_jacobian(packet: Any, function: Function) -> None:
    recorder, hidden, out = _record(function, JACOBIAN)
    assert packet in _packets(recorder)
    _compare_with_autograd(function, recorder, hidden, out)


@pytest.mark.parametrize(("packet", "function"), FROZEN, ids=_names(FROZEN))
def test_a_coefficient_is_not_followed(packet: Any, function: Function) -> None:
    recorder, hidden, out = _record(_plus(function), JACOBIAN)
    assert packet not in _packets(recorder)
    _compare_with_autograd(_plus(function), recorder, hidden, out)


def _compare_with_autograd(function: Function, recorder: Recorder, hidden: Tensor, out: Tensor) -> None:
    frozen = recorder.freeze(out)
    jacobian = torch.autograd.functional.jacobian(lambda x: function(x).flatten(), hidden).reshape(-1, 12)
    pulled = frozen.pull(torch.eye(out.shape[1], dtype=torch.float64)[:, None])
    pushed = frozen.push(torch.eye(12, dtype=torch.float64).view(12, 1, 3, 4))
    torch.testing.assert_close(pulled.reshape(-1, 12), jacobian, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(pushed.reshape(12, -1).T, jacobian, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("packet", "function"), FOLLOWED, ids=_names(FOLLOWED))
def test_under_rules_that_conserve_the_map_gives_the_value_back(packet: Any, function: Function) -> None:
    recorder, hidden, out = _record(function, ATTN_LRP)
    value = recorder.freeze(out).push(hidden[None], bias=0)
    torch.testing.assert_close(value[0], out, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("packet", "function"), DERIVED, ids=_names(DERIVED))
def test_what_no_ratio_can_conserve_is_refused(packet: Any, function: Function) -> None:
    recorder, _, out = _record(function, ATTN_LRP)
    with pytest.raises(UnsupportedOperation, match="at zero"):
        recorder.freeze(out)


def test_a_detached_value_is_the_value() -> None:
    recorder, hidden, out = _record(lambda x: x.detach() * 2, JACOBIAN)
    assert aten.detach in _packets(recorder)
    torch.testing.assert_close(recorder.freeze(out).push(hidden[None])[0], hidden.reshape(1, -1) * 2)


def test_chance_is_refused_by_name() -> None:
    recorder, _, out = _record(lambda x: F.dropout(x, 0.5, training=True), JACOBIAN)
    with pytest.raises(UnsupportedOperation, match=r"aten\.dropout"):
        recorder.freeze(out)
