"""Weights in the order in which the processor reads them, for products of few rows.

A dense layer on a query's tangents is a product of a hundred or two rows with a weight, and some of its time goes into
putting the weight in order, anew each time. oneDNN lets one keep the ordered copy. It pays in small encoders, where
queries are answered in milliseconds, and for their wide layers only; on a machine whose memory others use too it pays
most. Square and large weights, and the many rows of documents, are left to torch's own product, which is as fast there.

Copies are kept as long as their weight lives. They take as much memory as the weights: there is a limit for all of them
together.

A copy may be out of date. torch counts writes to a tensor, but not those through `.data`, which is how adapters are
merged into weights: so a few of its elements are compared with the weight's own at each use, and whoever uses copies
(`AffineMap.push_rows`) checks that the result adds up, and does without them where it does not.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

ROWS = 512  # more rows than this pay for the ordering themselves
ELEMENTS = 2**20  # of a weight; so do larger ones
LIMIT = 64 * 2**20  # bytes, of all copies together
_SAMPLE = 16  # elements, from all over the weight: each of them is a look into memory
_BLOCK = 64  # oneDNN fills both sides of a weight up to a multiple of this, at most


@dataclass(frozen=True, eq=False)
class _Copy:
    """The ordered copy of a weight, None where there can be none, and what the weight was when it was made."""

    ordered: Tensor | None
    state: tuple[int, int]
    sample: Tensor
    size: int


_copies: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_copying = threading.Lock()


def product(x: Tensor, weight: Tensor) -> Tensor | None:
    """x (m, k) times weight (o, k) transposed, (m, o); None where the usual product is the better one."""
    if len(x) > ROWS or {x.dtype, weight.dtype} != {torch.float32} or not weight.is_cpu or weight.is_inference():
        return None
    if weight.shape[0] == weight.shape[1] or weight.numel() > ELEMENTS:
        return None
    if not torch.backends.mkldnn.enabled:  # somebody may have turned it off just for now
        return None
    state = weight.data_ptr(), weight._version
    copy: _Copy | None = _copies.get(weight)
    if copy is None or copy.state != state or not torch.equal(copy.sample, _sample(weight)):
        with _copying:
            copy = _copies[weight] = _copy(weight, state)
    return None if copy.ordered is None else _multiply(x, copy.ordered)


def forget(weights: Iterable[Tensor]) -> None:
    """Make the copies of these weights anew when they are next needed."""
    with _copying:
        for weight in weights:
            _copies.pop(weight, None)


def _copy(weight: Tensor, state: tuple[int, int]) -> _Copy:
    _copies.pop(weight, None)
    size = weight.element_size()
    for length in weight.shape:
        size *= -(-length // _BLOCK) * _BLOCK
    ordered = None
    if sum(copy.size for copy in _copies.values()) + size <= LIMIT:
        ordered = _ordered(weight)
    return _Copy(ordered, state, _sample(weight).clone(), 0 if ordered is None else size)


def _ordered(weight: Tensor) -> Tensor | None:
    """The copy; None from a torch, or for a weight, that these operations, which are not public, do not work with."""
    try:
        with torch.inference_mode(False), torch.no_grad():
            ordered: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)
            _multiply(weight.new_zeros(1, weight.shape[1]), ordered)
    except Exception:  # an attribute that is not there, a shape or a processor that oneDNN refuses
        return None
    return ordered


def _multiply(x: Tensor, ordered: Tensor) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x.contiguous(), ordered, None, "none", [], "")
    return result


def _sample(weight: Tensor) -> Tensor:
    # An odd step, so that not the same few columns are looked at in every row.
    return weight.detach().flatten()[:: max(1, weight.numel() // _SAMPLE) | 1]


def _renew_lock(*_: Any) -> None:
    """A child process may have been born while another thread of its parent held the lock."""
    global _copying
    _copying = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)
