"""A similarity split by named slices of the embedding.

A dot product is a sum over dimensions, so it is a sum over any partition of them: structured encoders train slices to
mean something (S3BERT; Opitz & Frank 2022), Matryoshka encoders order them by weight. The pairs of a slice s are

    pairs_s = rows_q[:, s] rows_d[:, s]^T / (norm_q norm_d),      and the sum over all slices s is pairs

The norms are those of the whole embeddings.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from rag_explain import pairing
from rag_explain.errors import InvalidInput
from rag_explain.factors import Factors
from rag_explain.methods.base import ExplainedPair, explained

Slices = Mapping[str, "slice | tuple[int, int]"]
OTHER = "other dimensions"


def split(query: Factors, document: Factors, slices: Slices) -> dict[str, ExplainedPair]:
    """For each slice what it carries of the pair; dimensions in no slice come last, as `OTHER`."""
    parts = partition(slices, query.rows.shape[1])
    return {name: explained(query, document, *pairing.pair(query, document, part)) for name, part in parts.items()}


def partition(slices: Slices, width: int) -> dict[str, NDArray[np.intp]]:
    """The dimensions of each slice, checked not to overlap, and of what is left of `width`."""
    if not slices:
        raise InvalidInput("name at least one slice of the embedding, as in {'first half': (0, 192)}")
    free = np.ones(width, dtype=bool)
    result: dict[str, NDArray[np.intp]] = {}
    for name, piece in slices.items():
        dimensions = np.arange(width)[piece if isinstance(piece, slice) else slice(*piece)]
        if not len(dimensions) or (isinstance(piece, tuple) and not 0 <= piece[0] < piece[1] <= width):
            raise InvalidInput(f"the slice {name!r} does not lie within the {width} dimensions of the embedding")
        if not free[dimensions].all():
            raise InvalidInput(f"the slice {name!r} overlaps another one: slices must not share dimensions")
        free[dimensions] = False
        result[name] = dimensions
    if free.any():
        result[OTHER] = free.nonzero()[0]
    return result
