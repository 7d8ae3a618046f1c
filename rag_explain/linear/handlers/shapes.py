"""Operations that move elements and do not change them: views, copies, picks, masks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rag_explain.linear.operations import Scale
from rag_explain.linear.rearrangements import Concatenate, Permute, Rearrange, Slice, View
from rag_explain.linear.recorder import Node, Recorder
from rag_explain.linear.registry import Unfollowable, always_frozen, handles, no_rule

aten = torch.ops.aten

# In evaluation dropout hands on what it was given, which makes it no step; in training its result is chance.
handles(aten.dropout)(no_rule)

# Choices and shapes: frozen like everything else that decides without being summed.
always_frozen(
    aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge, aten.isnan, aten.isinf, aten.argmax, aten.argmin,
    aten.argsort, aten.zeros_like, aten.ones_like, aten.empty_like, aten.full_like, aten.new_zeros, aten.new_ones,
    aten.new_empty, aten.new_full, aten.any, aten.all, aten.sym_size,
)  # fmt: skip


@handles(aten.clone, aten.detach, aten.alias, aten._to_copy, aten.contiguous)
def copy(rec: Recorder, out: Tensor, self: Tensor, **_: Any) -> None:
    """A copy, perhaps in another precision: the tangent stays as it is."""
    rec.alias(out, self)


@handles(aten.view, aten._unsafe_view, aten.reshape, aten.unsqueeze, aten.squeeze, aten.flatten, aten.unflatten)
def view(rec: Recorder, out: Tensor, self: Tensor, **_: Any) -> None:
    rec.emit_unary(self, out, View, in_shape=tuple(self.shape))


@handles(aten.permute)
def permute(rec: Recorder, out: Tensor, self: Tensor, dims: Sequence[int]) -> None:
    rec.emit_unary(self, out, Permute, dims=tuple(dim % self.ndim for dim in dims))


@handles(aten.transpose)
def transpose(rec: Recorder, out: Tensor, self: Tensor, dim0: int, dim1: int) -> None:
    dims = list(range(self.ndim))
    dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    permute(rec, out, self, dims)


@handles(aten.t)
def t(rec: Recorder, out: Tensor, self: Tensor) -> None:
    permute(rec, out, self, range(self.ndim)[::-1])


@handles(aten.slice)
def slice_(
    rec: Recorder, out: Tensor, self: Tensor, dim: int, start: int | None, end: int | None, step: int = 1
) -> None:
    dim %= self.ndim
    start, stop, _ = slice(start, end).indices(self.shape[dim])
    rec.emit_unary(self, out, Slice, in_shape=tuple(self.shape), dim=dim, start=start, stop=stop, step=step)


@handles(aten.select)
def select(rec: Recorder, out: Tensor, self: Tensor, dim: int, index: int) -> None:
    index %= self.shape[dim]
    kept = self.narrow(dim, index, 1)
    slice_(rec, kept, self, dim, index, index + 1)
    view(rec, out, kept)


@handles(aten.unbind)
def unbind(rec: Recorder, out: Sequence[Tensor], self: Tensor, dim: int) -> None:
    for index, piece in enumerate(out):
        select(rec, piece, self, dim, index)


@handles(aten.split, aten.split_with_sizes, aten.chunk)
def split(rec: Recorder, out: Sequence[Tensor], self: Tensor, dim: int, **_: Any) -> None:
    start = 0
    for piece in out:
        slice_(rec, piece, self, dim, start, start + piece.shape[dim])
        start += piece.shape[dim]


@handles(aten.max)
def maximum(rec: Recorder, out: Any, self: Tensor, dim: int | None = None, keepdim: bool = False, **_: Any) -> None:
    """The maximum over one axis, with a frozen argmax."""
    if dim is None:
        raise Unfollowable
    largest, index = out
    index = _ordinary(index if keepdim else index.unsqueeze(dim))

    def pick(x: Tensor) -> Tensor:
        return x.gather(dim, index).view(largest.shape)

    rec.emit_unary(self, largest, Rearrange, in_shape=tuple(self.shape), function=pick)


@handles(aten.amax)
def amax(rec: Recorder, out: Tensor, self: Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> None:
    """The largest of one axis, as `max` has it; where several are, the first."""
    if len(dim) != 1:
        raise Unfollowable("there is no rule for the largest value of several axes together")
    maximum(rec, (out, self.argmax(dim[0], keepdim=keepdim)), self, dim[0], keepdim)


@handles(aten.cat)
def cat(rec: Recorder, out: Tensor, tensors: Sequence[Tensor], dim: int) -> None:
    dim %= out.ndim
    parts = [part for part in tensors if part.numel()]  # an empty cache of keys and values has nothing to say
    nodes = [rec.find(part) for part in parts]
    slots = [rec.require(node) for node in nodes if node]
    both = list(zip(parts, nodes, strict=True))
    sizes = tuple(part.shape[dim] if node else -part.shape[dim] for part, node in both)
    constant = None
    if not all(nodes):
        constant = torch.cat([torch.zeros_like(part) if node else part for part, node in both], dim)
    rec.bind(Node(out, rec.emit(Concatenate, *slots, like=out, dim=dim, sizes=sizes, constant=constant)))


@handles(aten.stack)
def stack(rec: Recorder, out: Tensor, tensors: Sequence[Tensor], dim: int) -> None:
    dim %= out.ndim
    parts = [part.unsqueeze(dim) for part in tensors]
    for flat, part in zip(tensors, parts, strict=True):
        if rec.find(flat):
            view(rec, part, flat)
    cat(rec, out, parts, dim)


@handles(aten.expand, aten.gather, aten.index, aten.index_select, aten.repeat, aten.roll, aten.flip)
def rearrange(rec: Recorder, out: Tensor, self: Tensor, **how: Any) -> None:
    func, how = rec.func, {name: _ordinary(value) for name, value in how.items()}
    rec.emit_unary(self, out, Rearrange, in_shape=tuple(self.shape), function=lambda x: func(x, **how))


@handles(aten.constant_pad_nd)
def constant_pad_nd(rec: Recorder, out: Tensor, self: Tensor, pad: Sequence[int], value: float) -> None:
    if value != 0:
        raise Unfollowable
    rearrange(rec, out, self, pad=pad)


def _ordinary(value: Any) -> Any:
    """An index that the pass made is an inference tensor, which autograd would not take on the way back."""
    if isinstance(value, Tensor):
        return value.clone() if value.is_inference() else value
    return type(value)(map(_ordinary, value)) if isinstance(value, (list, tuple)) else value


@handles(aten.masked_fill)
def masked_fill(rec: Recorder, out: Tensor, self: Tensor, mask: Tensor, value: Any) -> None:
    keep, fill = (~mask).to(self.dtype), float(value)
    # An infinite fill only ever hides a position from a maximum: as a constant it is nothing.
    constant = None if fill in (0.0, float("inf"), float("-inf")) else mask.to(self.dtype) * fill
    rec.emit_unary(self, out, Scale, in_shape=tuple(self.shape), factor=keep, constant=constant)
