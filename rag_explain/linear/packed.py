"""Weights in the order in which the processor reads them, for products of few rows.

A dense layer on a query's tangents is a product of a hundred or two rows with a large weight, and up to a fifth of its
time goes into putting the weight in order, anew each time. oneDNN lets one keep the ordered copy. Documents have so
many rows that it does not matter, and torch's own product is as fast or faster there.

Copies are kept as long as their weight lives, and are made again when it was written to. They take as much memory as
the weights, so there is a limit for all of them together: small encoders, where queries are answered in milliseconds,
fit; of large ones only the first layers do.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

ROWS = 512  # more rows than this pay for the ordering themselves
LIMIT = 64 * 2**20  # bytes, of all copies together


@dataclass(frozen=True, eq=False)
class _Copy:
    """The ordered copy of a weight, None where there was no room for it, and what the weight was when it was made."""

    ordered: Tensor | None
    state: tuple[int, int]
    size: int


_copies: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_copying = threading.Lock()


def product(x: Tensor, weight: Tensor) -> Tensor | None:
    """x (m, k) times weight (o, k) transposed, (m, o); None where the usual product is the better one."""
    if len(x) > ROWS or {x.dtype, weight.dtype} != {torch.float32} or not weight.is_cpu or weight.is_inference():
        return None
    state = weight.data_ptr(), weight._version
    copy = _copies.get(weight)
    if copy is None or copy.state != state:
        with _copying:
            copy = _copies[weight] = _copy(weight, state)
    if copy.ordered is None:
        return None
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x.contiguous(), copy.ordered, None, "none", [], "")
    return result


def _copy(weight: Tensor, state: tuple[int, int]) -> _Copy:
    _copies.pop(weight, None)
    size = weight.numel() * weight.element_size()
    has_room = sum(copy.size for copy in _copies.values()) + size <= LIMIT
    if not has_room or not _can_order():
        return _Copy(None, state, 0)
    with torch.inference_mode(False), torch.no_grad():
        return _Copy(torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS), state, size)


def _can_order() -> bool:
    """These two operations are torch's own, but not of its public interface: another build may not have them."""
    names = ("_linear_pointwise", "_reorder_linear_weight")
    return torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in names)
