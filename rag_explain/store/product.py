"""All of a query's pairs with all of its warm documents, as one product.

Documents lie in tensors of their own. Multiplying them one by one wastes half of the machine, and copying all of them
side by side costs more than the product: so they are copied in panels that stay in the cache, one product each. Ten
documents are one panel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rag_explain.store.memory import Resident
from rag_explain.types import Array, Factors

if TYPE_CHECKING:
    import torch

_CPU_ROWS = 2048  # 3 MB of float32 at 384 dimensions
_DEVICE_ROWS = 65_536


def pair_products(query: Factors, documents: Sequence[Resident]) -> tuple[list[Array], NDArray[np.float64]]:
    """For each document its matrix (n_q + 1, n_d + 1) in score units, and for all the scores (k,), computed apart."""
    left = np.vstack([query.rows, query.rest]) / np.float32(query.norm)
    matrices: list[Array] = []
    for panel, product in multiply(left, documents):
        at = 0
        for document in panel:
            end = at + len(document.block)
            matrix = product[:, at:end] / np.float32(document.norm)
            matrix.flags.writeable = False
            matrices.append(matrix)
            at = end
    embeddings = np.array([document.embedding for document in documents], np.float64)
    norms = np.array([document.norm for document in documents], np.float64) * query.norm
    return matrices, embeddings @ query.embedding.astype(np.float64) / norms


def multiply(left: Array, documents: Sequence[Resident]) -> Iterator[tuple[list[Resident], Array]]:
    """`left` (m, h) times the documents' blocks, in their order: each panel with its product (m, rows)."""
    import torch

    scratch: torch.Tensor | None = None
    half: torch.Tensor | None = None
    for panel in _panels(documents):
        device = panel[0].block.device
        if half is None or half.device != device:
            half, scratch = torch.from_numpy(left).to(device), None
        right = panel[0].block
        if len(panel) > 1:
            rows = sum(len(document.block) for document in panel)
            if scratch is None or len(scratch) < rows:
                scratch = right.new_empty((max(rows, _CPU_ROWS), left.shape[1]))
            right = torch.cat([document.block for document in panel], out=scratch[:rows])
        yield panel, torch.mm(half, right.T).cpu().numpy()


def _panels(documents: Sequence[Resident]) -> Iterator[list[Resident]]:
    """Neighbours on the same device, up to as many rows as are worth multiplying at once there."""
    panel: list[Resident] = []
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
