"""BM25 from its equations, in float64, one word at a time: what every index is compared with.

Robertson et al. 1994; Kamphuis et al. 2020 for the variants (table 1), which bm25s has under these names. rank_bm25 has
three of them with changes of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Terms = Sequence[str]


@dataclass(frozen=True)
class Corpus:
    """Documents as lists of terms."""

    documents: Sequence[Terms]
    k1: float = 1.5
    b: float = 0.75
    delta: float = 0.5

    def df(self, term: str) -> int:
        return sum(term in document for document in self.documents)

    def length_factor(self, document: Terms) -> float:
        mean = sum(map(len, self.documents)) / len(self.documents)
        return 1 - self.b + self.b * len(document) / mean


def idf(corpus: Corpus, method: str, term: str) -> float:
    n, df = len(corpus.documents), corpus.df(term)
    if method == "Okapi":
        own = {word: math.log(n - corpus.df(word) + 0.5) - math.log(corpus.df(word) + 0.5) for word in words(corpus)}
        return own[term] if own[term] >= 0 else 0.25 * sum(own.values()) / len(own)
    return {
        "robertson": lambda: max(0.0, math.log((n - df + 0.5) / (df + 0.5))),
        "lucene": lambda: math.log(1 + (n - df + 0.5) / (df + 0.5)),
        "atire": lambda: math.log(n / df),
        "bm25l": lambda: math.log((n + 1) / (df + 0.5)),
        "bm25+": lambda: math.log((n + 1) / df),
        "L": lambda: math.log(n + 1) - math.log(df + 0.5),
        "Plus": lambda: math.log((n + 1) / df),
    }[method]()


def words(corpus: Corpus) -> list[str]:
    return sorted({term for document in corpus.documents for term in document})


def weight(corpus: Corpus, method: str, term: str, document: Terms) -> float:
    """What one occurrence of the term in a query adds to the document's score."""
    if not corpus.df(term):
        return 0.0
    f, length, k1, delta = document.count(term), corpus.length_factor(document), corpus.k1, corpus.delta
    c = f / length
    factor = {
        "robertson": lambda: f / (f + k1 * length),
        "lucene": lambda: f / (f + k1 * length),
        "atire": lambda: f * (k1 + 1) / (f + k1 * length),
        "bm25l": lambda: (k1 + 1) * (c + delta) / (k1 + c + delta),
        "bm25+": lambda: f * (k1 + 1) / (f + k1 * length) + delta,
        "Okapi": lambda: f * (k1 + 1) / (f + k1 * length),
        "L": lambda: f * (k1 + 1) * (c + delta) / (k1 + c + delta),
        "Plus": lambda: f * (k1 + 1) / (f + k1 * length) + delta,
    }[method]()
    return idf(corpus, method, term) * factor


def constant(corpus: Corpus, method: str, term: str) -> float:
    """What a document without the term gets for it."""
    return weight(corpus, method, term, [])


def score(corpus: Corpus, method: str, query: Terms, document: Terms) -> float:
    return sum(weight(corpus, method, term, document) for term in query)


def cells(corpus: Corpus, method: str, query: Terms, document: Terms) -> list[list[float]]:
    """(n_q + 1, n_d + 1): an occurrence's even share of what the document's own words add, and the constants."""
    rows = []
    for term in query:
        own, always = weight(corpus, method, term, document), constant(corpus, method, term)
        rows.append([(own - always) / document.count(term) if word == term else 0.0 for word in document] + [always])
    return [*rows, [0.0] * (len(document) + 1)]
