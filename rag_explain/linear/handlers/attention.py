"""Fused attention, written out: its probabilities must be seen to be frozen, or followed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rag_explain.linear.handlers.arithmetic import matrices
from rag_explain.linear.handlers.shapes import emit_unary
from rag_explain.linear.operations import View
from rag_explain.linear.recorder import Recorder
from rag_explain.linear.registry import Arguments, handles
from rag_explain.linear.rules import Rules


def _arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Arguments:
    return query, key, value, attn_mask, is_causal, scale, enable_gqa


def _reads(rules: Rules, args: Arguments) -> Arguments:
    return args[2:3] if rules.softmax == "frozen" else args[:4]


@handles(torch.ops.aten.scaled_dot_product_attention, reads=_reads)
def attention(rec: Recorder, func: Any, args: Arguments, kwargs: dict[str, Any], out: Tensor) -> None:
    query, key, value, mask, is_causal, scale, is_grouped = _arguments(*args, **kwargs)
    if is_grouped:
        times = query.shape[-3] // key.shape[-3]
        key = rec.follow(lambda: key.repeat_interleave(times, dim=-3))
        value = rec.follow(lambda: value.repeat_interleave(times, dim=-3))
    if rec.rules.softmax == "frozen":
        weights = _weights(query, key, mask, is_causal, scale)
    else:
        weights = rec.follow(lambda: _weights(query, key, mask, is_causal, scale))
    _mix(rec, weights, value, out)


def _mix(rec: Recorder, weights: Tensor, value: Tensor, out: Tensor) -> None:
    """out = weights @ value, as one batched product; what `@` makes of any shapes is longer to follow."""
    if weights.shape[:-2] != value.shape[:-2]:
        rec.alias(out, rec.follow(lambda: weights @ value))
        return
    flat = []
    for part in (weights, value):
        flat.append(part.reshape(-1, *part.shape[-2:]))
        if rec.find(part):
            emit_unary(rec, part, flat[-1], View, in_shape=tuple(part.shape))
    wide = out.reshape(-1, *out.shape[-2:])
    matrices(rec, torch.ops.aten.bmm.default, tuple(flat), {}, wide)
    emit_unary(rec, wide, out, View, in_shape=tuple(wide.shape))


def _weights(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    """softmax(q k^T * scale + mask), as the documentation of scaled_dot_product_attention defines it."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ key.transpose(-2, -1) * scale
    if is_causal:
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~causal, float("-inf"))
    if mask is None:
        return torch.softmax(scores, dim=-1)
    # A padded position may be allowed to see nothing at all; the fused kernels give zeros there, a softmax would not.
    if mask.dtype == torch.bool:
        blind = ~mask.any(dim=-1, keepdim=True)
        scores = scores.masked_fill(~(mask | blind), float("-inf"))
    else:
        blind = (mask == float("-inf")).all(dim=-1, keepdim=True)
        scores = scores + mask.masked_fill(blind, 0.0)
    return torch.softmax(scores, dim=-1).masked_fill(blind, 0.0)
