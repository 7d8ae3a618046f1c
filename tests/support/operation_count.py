"""Floating-point operations, counted: the same on every machine, however busy it is."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch.utils.flop_counter import flop_registry

from rag_explain import _torch
from tests.support.references import rows_by_dimension, ruled_copy


def _by_onednn(left: Any, right: Any, *_: Any, **__: Any) -> int:
    """What torch does not know: its formulas are of `aten` alone."""
    return 2 * left.numel() * len(right)


_FORMULAS: dict[Any, Any] = {**flop_registry, torch.ops.mkldnn._linear_pointwise: _by_onednn}


class _Counter(_torch.DispatchMode):
    """Adds up the matrix products by torch's own formulas. (torch's `FlopCounterMode` does not run `autograd.grad`.)"""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def see(self, product: Callable[[], object], shapes: Hashable) -> None:
        """Told of every product that was counted."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        formula = _FORMULAS.get(func.overloadpacket)
        if formula is None and _torch.is_composite(func):
            with self:
                return _torch.decompose(func, args, kwargs)
        out = func(*args, **kwargs)
        if formula is not None:
            self.total += formula(*args, **kwargs, out_val=out)
            shapes = tuple(tuple(one.shape) for one in args if isinstance(one, torch.Tensor))
            self.see(partial(func, *args, **kwargs), (func, shapes))
        return out


class _Keeper(_Counter):
    def __init__(self) -> None:
        super().__init__()
        self.products: list[tuple[Callable[[], object], Hashable]] = []

    def see(self, product: Callable[[], object], shapes: Hashable) -> None:
        self.products.append((product, shapes))


def products(run: Callable[[], object]) -> list[tuple[Callable[[], object], Hashable]]:
    """The matrix products in `run`, each to be done again, with what it is and the shapes that it has."""
    with _Keeper() as keeper:
        run()
    return keeper.products


def operations(run: Callable[[], object]) -> int:
    """How many floating-point operations the matrix products in `run` take."""
    with _Counter() as counter:
        run()
    return counter.total


def operations_of_the_papers(model: SentenceTransformer, features: dict[str, Any], width: int) -> int:
    """The papers' way to rows: one forward pass and one backward pass per dimension, of which two are counted."""
    counts = []
    with torch.enable_grad():
        for dimensions in (1, 2):
            ruled = ruled_copy(model, gated=False)
            counts.append(operations(lambda ruled=ruled, n=dimensions: rows_by_dimension(ruled, features, 0, n)))
    one, two = counts
    return one + (width - 1) * (two - one)
