"""Fused attention, written out: its probabilities must be seen to be frozen, or followed."""

import torch
from torch import Tensor

from rag_explain.linear.handlers.arithmetic import matrices
from rag_explain.linear.handlers.shapes import view
from rag_explain.linear.recorder import Recorder
from rag_explain.linear.registry import handles
from rag_explain.linear.rules import Rules


def _reads(rules: Rules) -> tuple[str, ...]:
    return ("value",) if rules.softmax == "frozen" else ("query", "key", "value", "attn_mask")


@handles(torch.ops.aten.scaled_dot_product_attention, reads=_reads)
def scaled_dot_product_attention(
    rec: Recorder,
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> None:
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key = rec.follow(lambda: key.repeat_interleave(times, dim=-3))
        value = rec.follow(lambda: value.repeat_interleave(times, dim=-3))
    if rec.rules.softmax == "frozen":
        weights = _weights(query, key, attn_mask, is_causal, scale)
    else:
        weights = rec.follow(lambda: _weights(query, key, attn_mask, is_causal, scale))
    _mix(rec, out, weights, value)


def _mix(rec: Recorder, out: Tensor, weights: Tensor, value: Tensor) -> None:
    """out = weights @ value, as one batched product; what `@` makes of any shapes is longer to follow."""
    if weights.shape[:-2] != value.shape[:-2]:
        rec.alias(out, rec.follow(lambda: weights @ value))
        return
    flat = []
    for part in (weights, value):
        flat.append(part.reshape(-1, *part.shape[-2:]))
        if rec.find(part):
            view(rec, flat[-1], part)
    wide = out.reshape(-1, *out.shape[-2:])
    matrices(rec, wide, *flat)
    view(rec, out, wide)


def _weights(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    """softmax(q k^T * scale + mask), as the documentation of scaled_dot_product_attention defines it."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query * scale) @ key.transpose(-2, -1)  # a query is smaller than its scores
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
