"""What each tensor operation is, as far as a frozen encoder cares: the table that `trace` looks operations up in.

A handler gets the operation, its arguments and its result, and writes down what the result is: linear operations on the
arguments that depend on the hidden state, a function of one of them, a constant (no entry), or poison.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rag_explain.errors import UnsupportedOperation
from rag_explain.linear import operations as ops
from rag_explain.linear.trace import Node, Pointwise, Recorder, derivative

aten = torch.ops.aten
Handler = Callable[[Recorder, Any, tuple[Any, ...], dict[str, Any], Any], None]
TABLE: dict[Any, Handler] = {}


def handles(*packets: Any) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        for packet in packets:
            TABLE[packet] = handler
        return handler

    return register


def unknown(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """No rule: everything that comes out is poisoned, and the operation is named."""
    for value in out if isinstance(out, (tuple, list)) else [out]:
        if isinstance(value, Tensor) and value.is_floating_point():
            rec.refuse(value, f"there is no rule for the operation {func.overloadpacket}")


def in_place(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x.op_(...)` is `x = x.op(...)`, unless other values share x's memory: then there is no telling what changed."""
    target = args[0]
    node = rec.find(target)
    twin = getattr(aten, str(func.overloadpacket).removeprefix("aten.").removesuffix("_"), None)
    shared = node is None or any(
        other.tensor is not target and _memory(other.tensor) == _memory(target) for other in rec.nodes.values()
    )
    if shared or twin is None or twin not in TABLE:
        raise UnsupportedOperation(
            f"the encoder writes into a tensor with {func.overloadpacket}, which cannot be followed: "
            "use an encoder implementation without in-place operations"
        )
    before = target.clone()
    assert node is not None
    rec.nodes[id(before)] = Node(before, node.slot, node.pointwise, node.poison, node.is_statistic)
    out = func(*args, **kwargs)
    rec.nodes.pop(id(target))
    TABLE[twin](rec, func, (before, *args[1:]), kwargs, out)
    return out


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


# ---------------------------------------------------------------------- the same elements, elsewhere


