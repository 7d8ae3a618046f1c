"""The table that `trace` looks tensor operations up in, by what they are.

A handler gets the operation, its arguments and its result, and writes down what the result is: linear operations on the
arguments that depend on the hidden state, a function of one of them, a constant (no entry), or poison. Handlers are in
`structure` (the same elements elsewhere), `functions` (of one value) and `arithmetic` (sums, products, norms).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from rag_explain.linear.trace import Recorder

Handler = Callable[["Recorder", Any, tuple[Any, ...], dict[str, Any], Any], None]
TABLE: dict[Any, Handler] = {}


def handles(*packets: Any) -> Callable[[Handler], Handler]:
    """Enter a handler into the table for these operations of `torch.ops.aten`."""

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
