"""Explanations in coarser units: cells are summed by the words or sentences that their tokens belong to."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rag_explain.texts.units import Index


def summed(matrix: NDArray[np.float32], rows: Index, columns: Index, shape: tuple[int, int]) -> NDArray[np.float32]:
    """A matrix (n_q + 1, n_d + 1) with rows and columns summed by their indices; -1 and the rest go to the last."""
    total = np.zeros(shape)
    np.add.at(total, (np.append(rows, -1)[:, None], np.append(columns, -1)[None, :]), matrix)
    return total.astype(np.float32)


def largest(values: NDArray[np.float32], rows: Index, columns: Index, shape: tuple[int, int]) -> NDArray[np.float32]:
    """The largest of the values (n_q, n_d) in each pair of units; `shape` is that of the matrix, with a rest."""
    best = np.full(shape, -np.inf)
    np.maximum.at(best, (rows[:, None], columns[None, :]), values)
    return best[:-1, :-1].astype(np.float32)
