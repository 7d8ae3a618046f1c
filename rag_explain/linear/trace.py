"""From a forward pass to a frozen affine map, by what each operation is and not by which architecture it is in.

The encoder's own forward pass runs once, unchanged, under a `Recorder`. Every tensor operation that touches a value
depending on the marked hidden state is looked up in a table and written down as linear operations with frozen
coefficients. Both modes used here are thread-local in torch: nothing is patched, no class is changed, another thread's
`model.encode` does not notice, and leaving the `with` leaves nothing behind, whether by return or by exception.

An operation without a rule poisons the values that come out of it. Poison is harmless where it is not used (under
frozen attention nothing below the softmax is) and an error that names the operation where the embedding needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from rag_explain.errors import UnsupportedOperation
from rag_explain.linear.affine import AffineMap
from rag_explain.linear.operations import Operation, Scale
from rag_explain.linear.rules import Rules
from rag_explain.linear.table import TABLE, unknown

Function = Callable[[Tensor], Tensor]


@dataclass(eq=False)
class Pointwise:
    """A value that is an elementwise function of one other value: an activation, or a step on the way to one.

    Activations are recognised by this and not by their module: GELU written out with tanh, pow and mul is one function
    of its input, while a tanh on its own is another.
    """

    base: Node
    function: Function
    key: str  # names the function, so that its value and slope at zero are found once
    slope: float | None = None  # set when the function is slope * x + offset
    offset: float = 0.0

    @property
    def is_affine(self) -> bool:
        return self.slope is not None


@dataclass(eq=False)
class Node:
    """A value of the forward pass that depends on the marked hidden state."""

    tensor: Tensor
    slot: int | None = None
    pointwise: Pointwise | None = None
    poison: str | None = None
    # A norm's denominator, or something on the way to it: it may only multiply, and is then frozen.
    is_statistic: bool = False

    def as_function(self) -> Pointwise:
        """This value as a function of its base; of itself, when it came out of a linear operation."""
        return self.pointwise or Pointwise(self, lambda x: x, "x", slope=1.0)

    @property
    def is_curved(self) -> bool:
        """Whether the value came out of an activation."""
        return self.pointwise is not None and not self.pointwise.is_affine


@dataclass
class _Deferred:
    """A coefficient that needs a derivative, which cannot be taken while the recorder is active."""

    operation: Scale
    fill: Callable[[], Tensor]


@dataclass
class Recorder:
    """Records what a forward pass does to one hidden state.

    with Recorder(LRP) as recorder:
        ...                         # the forward pass; calls recorder.mark(hidden) when it comes by
    frozen = recorder.freeze(embedding)
    """

    rules: Rules
    nodes: dict[int, Node] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)
    where: str = ""  # the module that is running, for error messages
    _slots: int = 0
    _source: Node | None = None
    _deferred: list[_Deferred] = field(default_factory=list)
    _modes: list[Any] = field(default_factory=list)

    def __enter__(self) -> Recorder:
        # Attention first: it is rewritten into operations that the other mode then sees.
        self._modes = [_WrittenOutAttention(), _Listener(self)]
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._modes:
            self._modes.pop().__exit__(kind, error, trace)

    # ------------------------------------------------------------------ for the caller

    def mark(self, hidden: Tensor) -> None:
        """Everything that depends on `hidden` (D, n, h) is recorded from here on."""
        self._source = self.bind(hidden, Node(hidden, slot=self.new_slot()))

    def freeze(self, embedding: Tensor) -> AffineMap:
        """The affine map from the marked hidden state to `embedding` (D, e)."""
        node = self.nodes.get(id(embedding))
        if self._source is None or self._source.slot is None or node is None:
            raise UnsupportedOperation("the embedding does not depend on the tokens in a way that could be followed")
        output = self.resolve(node)
        if output is None:
            raise UnsupportedOperation(f"this encoder cannot be explained exactly: {node.poison}")
        for coefficient in self._deferred:
            coefficient.operation.factor = coefficient.fill()
        return AffineMap(self.operations, self._source.slot, output, self._source.tensor, embedding)

    # ------------------------------------------------------------------ for the table of operations

    def find(self, value: Any) -> Node | None:
        """The node of a tensor that depends on the marked hidden state; None for constants."""
        return self.nodes.get(id(value)) if isinstance(value, Tensor) else None

    def bind(self, tensor: Tensor, node: Node) -> Node:
        """`tensor` is `node` from now on. Nodes keep their tensors alive, so that an id is never used twice."""
        node.tensor = tensor
        self.nodes[id(tensor)] = node
        return node

    def new_slot(self) -> int:
        self._slots += 1
        return self._slots - 1

    def emit(self, kind: type[Operation], *inputs: int, like: Tensor, **settings: Any) -> int:
        """Write down one linear operation whose output has the shape of `like`; returns its slot."""
        slot = self.new_slot()
        self.operations.append(kind(inputs=inputs, output=slot, shape=tuple(like.shape), **settings))
        return slot

    def emit_later(self, slot: int, fill: Callable[[], Tensor], source: Tensor, like: Tensor) -> int:
        """A `Scale` whose factor is computed after the forward pass."""
        out = self.emit(Scale, slot, like=like, in_shape=tuple(source.shape), factor=like)
        scale = self.operations[-1]
        assert isinstance(scale, Scale)
        self._deferred.append(_Deferred(scale, fill))
        return out

    def refuse(self, tensor: Tensor, reason: str, *, is_statistic: bool = False) -> Node:
        """`tensor` cannot be followed; an error only if the embedding needs it."""
        place = f" in {self.where}" if self.where else ""
        where_it_began = reason if " in " in reason and "(module " in reason else reason + place
        return self.bind(tensor, Node(tensor, poison=where_it_began, is_statistic=is_statistic))

    def resolve(self, node: Node) -> int | None:
        """The slot that holds this value's tangent; None when the value is poisoned."""
        if node.slot is None and node.poison is None:
            self._settle(node)
        return node.slot

    def _settle(self, node: Node) -> None:
        """Turn a function of a base into a linear operation on the base: x -> x * f(x)/x, the ratio frozen."""
        function = node.pointwise
        assert function is not None
        base = self.resolve(function.base)
        if base is None:
            node.poison = function.base.poison
            return
        value, source = node.tensor, function.base.tensor
        if function.slope is not None:
            factor = value.new_tensor(function.slope)
            constant = value.new_tensor(function.offset) if function.offset else None
            node.slot = self.emit(
                Scale, base, like=value, in_shape=tuple(source.shape), factor=factor, constant=constant
            )
            return
        at_zero = float(function.function(torch.zeros((), dtype=torch.float64)))
        if not abs(at_zero) < 1e-12:
            node.poison = f"the activation {function.key} is {at_zero:.3g} at zero, so it is no multiple of its input"
            return
        node.slot = self.emit_later(base, lambda: _ratio(function, value, source), source, value)