@handles(aten.clone, aten.detach, aten.alias, aten._to_copy, aten.contiguous, aten.lift_fresh, aten.dropout)
def same(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """A copy, perhaps in another precision: the tangent stays as it is."""
    node = rec.nodes[id(args[0])]
    if out.is_floating_point():
        rec.bind(out, Node(out, node.slot, node.pointwise, node.poison, node.is_statistic))


def _one(rec: Recorder, source: Any, out: Tensor, kind: type[ops.Operation], **settings: Any) -> None:
    """`out` is one linear operation on `source`."""
    node = rec.nodes[id(source)]
    slot = rec.resolve(node)
    if slot is None:
        rec.refuse(out, node.poison or "", is_statistic=node.is_statistic)
    else:
        rec.bind(out, Node(out, rec.emit(kind, slot, like=out, **settings), is_statistic=node.is_statistic))


@handles(aten.view, aten._unsafe_view, aten.reshape, aten.unsqueeze, aten.squeeze, aten.flatten, aten.unflatten)
def reshape(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    _one(rec, args[0], out, ops.View, in_shape=tuple(args[0].shape))


@handles(aten.t, aten.transpose, aten.permute)
def permute(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    ndim = args[0].ndim
    if func.overloadpacket is aten.permute:
        dims = [d % ndim for d in args[1]]
    else:
        dims = list(range(ndim))
        a, b = (args[1], args[2]) if func.overloadpacket is aten.transpose else (0, -1)
        dims[a], dims[b] = dims[b], dims[a]
    _one(rec, args[0], out, ops.Permute, dims=tuple(dims))


@handles(aten.expand)
def expand(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    _one(rec, args[0], out, ops.Expand, in_shape=tuple(args[0].shape))


def _slice(rec: Recorder, source: Tensor, out: Tensor, dim: int, start: int, stop: int, step: int = 1) -> None:
    in_shape = tuple(source.shape)
    _one(
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
    _one(rec, kept, out, ops.View, in_shape=tuple(kept.shape))


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
    _one(rec, source, out, ops.Gather, in_shape=tuple(source.shape), dim=dim % source.ndim, index=index)


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
    _one(rec, source, kept, ops.Gather, in_shape=tuple(source.shape), dim=dim, index=index)
    if kept is not values:
        _one(rec, kept, values, ops.View, in_shape=tuple(kept.shape))


@handles(aten.cat, aten.stack)
def concatenate(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    parts = list(args[0])
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % out.ndim
    if func.overloadpacket is aten.stack:
        lifted = [part.unsqueeze(dim) for part in parts]
        for part, thick in zip(parts, lifted, strict=True):
            if rec.find(part):
                _one(rec, part, thick, ops.View, in_shape=tuple(part.shape))
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
    aten.repeat_interleave,
)
def rearrange(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    if func.overloadpacket is aten.constant_pad_nd and len(args) > 2 and args[2] != 0:
        unknown(rec, func, args, kwargs, out)
        return
    rest = args[1:]
    _one(
        rec,
        args[0],
        out,
        ops.Rearrange,
        in_shape=tuple(args[0].shape),
        function=lambda x: func(x, *rest, **kwargs),
    )


@handles(aten.masked_fill)
def masked_fill(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    source, mask, fill = args
    keep = (~mask).to(source.dtype)
    value = float(fill)
    # An infinite fill only ever hides a position from a maximum: as a constant it is nothing.
    constant = None if value == 0 or value in (float("inf"), float("-inf")) else mask.to(source.dtype) * value
    _one(rec, source, out, ops.Scale, in_shape=tuple(source.shape), factor=keep, constant=constant)


@handles(aten.where)
def where(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    if len(args) != 3:
        unknown(rec, func, args, kwargs, out)
        return
    mask, *branches = args
    terms = []
    for branch, chosen in zip(branches, (mask, ~mask), strict=True):
        weight = chosen.to(out.dtype)
        if rec.find(branch):
            part = branch * weight
            _one(rec, branch, part, ops.Scale, in_shape=tuple(branch.shape), factor=weight)
            terms.append(part)
        else:
            terms.append(torch.where(chosen, torch.as_tensor(branch, dtype=out.dtype), out.new_zeros(())))
    _sum(rec, terms, (1.0, 1.0), out)


# ---------------------------------------------------------------------- products with weights


@handles(aten.mm, aten.addmm, aten.bmm, aten.baddbmm)
def matrices(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    added = func.overloadpacket in (aten.addmm, aten.baddbmm)
    bias, left, right = args if added else (None, *args)
    if added and (rec.find(bias) or kwargs.get("alpha", 1) != 1):
        unknown(rec, func, args, kwargs, out)
        return
    constant = None if bias is None else bias * kwargs.get("beta", 1)
    a, b = rec.find(left), rec.find(right)
    if a and b:
        _two_matrices(rec, a, b, out, constant)
    elif a:
        if left.ndim == 2:
            _one(rec, left, out, ops.Linear, weight=right, constant=constant)
        else:
            _one(rec, left, out, ops.MixRight, matrix=right, constant=constant)
    elif left.ndim == 3:
        _one(rec, right, out, ops.MixLeft, matrix=left, constant=constant)
    else:
        unknown(rec, func, args, kwargs, out)


def _two_matrices(rec: Recorder, a: Node, b: Node, out: Tensor, constant: Tensor | None) -> None:
    """A product of two values that both depend on the tokens: attention scores, or frozen nothing."""
    if rec.rules.matrices == "refused" or a.tensor.ndim != 3:
        rec.refuse(out, "there is no rule for a product of two matrices that both depend on the tokens")
        return
    left, right = rec.resolve(a), rec.resolve(b)
    if left is None or right is None:
        rec.refuse(out, a.poison or b.poison or "")
        return
    share = 0.5 if rec.rules.matrices == "half" else 1.0
    first = rec.emit(ops.MixRight, left, like=out, matrix=b.tensor * share)
    second = rec.emit(ops.MixLeft, right, like=out, matrix=a.tensor * share)
    shape = tuple(out.shape)
    slot = rec.emit(ops.Sum, first, second, like=out, in_shapes=(shape, shape), signs=(1.0, 1.0), constant=constant)
    rec.bind(out, Node(out, slot))


# ---------------------------------------------------------------------- sums


@handles(aten.add, aten.sub, aten.rsub)
def add(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    left, right = args[:2]
    weight = kwargs.get("alpha", args[2] if len(args) > 2 else 1)
    if func.overloadpacket is aten.rsub:
        left, right = right, left
        signs = (1.0, -float(weight))
    else:
        signs = (1.0, float(-weight if "sub" in str(func.overloadpacket) else weight))
    if _combine(rec, left, right, out, lambda x, y: x * signs[0] + y * signs[1], f"({{}}{signs[1]:+g}*{{}})", signs):
        return
    _sum(rec, [left, right], signs, out)


def _sum(rec: Recorder, terms: list[Any], signs: tuple[float, ...], out: Tensor) -> None:
    slots, shapes, kept, constant = [], [], [], None
    statistic = True
    for term, sign in zip(terms, signs, strict=True):
        node = rec.find(term)
        if node is None:
            value = torch.as_tensor(term, dtype=out.dtype, device=out.device) * sign
            constant = value if constant is None else constant + value
            continue
        slot = rec.resolve(node)
        statistic = statistic and node.is_statistic
        if slot is None:
            rec.refuse(out, node.poison or "", is_statistic=node.is_statistic)
            return
        slots.append(slot)
        shapes.append(tuple(term.shape))
        kept.append(sign)
    slot = rec.emit(ops.Sum, *slots, like=out, in_shapes=tuple(shapes), signs=tuple(kept), constant=constant)
    rec.bind(out, Node(out, slot, is_statistic=statistic))


@handles(aten.sum, aten.mean)
def reduce(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    source = args[0]
    dims = args[1] if len(args) > 1 else None
    dims = [dims] if isinstance(dims, int) else list(dims or range(source.ndim))
    dims = tuple(sorted(d % source.ndim for d in dims))
    size = ops.count([source.shape[d] for d in dims])
    factor = 1.0 / size if func.overloadpacket is aten.mean else 1.0
    # A mean of squares is the way to a norm's denominator.
    curved = rec.nodes[id(source)].is_curved
    _one(rec, source, out, ops.Reduce, in_shape=tuple(source.shape), dims=dims, factor=factor)
    rec.nodes[id(out)].is_statistic |= curved


# ---------------------------------------------------------------------- functions of one value


@handles(
    aten.gelu, aten.relu, aten.silu, aten.tanh, aten.sigmoid, aten.erf, aten.exp, aten.pow, aten.sqrt, aten.rsqrt,
    aten.reciprocal, aten.abs, aten.neg, aten.hardtanh, aten.hardswish, aten.hardsigmoid, aten.leaky_relu, aten.elu,
    aten.mish, aten.softplus, aten.log_sigmoid_forward, aten.clamp, aten.clamp_min, aten.clamp_max, aten.log,
    aten.log1p, aten.expm1, aten.sin, aten.cos, aten.square,
)  # fmt: skip
def pointwise(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    source, rest = args[0], args[1:]
    node = rec.find(source)
    if node is None or any(isinstance(value, Tensor) for value in (*rest, *kwargs.values())):
        unknown(rec, func, args, kwargs, out)
        return
    packet = func.overloadpacket
    scalars = "".join(f",{value}" for value in (*rest, *kwargs.values()))
    name = str(packet).removeprefix("aten.")
    slope = -1.0 if packet is aten.neg else None
    _apply(rec, node, out, lambda x: func(x, *rest, **kwargs), f"{name}({{}}{scalars})", slope)


def _apply(
    rec: Recorder, node: Node, out: Tensor, step: Any, key: str, slope: float | None, offset: float = 0.0
) -> None:
    """`out` is `step` of `node`, element by element; `slope` and `offset` say so when the step is affine."""
    if node.poison:
        rec.refuse(out, node.poison, is_statistic=node.is_statistic)
        return
    if rec.rules.activation == "derivative":
        slot = rec.resolve(node)
        assert slot is not None
        source = node.tensor
        if slope is not None:
            slot = rec.emit(ops.Scale, slot, like=out, in_shape=tuple(source.shape), factor=out.new_tensor(slope))
        else:
            slot = rec.emit_later(slot, lambda: derivative(step, source), source, out)
        rec.bind(out, Node(out, slot))
        return
    inner = node.as_function()
    before = inner.function
    affine = slope is not None and inner.slope is not None
    rec.bind(
        out,
        Node(
            out,
            pointwise=Pointwise(
                inner.base,
                lambda x: step(before(x)),
                key.format(inner.key),
                slope=slope * inner.slope if affine else None,  # type: ignore[operator]  # both set when affine
                offset=slope * inner.offset + offset if affine else 0.0,  # type: ignore[operator]
            ),
            is_statistic=node.is_statistic,
        ),
    )


def _combine(
    rec: Recorder, left: Any, right: Any, out: Tensor, step: Any, key: str, signs: tuple[float, float] | None
) -> bool:
    """Whether `out` is a function of one value: of a number and a value, or of two functions of the same value.

    `signs` are the weights of a sum; None for a product.
    """
    a, b = rec.find(left), rec.find(right)
    if a and b:
        if rec.rules.activation == "derivative" or a.poison or b.poison:
            return False
        f, g = a.as_function(), b.as_function()
        if f.base is not g.base or (f.is_affine and g.is_affine and signs is not None):
            return False
        function = Pointwise(f.base, lambda x: step(f.function(x), g.function(x)), key.format(f.key, g.key))
        rec.bind(out, Node(out, pointwise=function, is_statistic=a.is_statistic))
        return True
    node, other = (a, right) if a else (b, left)
    assert node is not None
    number = _number(other)
    if number is None:
        return False
    if signs is None:
        slope, offset = number, 0.0
    else:
        slope, offset = (signs[0], signs[1] * number) if a else (signs[1], signs[0] * number)
    text = key.format("{}", f"{number:g}") if a else key.format(f"{number:g}", "{}")
    _apply(rec, node, out, lambda x: x * slope + offset, text, slope, offset)
    return True


def _number(value: Any) -> float | None:
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, Tensor) and value.ndim == 0:
        return float(value)
    return None


# ---------------------------------------------------------------------- products of two values


@handles(aten.mul)
def multiply(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    left, right = args
    if _combine(rec, left, right, out, lambda x, y: x * y, "({}*{})", None):
        return
    a, b = rec.find(left), rec.find(right)
    if a and b:
        _two_values(rec, a, b, out)
    else:
        source, factor = (left, right) if a else (right, left)
        _one(rec, source, out, ops.Scale, in_shape=tuple(source.shape), factor=factor)


@handles(aten.div)
def divide(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    left, right = args
    if kwargs.get("rounding_mode") is not None:
        unknown(rec, func, args, kwargs, out)
        return
    a, b = rec.find(left), rec.find(right)
    if b is None:
        number = _number(right)
        multiply(rec, func, (left, 1 / right if number is None else 1 / number), {}, out)
        return
    inverse = right.reciprocal()
    _apply(rec, b, inverse, torch.reciprocal, "1/{}", None)
    if a is None:
        multiply(rec, func, (left, inverse), {}, out)
    else:
        _two_values(rec, a, rec.nodes[id(inverse)], out)


def _two_values(rec: Recorder, a: Node, b: Node, out: Tensor) -> None:
    """x * y, both depending on the tokens: a norm and its denominator, or a gate and its signal."""
    shares = _shares(rec, a, b)
    if shares is None:
        rec.refuse(
            out,
            a.poison or b.poison or "there is no rule for a product of two values that depend on the tokens",
        )
        return
    slots, shapes = [], []
    for node, other, share in ((a, b, shares[0]), (b, a, shares[1])):
        if share == 0:
            continue
        slot = rec.resolve(node)
        if slot is None:
            rec.refuse(out, node.poison or "")
            return
        factor = other.tensor if share == 1 else other.tensor * share
        slots.append(rec.emit(ops.Scale, slot, like=out, in_shape=tuple(node.tensor.shape), factor=factor))
        shapes.append(tuple(out.shape))
    if len(slots) == 2:
        slots = [rec.emit(ops.Sum, *slots, like=out, in_shapes=tuple(shapes), signs=(1.0, 1.0))]
    rec.bind(out, Node(out, slots[0], is_statistic=a.is_statistic and b.is_statistic))


def _shares(rec: Recorder, a: Node, b: Node) -> tuple[float, float] | None:
    """How much of x * y goes to x and to y."""
    if rec.rules.gate == "product":
        return 1.0, 1.0
    if a.is_statistic != b.is_statistic:
        return (0.0, 1.0) if a.is_statistic else (1.0, 0.0)
    if a.poison or b.poison:
        return None
    if rec.rules.gate == "signal" and a.is_curved != b.is_curved:
        return (0.0, 1.0) if a.is_curved else (1.0, 0.0)
    return 0.5, 0.5


# ---------------------------------------------------------------------- norms and softmax


@handles(aten.native_layer_norm)
def layer_norm(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    source, shape, weight, bias = args[:4]
    value, mean, inverse = out
    if len(shape) != 1:
        unknown(rec, func, args, kwargs, value)
        return
    if rec.rules.norm == "frozen":
        _one(rec, source, value, ops.Center, inverse=inverse, weight=weight, constant=bias)
    else:
        factor = inverse if weight is None else inverse * weight
        normalised = (source - mean) * inverse
        _one(rec, source, value, ops.CenterProject, factor=factor, normalised=normalised, constant=bias)


@handles(aten.linalg_vector_norm)
def vector_norm(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    source = args[0]
    order = args[1] if len(args) > 1 else 2
    dims = args[2] if len(args) > 2 else None
    if order != 2 or dims is None:
        rec.refuse(
            out,
            f"there is no rule for the operation {func.overloadpacket} of order {order}",
            is_statistic=True,
        )
        return
    dims = tuple(sorted(d % source.ndim for d in dims))
    length = out.reshape([1 if d in dims else n for d, n in enumerate(source.shape)])
    direction = source / length.clamp_min(torch.finfo(source.dtype).tiny)
    part = source * direction
    in_shape = tuple(source.shape)
    _one(rec, source, part, ops.Scale, in_shape=in_shape, factor=direction)
    _one(rec, part, out, ops.Reduce, in_shape=in_shape, dims=dims, factor=1.0)
    rec.nodes[id(out)].is_statistic = True


@handles(aten._softmax)
def softmax(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    if rec.rules.softmax == "frozen":
        return  # a constant: attention probabilities are coefficients
    source, dim = args[0], args[1] % args[0].ndim
    # p - J x, the constant of the first-order expansion; -inf of a mask never counts, since p is zero there.
    finite = torch.where(out == 0, out.new_zeros(()), source)
    weighted = out * finite
    constant = out - (weighted - out * weighted.sum(dim=dim, keepdim=True))
    _one(rec, source, out, ops.SoftmaxJacobian, probabilities=out, dim=dim, constant=constant)


@handles(
    aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge, aten.isnan, aten.isinf, aten.argmax, aten.argmin,
    aten.argsort, aten.zeros_like, aten.ones_like, aten.empty_like, aten.full_like, aten.new_zeros, aten.new_ones,
    aten.new_empty, aten.new_full, aten.any, aten.all, aten.sym_size,
)  # fmt: skip
def constant_(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """Choices and shapes: frozen like everything else that decides without being summed."""
