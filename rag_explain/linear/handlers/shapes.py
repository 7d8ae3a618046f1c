"""Operations that move elements and do not change them: views, copies, picks, masks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rag_explain.linear import operations as ops
from rag_explain.linear.recorder import Node, Recorder
from rag_explain.linear.registry import handles, unknown

aten = torch.ops.aten


def emit_unary(rec: Recorder, source: Any, out: Tensor, kind: type[ops.Operation], **settings: Any) -> None:
    """`out` is one linear operation on `source`."""
    node = rec.nodes[id(source)]
    slot = rec.resolve(node)
    if slot is None:
        rec.refuse(out, node.poison or "", is_statistic=node.is_statistic)
    else:
        rec.bind(out, Node(out, rec.emit(kind, slot, like=out, **settings), is_statistic=node.is_statistic))


@handles(aten.clone, aten.detach, aten.alias, aten._to_copy, aten.contiguous, aten.lift_fresh)
def same(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """A copy, perhaps in another precision: the tangent stays as it is."""
    rec.alias(out, args[0])


@handles(aten.dropout)
def dropout(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """In evaluation it hands on what it was given, and is no step; what is left is chance."""
    unknown(rec, func, args, kwargs, out)


@handles(aten.view, aten._unsafe_view, aten.reshape, aten.unsqueeze, aten.squeeze, aten.flatten, aten.unflatten)
def reshape(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    emit_unary(rec, args[0], out, ops.View, in_shape=tuple(args[0].shape))


@handles(aten.t, aten.transpose, aten.permute)
def permute(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    ndim = args[0].ndim
    if func.overloadpacket is aten.permute:
        dims = [d % ndim for d in args[1]]
    else:
        dims = list(range(ndim))
        a, b = (args[1], args[2]) if func.overloadpacket is aten.transpose else (0, -1)
        dims[a], dims[b] = dims[b], dims[a]
    emit_unary(rec, args[0], out, ops.Permute, dims=tuple(dims))


@handles(aten.expand)
def expand(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    emit_unary(rec, args[0], out, ops.Expand, in_shape=tuple(args[0].shape))


def _slice(rec: Recorder, source: Tensor, out: Tensor, dim: int, start: int, stop: int, step: int = 1) -> None:
    in_shape = tuple(source.shape)
    emit_unary(
        rec,
        source,
        out,
        ops.Slice,
        in_shape=in_shape,
        dim=dim % source.ndim,
        start=start,
        stop=stop,
        step=step,
    )


@handles(aten.slice)
def slice_(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    given: list[Any] = list(args)
    source, dim, start, stop, step = given + [0, None, None, 1][len(args) - 1 :]
    begin, end, _ = slice(start, stop).indices(source.shape[dim])
    _slice(rec, source, out, dim, begin, end, step)


@handles(aten.select)
def select(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    source, dim, index = args
    index %= source.shape[dim]
    kept = source.narrow(dim, index, 1)
    _slice(rec, source, kept, dim, index, index + 1)
    emit_unary(rec, kept, out, ops.View, in_shape=tuple(kept.shape))


@handles(aten.unbind)
def unbind(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    dim = args[1] if len(args) > 1 else 0
    for index, piece in enumerate(out):
        select(rec, func, (args[0], dim, index), {}, piece)


@handles(aten.split, aten.split_with_sizes, aten.chunk)
def split(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    dim = kwargs.get("dim", args[2] if len(args) > 2 else 0)
    start = 0
    for piece in out:
        _slice(rec, args[0], piece, dim, start, start + piece.shape[dim])
        start += piece.shape[dim]


@handles(aten.gather)
def gather(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    source, dim, index = args[:3]
    emit_unary(rec, source, out, ops.Gather, in_shape=tuple(source.shape), dim=dim % source.ndim, index=index)


@handles(aten.max)
def maximum(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """max over one axis with a frozen argmax."""
    if func is not aten.max.dim:
        unknown(rec, func, args, kwargs, out)
        return
    (values, indices), source = out, args[0]
    dim = args[1] % source.ndim
    index = indices if indices.ndim == source.ndim else indices.unsqueeze(dim)
    kept = values if values.ndim == source.ndim else values.unsqueeze(dim)
    emit_unary(rec, source, kept, ops.Gather, in_shape=tuple(source.shape), dim=dim, index=index)
    if kept is not values:
        emit_unary(rec, kept, values, ops.View, in_shape=tuple(kept.shape))


@handles(aten.cat, aten.stack)
def concatenate(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    parts = list(args[0])
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % out.ndim
    if func.overloadpacket is aten.stack:
        lifted = [part.unsqueeze(dim) for part in parts]
        for part, thick in zip(parts, lifted, strict=True):
            if rec.find(part):
                emit_unary(rec, part, thick, ops.View, in_shape=tuple(part.shape))
        parts = lifted
    parts = [part for part in parts if part.numel()]  # an empty cache of keys and values, say
    nodes = [rec.find(part) for part in parts]
    slots = [rec.resolve(node) if node else None for node in nodes]
    for node, slot in zip(nodes, slots, strict=True):
        if node and slot is None:
            rec.refuse(out, node.poison or "")
            return
    sizes = tuple(part.shape[dim] if node else -part.shape[dim] for part, node in zip(parts, nodes, strict=True))
    constant = None
    if any(size < 0 for size in sizes):
        constant = torch.cat(
            [torch.zeros_like(part) if node else part for part, node in zip(parts, nodes, strict=True)], dim
        )
    inputs = [slot for slot in slots if slot is not None]
    rec.bind(out, Node(out, rec.emit(ops.Concatenate, *inputs, like=out, dim=dim, sizes=sizes, constant=constant)))


@handles(
    aten.index,
    aten.index_select,
    aten.constant_pad_nd,
    aten.repeat,
    aten.roll,
    aten.flip,
)
def rearrange(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    if func.overloadpacket is aten.constant_pad_nd and len(args) > 2 and args[2] != 0:
        unknown(rec, func, args, kwargs, out)
        return
    # An index that the pass made is an inference tensor, which autograd, on the way back, would not take.
    rest, options = _ordinary(args[1:]), {name: _ordinary(value) for name, value in kwargs.items()}
    emit_unary(
        rec,
        args[0],
        out,
        ops.Rearrange,
        in_shape=tuple(args[0].shape),
        function=lambda x: func(x, *rest, **options),
    )


def _ordinary(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone() if value.is_inference() else value
    return type(value)(map(_ordinary, value)) if isinstance(value, (list, tuple)) else value


@handles(aten.masked_fill)
def masked_fill(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    source, mask, fill = args
    keep = (~mask).to(source.dtype)
    value = float(fill)
    # An infinite fill only ever hides a position from a maximum: as a constant it is nothing.
    constant = None if value == 0 or value in (float("inf"), float("-inf")) else mask.to(source.dtype) * value
    emit_unary(rec, source, out, ops.Scale, in_shape=tuple(source.shape), factor=keep, constant=constant)
