"""Indexes of words with BM25 weights: what the index itself keeps of its documents, seen in one way.

A score is a sum over the words of the query. What a document without a word gets for it all the same (BM25+, BM25L) is
its constant; what the document's own words add to that is its weight.

    lucene, robertson   idf f / (f + k1 L)                       L = 1 - b + b length / mean length
    atire, Okapi        idf f (k1 + 1) / (f + k1 L)
    BM25+               the same, and the constant idf delta
    BM25L               idf (k1 + 1) (c + delta) / (k1 + c + delta)        c = f / L
"""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rag_explain.errors import InvalidInput

Numbers = NDArray[Any]
_SAMPLED = 64  # documents and terms that are looked at again before each answer


@dataclass(frozen=True)
class Weight:
    """What one occurrence of a term in a query adds to a document's score.

    `value` is the document's own, `constant` what every document gets; `numbers` say how it comes about.
    """

    value: float
    constant: float = 0.0
    numbers: Mapping[str, float] = field(default_factory=dict)


class TermIndex(ABC):
    """The statistics of one index. `size` is how many documents it has."""

    name: str
    size: int

    @abstractmethod
    def __init__(self, index: Any, vocabulary: Mapping[str, int] | None = None) -> None:
        """Of the index as it is; `vocabulary` are the numbers of words, for one that was made of numbers."""

    @staticmethod
    @abstractmethod
    def is_one(model: Any) -> bool:
        """Whether an object is an index of this kind."""

    @staticmethod
    @abstractmethod
    def state(index: Any) -> Hashable:
        """Another one as soon as the index was made anew, or its numbers were written to."""

    @abstractmethod
    def find(self, terms: Sequence[str], text: str = "") -> int | None:
        """The document that has these terms, as often: of several, any, since they score alike. None: there is none.

        The text tells documents apart where the terms do not.
        """

    @abstractmethod
    def knows(self, term: str) -> bool:
        """Whether a document has this term."""

    @abstractmethod
    def weight(self, term: str, document: int, frequency: int) -> Weight | None:
        """What the term adds to the document's score, in which it occurs so often; None for one in no document."""

    @abstractmethod
    def scores(self, terms: Sequence[str]) -> Numbers:
        """(size,) what the index itself gives for these terms of a query."""

    @abstractmethod
    def statistics(self) -> tuple[dict[str, Any], list[str], list[Numbers]]:
        """What decides every score: settings, terms, and numbers, in an order that the corpus alone decides."""

    @cached_property
    def sample(self) -> list[Numbers]:
        """Some of the statistics, to know the index by."""
        return [np.array(values[:_SAMPLED], np.float32) for values in self._statistics[2]]

    @cached_property
    def digest(self) -> str:
        settings, terms, numbers = self._statistics
        result = hashlib.blake2b(json.dumps([settings, self.size], sort_keys=True).encode(), digest_size=16)
        result.update("\n".join(terms).encode(errors="surrogatepass"))
        for values in numbers:
            result.update(np.ascontiguousarray(values).tobytes())
        return result.hexdigest()

    @cached_property
    def _statistics(self) -> tuple[dict[str, Any], list[str], list[Numbers]]:
        return self.statistics()


def sampled(values: Any) -> bytes:
    """A few of many numbers: a change of all of them shows."""
    return np.asarray(values[:: max(1, len(values) // _SAMPLED)]).tobytes()


class RankBM25(TermIndex):
    """BM25Okapi, BM25L or BM25Plus of rank_bm25, which keep how often each document has each word."""

    def __init__(self, index: Any, vocabulary: Mapping[str, int] | None = None) -> None:
        self._index = index
        kinds = [kind.__name__ for kind in type(index).__mro__ if kind.__name__ in _RANKED]
        if not kinds:
            raise InvalidInput(f"{type(index).__name__} is none of {', '.join(_RANKED)}: how it scores is not known")
        self.name, self._weigh, self.size = type(index).__name__, _RANKED[kinds[0]], int(index.corpus_size)
        self._documents = lru_cache(1)(self._numbered)

    @staticmethod
    def is_one(model: Any) -> bool:
        return all(hasattr(model, name) for name in ("doc_freqs", "doc_len", "avgdl", "idf", "get_scores"))

    @staticmethod
    def state(index: Any) -> Hashable:
        parts = (index.idf, index.doc_freqs, index.doc_len)
        settings = tuple(getattr(index, name, None) for name in ("k1", "b", "delta", "avgdl", "corpus_size"))
        idf = sampled(list(index.idf.values()))
        return (*settings, *map(id, parts), *map(len, parts), idf, sampled(index.doc_len))

    def find(self, terms: Sequence[str], text: str = "") -> int | None:
        counts = Counter(terms)
        alike = self._documents().get(frozenset(counts.items()), ())
        return next((number for number in alike if self._index.doc_freqs[number] == counts), None)

    def _numbered(self) -> dict[frozenset[tuple[str, int]], list[int]]:
        found: dict[frozenset[tuple[str, int]], list[int]] = {}
        for number, counts in enumerate(self._index.doc_freqs):
            found.setdefault(frozenset(counts.items()), []).append(number)
        return found

    def knows(self, term: str) -> bool:
        return term in self._index.idf

    def weight(self, term: str, document: int, frequency: int) -> Weight | None:
        index = self._index
        idf = index.idf.get(term)
        if idf is None:
            return None
        frequency = index.doc_freqs[document].get(term, 0)
        factor = 1 - index.b + index.b * index.doc_len[document] / index.avgdl
        value, constant = self._weigh(index, idf, frequency, factor)
        numbers = {"idf": idf, "frequency": frequency, "length factor": factor}
        return Weight(value, constant, numbers)

    def scores(self, terms: Sequence[str]) -> Numbers:
        return np.asarray(self._index.get_scores(list(terms)), np.float64)

    def statistics(self) -> tuple[dict[str, Any], list[str], list[Numbers]]:
        index = self._index
        named = ("k1", "b", "delta", "epsilon", "avgdl")
        settings = {"kind": self.name, **{name: float(getattr(index, name)) for name in named if hasattr(index, name)}}
        terms = sorted(index.idf)
        # A document's words count by their place among all words, so that another order of documents shows.
        place = {term: at for at, term in enumerate(terms)}
        words = [sum(count * math.sqrt(place[term] + 2) for term, count in one.items()) for one in index.doc_freqs]
        idf = [index.idf[term] for term in terms]
        return settings, terms, [np.array(values) for values in (idf, index.doc_len, words)]


def _okapi(index: Any, idf: float, frequency: float, factor: float) -> tuple[float, float]:
    return idf * frequency * (index.k1 + 1) / (frequency + index.k1 * factor) if frequency else 0.0, 0.0


def _plus(index: Any, idf: float, frequency: float, factor: float) -> tuple[float, float]:
    return _okapi(index, idf, frequency, factor)[0], idf * index.delta


def _long(index: Any, idf: float, frequency: float, factor: float) -> tuple[float, float]:
    """As rank_bm25 has it: once more times the frequency than the paper, so that an absent word gets nothing."""
    c = frequency / factor
    return idf * frequency * (index.k1 + 1) * (c + index.delta) / (index.k1 + c + index.delta), 0.0


_RANKED: dict[str, Callable[[Any, float, float, float], tuple[float, float]]] = {
    "BM25Okapi": _okapi,
    "BM25L": _long,
    "BM25Plus": _plus,
}
