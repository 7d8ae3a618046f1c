"""What each part of a text adds on the average, in whichever order its parts are put together: the Shapley value.

    rows[i] = mean over orders of  e(parts before i, and i) - e(parts before i)          e(nothing) = 0

Leaving out one part at a time misses what is said twice: each of two equal sentences is shown to matter nothing. Here
they share what they bring. The rows of a text sum to its embedding, whatever was drawn: the sum checks nothing.

Orders are drawn, and each is taken forwards and backwards, which cancels some of the error (antithetic sampling:
Mitchell et al. 2022). An order takes as many embeddings as there are parts. Where all subsets of the parts are no more
than what would be drawn, all are embedded, and nothing is drawn. The differences between pairs of orders give the
standard error: how far the values of a text are off, as a root mean square over its parts, for the query (of length
one) for which that is worst.
"""

import hashlib
from collections.abc import Iterator
from math import comb, sqrt
from typing import Any, ClassVar

import numpy as np

from rag_explain.encoder.batch import Batch
from rag_explain.errors import InvalidInput, whole_number
from rag_explain.methods.occlusion import Occlusion
from rag_explain.methods.parts import Parts, Vectors
from rag_explain.results.notices import LEFT_OUT, Notice
from rag_explain.scorers.base import Scorer
from rag_explain.texts.passage import Passage
from rag_explain.texts.tokens import Unit

Order = tuple[int, ...]


class Shapley(Occlusion):
    """`shapley`: what each sentence, or word, adds on the average over `samples` orders, drawn from `seed`."""

    name = "shapley"
    options: ClassVar[tuple[str, ...]] = ("samples", "seed", "best")

    def __init__(
        self, scorer: Scorer, layer: int | None = None, *, samples: int = 8, seed: int = 0, best: int | None = None
    ) -> None:
        super().__init__(scorer, layer, best=best)
        self.samples, self.seed = whole_number(samples, "samples"), whole_number(seed, "seed")
        if self.samples < 4 or self.samples % 2:
            raise InvalidInput(f"samples must be an even number of at least 4, not {samples}: orders come in pairs")

    @property
    def notices(self) -> tuple[Notice, ...]:
        told = (
            f"Each value is what that part adds to the score on the average over {self.samples} orders of the parts. "
            "The values of words do not add up to that of their sentence."
        )
        return (*self.scorer.notices, Notice(LEFT_OUT, told, "note"))

    def edits_of(self, batch: Batch, index: int, unit: Unit) -> Parts:
        return Shared(batch, index, unit, self.samples, self.seed)


class Shared(Parts):
    """A text with some of its parts: a subset is a number whose bits are the parts in it."""

    def __init__(self, batch: Batch, index: int, unit: Unit, samples: int, seed: int) -> None:
        super().__init__(batch, index, unit)
        self._n = len(self.parts)
        self._full = (1 << self._n) - 1
        self._is_exact = 2**self._n - 2 <= samples * (self._n - 1)
        self._orders = [] if self._is_exact else list(_orders(self._n, samples, f"{seed}\0{self.strings[0].string}"))
        drawn = dict.fromkeys(subset for order in self._orders for subset in _grown(order))
        wanted = range(self._full) if self._is_exact else drawn
        self._place: dict[int, int | None] = {self._full: 0}
        for subset in wanted:
            if subset != self._full:
                self._add(subset, self.without(at for at in range(self._n) if not subset >> at & 1))

    def _add(self, subset: int, string: Passage | None) -> None:
        self._place[subset] = None if string is None else len(self.strings)
        self.strings += [] if string is None else [string]

    def rows(self, vectors: Vectors) -> tuple[Vectors, dict[str, float] | None]:
        nothing = np.zeros_like(vectors[0])
        values = {subset: nothing if at is None else vectors[at] for subset, at in self._place.items()}
        if self._is_exact:
            return self._exact(values, nothing), {"standard error": 0.0}
        rows = np.array([_added(order, values) for order in self._orders])  # (samples, n, e)
        pairs = rows.reshape(-1, 2, *rows.shape[1:]).mean(axis=1)
        mean = pairs.mean(axis=0)
        off = (pairs - mean).reshape(-1, rows.shape[2])
        count = len(pairs)
        if not np.isfinite(off).all():  # not all was embedded
            return mean, None
        return mean, {"standard error": float(np.linalg.norm(off, 2)) / sqrt(self._n * count * (count - 1))}

    def _exact(self, values: dict[int, Vectors], nothing: Vectors) -> Vectors:
        """Over all orders: each subset as often as it comes before a part."""
        rows = np.zeros((self._n, len(nothing)))
        for subset, value in values.items():
            size = subset.bit_count()
            for at in range(self._n):
                if not subset >> at & 1:
                    rows[at] += (values[subset | 1 << at] - value) / (self._n * comb(self._n - 1, size))
        return rows


def _orders(n: int, samples: int, text: str) -> Iterator[Order]:
    """Orders that are the same for the same text, each followed by its reverse."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    generator = np.random.default_rng(int.from_bytes(digest, "big"))
    for _ in range(samples // 2):
        order = tuple(generator.permutation(n).tolist())
        yield order
        yield order[::-1]


def _grown(order: Order) -> Iterator[int]:
    """The subsets that the parts make, from none to all."""
    subset = 0
    yield subset
    for at in order:
        subset |= 1 << at
        yield subset


def _added(order: Order, values: dict[int, Vectors]) -> Any:
    """(n, e): what each part adds when the parts come in this order."""
    grown = np.array([values[subset] for subset in _grown(order)])
    added = np.empty_like(grown[1:])
    added[list(order)] = grown[1:] - grown[:-1]
    return added