def _ratio(function: Pointwise, value: Tensor, source: Tensor) -> Tensor:
    """f(x) / x, which is f'(0) at x = 0."""
    slope = _slope_at_zero(function.key, function.function)
    return torch.where(source == 0, value.new_tensor(slope), value / source)


_SLOPES: dict[str, float] = {}


def _slope_at_zero(key: str, function: Function) -> float:
    if key not in _SLOPES:
        _SLOPES[key] = float(derivative(function, torch.zeros((), dtype=torch.float64)))
    return _SLOPES[key]


def derivative(function: Function, at: Tensor) -> Tensor:
    """f'(x) of an elementwise function."""
    with torch.enable_grad():
        x = at.detach().clone().requires_grad_()
        (slope,) = torch.autograd.grad(function(x).sum(), x)
    return slope


class _Listener(TorchDispatchMode):
    """Sees every tensor operation of this thread and hands those that matter to the table."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the twin is never compiled, and torch's guard costs as much as looking an operation up

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _touches(self.recorder.nodes, args) and not _touches(self.recorder.nodes, kwargs.values()):
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            return _in_place(self.recorder, func, args, kwargs)
        out = func(*args, **kwargs)
        TABLE.get(func.overloadpacket, unknown)(self.recorder, func, args, kwargs, out)
        return out


def _in_place(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x.op_(...)` is `x = x.op(...)`, unless other values share x's memory: then there is no telling what changed."""
    target = args[0]
    node = rec.find(target)
    plain = getattr(torch.ops.aten, str(func.overloadpacket).removeprefix("aten.").removesuffix("_"), None)
    used = (
        *(other.tensor for other in rec.nodes.values() if other is not node),
        *(value for operation in rec.operations for value in vars(operation).values() if isinstance(value, Tensor)),
    )
    if node is None or plain not in TABLE or any(_memory(value) == _memory(target) for value in used):
        raise UnsupportedOperation(
            f"the encoder writes into a tensor with {func.overloadpacket}, which cannot be followed: "
            "use an encoder implementation without in-place operations"
        )
    before = target.clone()
    del rec.nodes[id(target)]
    rec.bind(before, node)
    out = func(*args, **kwargs)
    TABLE[plain](rec, getattr(plain, func._overloadname), (before, *args[1:]), kwargs, out)
    return out


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _touches(nodes: dict[int, Node], values: Iterable[Any]) -> bool:
    """Whether any of the arguments of an operation depends on the hidden state; lists of tensors are looked into."""
    if not nodes:
        return False
    return any(
        id(value) in nodes or (isinstance(value, (list, tuple)) and any(id(item) in nodes for item in value))
        for value in values
    )


class _WrittenOutAttention(TorchFunctionMode):
    """Fused attention, written out: its probabilities must be seen to be frozen."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            return _attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(q k^T * scale + mask) v, as the documentation of scaled_dot_product_attention defines it."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], dim=-3)
    scores = query @ key.transpose(-2, -1) * scale
    if is_causal:
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~causal, float("-inf"))
    if attn_mask is None:
        return torch.softmax(scores, dim=-1) @ value
    if attn_mask.dtype != torch.bool:
        return torch.softmax(scores + attn_mask, dim=-1) @ value
    # A padded position may be allowed to see nothing at all; the fused kernels give zeros there, a softmax would not.
    blind = ~attn_mask.any(dim=-1, keepdim=True)
    scores = scores.masked_fill(~(attn_mask | blind), float("-inf"))
    weights = torch.softmax(scores, dim=-1).masked_fill(blind, 0.0)
    return weights @ value
