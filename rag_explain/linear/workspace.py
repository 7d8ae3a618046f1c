"""Memory for tangents. Fresh memory for a large tangent costs a CPU as much as the arithmetic on it."""

import math

from torch import Tensor

from rag_explain.linear.identity import storage_of


class Workspace:
    """Buffers by size, which are taken and given back again and again during one push."""

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}
        self._lent: dict[int, Tensor] = {}

    def take_back(self) -> None:
        """All tangents are dead."""
        for buffer in self._lent.values():
            self._free.setdefault(buffer.numel(), []).append(buffer)
        self._lent.clear()

    def clear(self) -> None:
        """Let go of all memory: what took some did not come to its end."""
        self._free.clear()
        self._lent.clear()

    def take(self, like: Tensor, *shape: int) -> Tensor:
        """Uninitialised memory of this shape."""
        size = math.prod(shape)
        stock = self._free.get(size)
        buffer = stock.pop() if stock else like.new_empty(size)
        self._lent[buffer.data_ptr()] = buffer
        return buffer.view(shape)

    def give(self, tangent: Tensor) -> None:
        """The tangent is dead: its memory can be used again if it came from here."""
        buffer = self._lent.pop(storage_of(tangent), None)
        if buffer is not None:
            self._free.setdefault(buffer.numel(), []).append(buffer)
