"""Occlusion from its equations: one text after another, cosine by cosine, in double precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

Embed = Callable[[str], Sequence[float]]


def score(left: Sequence[float] | None, right: Sequence[float] | None, measure: str) -> float:
    """The similarity of two texts' vectors; nothing (None) scores nothing."""
    if left is None or right is None:
        return 0.0
    product = sum(float(a) * float(b) for a, b in zip(left, right, strict=True))
    if measure == "dot":
        return product
    return product / math.sqrt(sum(float(a) ** 2 for a in left)) / math.sqrt(sum(float(b) ** 2 for b in right))


def matrix(
    embed_query: Embed,
    embed_document: Embed,
    query: tuple[str, Sequence[str | None]],
    document: tuple[str, Sequence[str | None]],
    measure: str = "cosine",
) -> NDArray[np.float64]:
    """(n_q + 1, n_d + 1) of two texts, each with the same text without each of its parts: None where nothing is left.

    pair(i, j) = s(q, d) - s(q without i, d) - s(q, d without j) + s(q without i, d without j); the last row and column
    are what is left over of the losses s(q, d) - s(q, d without j) and s(q, d) - s(q without i, d), and of the score.
    """
    q, d = embed_query(query[0]), embed_document(document[0])
    less_q = [None if text is None else embed_query(text) for text in query[1]]
    less_d = [None if text is None else embed_document(text) for text in document[1]]
    whole = score(q, d, measure)
    found = np.zeros((len(less_q) + 1, len(less_d) + 1))
    for i, without_i in enumerate(less_q):
        for j, without_j in enumerate(less_d):
            one, other = score(without_i, d, measure), score(q, without_j, measure)
            found[i, j] = whole - one - other + score(without_i, without_j, measure)
    for i, without_i in enumerate(less_q):
        found[i, -1] = whole - score(without_i, d, measure) - found[i, :-1].sum()
    for j, without_j in enumerate(less_d):
        found[-1, j] = whole - score(q, without_j, measure) - found[:-1, j].sum()
    found[-1, -1] = whole - found.sum()
    return found


def shapley(values: dict[frozenset[int], NDArray[np.float64]], n: int) -> NDArray[np.float64]:
    """(n, e): what each of n parts adds, the mean over all n! orders of them; `values` are those of all subsets."""
    found = np.zeros((n, len(values[frozenset(range(n))])))
    orders = list(permutations(range(n)))
    for order in orders:
        for place, part in enumerate(order):
            found[part] += values[frozenset(order[: place + 1])] - values[frozenset(order[:place])]
    return found / len(orders)
