"""The product: a query's block times a document's block is the explanation, and their embeddings' is the score.

    matrix (n_q + 1, n_d + 1) = block_q block_d^T / (norm_q norm_d)          score = <e_q, e_d> / (norm_q norm_d)

Every pair matrix and every bilinear score of the library is computed here. Multiplying a query's warm documents one by
one wastes half of the machine, and copying all of them side by side costs more than the product. So they are copied in
panels that stay in the cache, one product each; ten documents are one panel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rag_explain.factors import Array, Factors

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    Vectors = TypeVar("Vectors", Tensor, NDArray[Any])

_CPU_ROWS = 2048  # 3 MB of float32 at 384 dimensions
_DEVICE_ROWS = 65_536
_TOKEN_BYTES = 256  # a Token with its two strings, about


@dataclass(frozen=True, eq=False)
class Placed:
    """A document's factors, and their block (n + 1, h) on the device that will multiply it."""

    factors: Factors
    block: Tensor

    @classmethod
    def on_host(cls, factors: Factors) -> Placed:
        """In main memory, where tensor and factors share the block."""
        import torch

        return cls(factors, torch.from_numpy(factors.memory))

    @property
    def nbytes(self) -> int:
        """What this takes, on all devices together."""
        return int(self.block.nbytes) + self.factors.embedding.nbytes + _TOKEN_BYTES * len(self.factors.tokens)


def place(hosted: Sequence[Placed], device: torch.device, is_half: bool = False) -> list[Placed]:
    """The same factors with their blocks on a device: all in one transfer, each then in memory of its own."""
    import torch

    if not hosted:
        return []
    together = torch.cat([one.block for one in hosted])
    moved = (together.half() if is_half else together).to(device)
    parts = moved.split([len(one.block) for one in hosted])
    blocks = [moved] if len(parts) == 1 else [part.clone() for part in parts]
    return [Placed(one.factors, block) for one, block in zip(hosted, blocks, strict=True)]


def scores(query: Vectors, documents: Vectors, norms: Any) -> Vectors:
    """(D,): the similarity of an embedding (e,) with each of (D, e); `norms` are the products of their two norms."""
    result: Vectors = documents @ query / norms
    return result


def product(left: Vectors, right: Vectors, norms: Any = 1) -> Vectors:
    """(n_q, n_d): what each pair of rows carries, <left[i], right[j]> / norms."""
    result: Vectors = left @ right.T / norms
    return result


def pair(query: Factors, document: Factors, dimensions: Any = slice(None)) -> tuple[Array, float]:
    """The matrix (n_q + 1, n_d + 1) of a pair in score units, and its score; of some dimensions, their part of both."""
    norms = query.norm * document.norm
    matrix = product(query.block[:, dimensions], document.block[:, dimensions], np.float32(norms))
    embeddings = (factors.embedding[dimensions].astype(np.float64) for factors in (query, document))
    return matrix, float(np.dot(*embeddings)) / norms


def pairs(query: Factors, documents: Sequence[Placed]) -> tuple[list[Array], NDArray[np.float64]]:
    """For each document its matrix (n_q + 1, n_d + 1) in score units, and for all the scores (k,), computed apart."""
    left = query.block / np.float32(query.norm)
    matrices: list[Array] = []
    for panel, multiplied in multiply(left, documents):
        for document, end in zip(panel, accumulate(len(one.block) for one in panel), strict=True):
            matrix = multiplied[:, end - len(document.block) : end] / np.float32(document.factors.norm)
            matrix.flags.writeable = False
            matrices.append(matrix)
    embeddings = np.array([document.factors.embedding for document in documents], np.float64)
    norms = np.array([document.factors.norm for document in documents], np.float64) * query.norm
    return matrices, scores(query.embedding.astype(np.float64), embeddings, norms)


def multiply(left: Array, documents: Sequence[Placed]) -> Iterator[tuple[list[Placed], Array]]:
    """`left` (m, h) times the documents' blocks, in their order: each panel with its product (m, rows)."""
    import torch

    from rag_explain.devices import Attempt

    scratch: torch.Tensor | None = None
    half: torch.Tensor | None = None

    def multiplied(panel: Sequence[Placed], device: torch.device) -> Array:
        nonlocal half, scratch
        if half is None or half.device != device:
            half, scratch = torch.from_numpy(left).to(device), None
        right = panel[0].block
        if len(panel) > 1:
            rows = sum(len(document.block) for document in panel)
            if scratch is None or len(scratch) < rows:
                scratch = half.new_empty((max(rows, _CPU_ROWS), left.shape[1]))
            right = torch.cat([document.block for document in panel], out=scratch[:rows])
        found: Array = torch.mm(half, right.to(half.dtype).T).cpu().numpy()
        return found

    for panel in _panels(documents):
        device = panel[0].block.device
        with Attempt(lambda: panel[0].block.device) as attempt:  # noqa: B023  # asked at once
            found = multiplied(panel, device)
        if attempt.failed:  # factors are in main memory too
            half = scratch = None
            found = np.concatenate([product(left, one.factors.block) for one in panel], axis=1)
        yield panel, found


def _panels(documents: Sequence[Placed]) -> Iterator[list[Placed]]:
    """Neighbours on the same device, up to as many rows as are worth multiplying at once there."""
    panel: list[Placed] = []
    rows = 0
    for document in documents:
        size = len(document.block)
        limit = _CPU_ROWS if document.block.device.type == "cpu" else _DEVICE_ROWS
        if panel and (rows + size > limit or document.block.device != panel[0].block.device):
            yield panel
            panel, rows = [], 0
        panel.append(document)
        rows += size
    if panel:
        yield panel
