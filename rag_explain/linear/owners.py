"""Which position of which text the elements of a value belong to, so that a bias can be counted where it enters.

Positions of all texts are numbered through: position p of text d, of n each, is d * n + p. Attention moves what is at
one position to others, but its output at position p is at p: what is added there enters there. A value in which
positions were pooled belongs to none.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

Index = NDArray[np.int64]


class Owner:
    """For each element of a value, the position that it belongs to. Known by identity: operations share what is alike.

    Attributes:
        index: with as many axes as the value, and of size 1 along those on which the position does not depend.
        axis: the axis of the positions, perhaps together with that of the texts.
        length: n, how many positions each text has.
    """

    def __init__(self, index: Index, axis: int, length: int) -> None:
        self.index, self.axis, self.length = index, axis, length
        self._made: dict[tuple[int, ...], Owner | None] = {}
        self._rows: dict[tuple[int, ...], tuple[Index, tuple[int, ...]]] = {}
        self._in_order: dict[tuple[int, ...], bool] = {}

    @classmethod
    def of_hidden(cls, texts: int, length: int) -> Owner:
        """Of a hidden state (D, n, h)."""
        return cls(np.arange(texts * length).reshape(texts, length, 1), 1, length)

    @property
    def content(self) -> Hashable:
        """Equal for owners that say the same."""
        return self.axis, self.length, self.index.shape, self.index.tobytes()

    @property
    def is_by_row(self) -> bool:
        """Whether all elements along the last axis belong together."""
        return self.axis < self.index.ndim - 1 and self.index.shape[-1] == 1

    def rows(self, shape: tuple[int, ...]) -> tuple[Index, tuple[int, ...]]:
        """The position of each row of a value of this shape, and the shape of the rows' own index.

        Where the elements of a row do not belong together, every element is a row.
        """
        if shape not in self._rows:
            leading = shape[:-1] if self.is_by_row else shape
            index = self.index[..., 0] if self.is_by_row else self.index
            self._rows[shape] = np.array(np.broadcast_to(index, leading)).ravel(), leading
        return self._rows[shape]

    def has_all_in_order(self, shape: tuple[int, ...]) -> bool:
        """Whether the rows of a value of this shape are all positions, one after the other."""
        if shape not in self._in_order:
            rows, _ = self.rows(shape)
            self._in_order[shape] = np.array_equal(rows, np.arange(len(rows)))
        return self._in_order[shape]

    def lifted(self, ndim: int) -> Owner:
        """Of the value broadcast to more axes."""
        missing = ndim - self.index.ndim
        if missing <= 0:
            return self
        return Owner(self.index.reshape((1,) * missing + self.index.shape), self.axis + missing, self.length)

    def permuted(self, dims: Sequence[int]) -> Owner:
        """Of the value with its axes in another order."""
        return Owner(self.index.transpose(dims), list(dims).index(self.axis), self.length)

    def reduced(self, dims: Sequence[int], shape: Sequence[int]) -> Owner | None:
        """Of the value summed over some axes, with them or without them; None where that mixes positions."""
        if self.axis in dims or any(self.index.shape[dim] > 1 for dim in dims):
            return None
        if len(shape) == self.index.ndim:
            return self
        kept = tuple(size for dim, size in enumerate(self.index.shape) if dim not in dims)
        return Owner(self.index.reshape(kept), self.axis - sum(dim < self.axis for dim in dims), self.length)

    def sliced(self, dim: int, whole: int, kept: int) -> Owner | None:
        """Of a part of the value along an axis; None where positions are picked: that is a pooling."""
        if dim != self.axis and self.index.shape[dim] == 1:
            return self
        return self if kept == whole > 1 else None

    def broadcast(self, shape: Sequence[int]) -> Owner | None:
        """Of what was picked or repeated from the value, where that left positions as they were, else None."""
        fits = len(shape) == self.index.ndim and shape[self.axis] >= self.length
        return self if fits and all(a in (1, b) for a, b in zip(self.index.shape, shape, strict=True)) else None

    def reshaped(self, in_shape: Sequence[int], shape: Sequence[int]) -> Owner | None:
        """Of the value in another shape; None where its positions are not along one axis any more."""
        key = (*in_shape, -1, *shape)
        if key not in self._made:
            self._made[key] = self._reshaped(tuple(in_shape), tuple(shape))
        return self._made[key]

    def _reshaped(self, in_shape: tuple[int, ...], shape: tuple[int, ...]) -> Owner | None:
        last = max(self.axis, *(axis for axis, size in enumerate(self.index.shape) if size > 1), 0)
        leading = in_shape[: last + 1]
        sizes = [math.prod(shape[:axis]) for axis in range(len(shape) + 1)]
        ends = [end for end, size in enumerate(sizes) if end and size == math.prod(leading)]
        if last != self.axis or not ends:
            return None
        end = ends[0] if self.length > 1 else ends[-1]  # with one position, any axis of size 1 may be that of positions
        index = np.broadcast_to(self.index, (*leading, *self.index.shape[last + 1 :])).reshape(shape[:end])
        for axis in range(end - 1):  # heads, say, all have the same positions
            first = index.take([0], axis)
            index = first if (index == first).all() else index
        return Owner(index.reshape(*index.shape, *[1] * (len(shape) - end)), end - 1, self.length)
