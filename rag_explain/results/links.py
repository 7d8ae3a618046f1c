"""Links: which words and phrases of a query and a document belong together, as a short list for people.

A cell of `pairs` is large where its words carry much of the score, and not only where they belong together. So each is
divided by the root of what its row and its column carry:

    strength[i, j] = pairs[i, j] / sqrt(sum of |pairs[i]| x sum of |pairs[:, j]|)
    support[i, j] = strength[i, j] + 0.2 (strength[i - 1, j - 1] + strength[i + 1, j + 1])

Two words are linked when each is the other's best by support, and their strength is at least 1 / sqrt(n_q n_d): that of
a matrix whose cells are all alike. Support tells which of several equal words is meant: "the" before "dog" belongs to
the "the" before "dog". docs/methods.md has the figures behind this choice. Strength decides what is linked; what is
shown is in score units.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rag_explain.texts.tokens import Token

Matrix = NDArray[np.float64]
Block = tuple[slice, slice]

NEIGHBOURS = 0.2  # what a neighbour adds to the support of a pair, chosen on one half of the pairs that people aligned
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Link:
    """A word or phrase of the query and the one of the document that it belongs to.

    `value` is what they carry together, in score units: the sum of all cells between their words.
    """

    query: Token
    document: Token
    value: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        sides = {"query": self.query, "document": self.document}
        places = {side: {"text": one.text, "start": one.start, "end": one.end} for side, one in sides.items()}
        return {**places, "value": self.value}


def strength(pairs: Matrix) -> Matrix:
    """Each cell divided by the root of its row's and its column's sum of |values|; zero where these are."""
    sizes = np.abs(pairs)
    roots = np.sqrt(sizes.sum(axis=1, keepdims=True)) * np.sqrt(sizes.sum(axis=0, keepdims=True))
    found: Matrix = np.divide(pairs, roots, out=np.zeros_like(pairs), where=roots > 0)
    return found


def support(alone: Matrix) -> Matrix:
    """Strengths with a share of those of the pairs before and after."""
    together = alone.copy()
    together[1:, 1:] += NEIGHBOURS * alone[:-1, :-1]
    together[:-1, :-1] += NEIGHBOURS * alone[1:, 1:]
    return together


def linked_words(pairs: Matrix) -> list[tuple[int, int]]:
    """The rows and columns of words that are linked, one to one, in the order of the rows; of equal cells the first."""
    if not pairs.size:
        return []
    alone = strength(pairs)
    together = support(alone)
    best, back = together.argmax(axis=1), together.argmax(axis=0)
    least = (1 - _ROUNDING) / np.sqrt(pairs.size)
    return [(i, int(j)) for i, j in enumerate(best) if back[j] == i and alone[i, j] >= least]


def find_links(
    pairs: NDArray[np.float32],
    query_words: Sequence[Token],
    document_words: Sequence[Token],
    texts: tuple[str | None, str | None],
) -> tuple[Link, ...]:
    """The links between the words of two texts, (n_q, n_d); those that carry most come first, ties in reading order."""
    cells = pairs.astype(np.float64)
    found = [
        Link(_phrase(query_words[rows], texts[0]), _phrase(document_words[columns], texts[1]), _carried(cells, block))
        for block in _phrases(cells, linked_words(cells))
        for rows, columns in [block]
    ]
    return tuple(sorted(found, key=lambda link: -link.value))


def _phrases(cells: Matrix, words: Sequence[tuple[int, int]]) -> list[Block]:
    """Linked words that stand next to each other in both texts, as one block of cells wherever that carries more."""
    blocks: list[Block] = []
    for i, j in words:
        word = (slice(i, i + 1), slice(j, j + 1))
        joined = _joined(blocks[-1], i, j) if blocks else None
        if joined is not None and _carried(cells, joined) > _carried(cells, blocks[-1]):
            blocks[-1] = joined
        else:
            blocks.append(word)
    return blocks


def _joined(block: Block, i: int, j: int) -> Block | None:
    """The block with row i and column j, or None where they do not stand next to it."""
    rows, columns = block
    if i != rows.stop or j not in (columns.start - 1, columns.stop):
        return None
    return slice(rows.start, i + 1), slice(min(columns.start, j), max(columns.stop, j + 1))


def _carried(cells: Matrix, block: Block) -> float:
    return float(cells[block].sum())


def _phrase(words: Sequence[Token], text: str | None) -> Token:
    start, end = words[0].start, words[-1].end
    return Token("" if text is None else text[start:end], start, end)
