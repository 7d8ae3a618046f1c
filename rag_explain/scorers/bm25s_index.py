"""An index of bm25s, which keeps what each word adds to each document's score, and not how that comes about.

How many documents have a word is how many numbers are kept for it, and idf follows. With how often the document has the
word, the number kept tells the length factor; it is the same for all words of a document, or the text is another one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from rag_explain.errors import InvalidInput
from rag_explain.scorers.term_index import Numbers, TermIndex, Weight, sampled

_SETTINGS = ("method", "idf_method", "k1", "b", "delta", "dtype")
_IDF: dict[str, Callable[[float, float], float]] = {
    "robertson": lambda df, n: math.log(max(1.0, (n - df + 0.5) / (df + 0.5))),
    "lucene": lambda df, n: math.log(1 + (n - df + 0.5) / (df + 0.5)),
    "atire": lambda df, n: math.log(n / df),
    "bm25l": lambda df, n: math.log((n + 1) / (df + 0.5)),
    "bm25+": lambda df, n: math.log((n + 1) / df),
}


class BM25S(TermIndex):
    """A bm25s.BM25. `vocabulary` is the numbers that words have, where the index was made of numbers alone."""

    def __init__(self, index: Any, vocabulary: Mapping[str, int] | None = None) -> None:
        self._index = index
        self.name = "bm25s.BM25"
        scores = index.scores
        self._data, self._rows, self._starts = (scores[name] for name in ("data", "indices", "indptr"))
        self.size = int(scores["num_docs"])
        self._k1, self._delta, self._is_long = float(index.k1), float(index.delta), index.method == "bm25l"
        self._top = 1.0 if index.method in ("lucene", "robertson") else self._k1 + 1
        self._columns = self._own_columns(vocabulary)
        self._constants = getattr(index, "nonoccurrence_array", None)

    @staticmethod
    def is_one(model: Any) -> bool:
        return hasattr(model, "get_scores_from_ids") and hasattr(model, "idf_method")

    @staticmethod
    def state(index: Any) -> Hashable:
        if not hasattr(index, "scores"):
            raise InvalidInput("this bm25s index is empty: call its index(...) first, or load one that was saved")
        scores, words = index.scores, index.vocab_dict
        parts = [scores[name] for name in ("data", "indices", "indptr")]
        settings = tuple(str(getattr(index, name)) for name in _SETTINGS)
        constants = getattr(index, "nonoccurrence_array", None)
        return (*settings, id(words), len(words), id(constants), *map(id, parts), *map(sampled, parts))

    def _own_columns(self, vocabulary: Mapping[str, int] | None) -> Mapping[str, int]:
        words: Mapping[Any, int] = self._index.vocab_dict
        named = [word for word in words if word != ""]
        is_numbered = all(isinstance(word, int) or (word.isdigit() and int(word) == words[word]) for word in named)
        if not is_numbered:
            return words
        if vocabulary is None:
            raise InvalidInput(
                "this bm25s index has numbers and no words: give analyser= the bm25s Tokenizer that numbered them "
                "(its load_vocab reads the words of a saved index), or load the index with its vocabulary"
            )
        return vocabulary

    def _column(self, term: str) -> int | None:
        """The number of a term that is in a document; the index's vocabulary may know more terms."""
        column = self._columns.get(term)
        if column is None or not 0 <= column < len(self._starts) - 1:
            return None
        return int(column) if self._starts[column + 1] > self._starts[column] else None

    def _kept(self, column: int) -> tuple[Numbers, Numbers]:
        """The documents that have a term, in order, and what it adds to each."""
        part = slice(int(self._starts[column]), int(self._starts[column + 1]))
        return self._rows[part], self._data[part]

    @cached_property
    def _sizes(self) -> Numbers:
        """(size,) how many different terms each document has."""
        return np.bincount(self._rows, minlength=self.size)

    def find(self, terms: Sequence[str], text: str = "") -> int | None:
        # A text without words may be a document of one empty word: bm25s' Tokenizer has it so.
        empty = [""] if not terms and self.knows("") else []
        counts = {self._column(term): count for term, count in Counter([*terms, *empty]).items()}
        if None in counts:  # a word that no document has
            return None
        columns = sorted((column for column in counts if column is not None), key=lambda one: len(self._kept(one)[0]))
        alike = np.asarray(self._kept(columns[0])[0]) if columns else np.arange(self.size)
        for column in columns[1:]:  # the rarest word first
            rows = self._kept(column)[0]
            alike = alike[rows[np.minimum(np.searchsorted(rows, alike), len(rows) - 1)] == alike]
        alike = alike[self._sizes[alike] == len(columns)]
        fitting = [int(one) for one in alike if self._fits(columns, counts, int(one))]
        kept = {tuple(self._value(column, one) for column in columns) for one in fitting}
        if len(kept) > 1 and (same := [one for one in fitting if self._text(one) == text]):
            return same[0]
        if len(kept) > 1:
            raise InvalidInput(
                f"{len(fitting)} documents of this bm25s index have the words of this text, with other scores, and "
                "which of them it is cannot be told from what bm25s keeps: set the index's corpus to the texts"
            )
        return fitting[0] if fitting else None

    def _text(self, document: int) -> Any:
        """The text of a document, where bm25s keeps the corpus."""
        corpus = getattr(self._index, "corpus", None)
        kept = None if corpus is None or len(corpus) != self.size else corpus[document]
        return kept.get("text") if isinstance(kept, dict) else kept

    def _fits(self, columns: Sequence[int], counts: Mapping[Any, int], document: int) -> bool:
        """Whether all words of the document tell the same length factor, when they occur as often as in this text."""
        kept = [(counts[column], self._idf(column), self._value(column, document)) for column in columns]
        factors = [(frequency, self._factor(idf, value, frequency)) for frequency, idf, value in kept]
        told = [(frequency, factor) for frequency, factor in factors if factor is not None]
        if not told:
            return True
        factor = min(told)[1]  # of a rare word, which tells it best
        near = 100 * float(np.finfo(self._data.dtype).eps)
        return all(
            abs(idf * self._share(frequency, factor) - value) <= near * (abs(value) + abs(idf * self._share(0, factor)))
            for frequency, idf, value in kept
        )

    def _value(self, column: int, document: int) -> float:
        """What is kept for a term in a document; zero where it is not there."""
        rows, values = self._kept(column)
        at = int(np.searchsorted(rows, document))
        return float(values[at]) if at < len(rows) and rows[at] == document else 0.0

    def _idf(self, column: int) -> float:
        return _IDF[self._index.idf_method](len(self._kept(column)[0]), self.size)

    @property
    def _offset(self) -> float:
        """What of the share every document gets, in BM25L."""
        return (self._k1 + 1) * self._delta / (self._k1 + self._delta) if self._is_long else 0.0

    def _share(self, frequency: float, factor: float) -> float:
        """What idf is multiplied by, less what every document gets."""
        if self._is_long:
            c = frequency / factor + self._delta
            return (self._k1 + 1) * c / (self._k1 + c) - self._offset
        return frequency * self._top / (frequency + self._k1 * factor)

    def _factor(self, idf: float, value: float, frequency: int) -> float | None:
        """The length factor that explains what is kept; None where nothing tells it."""
        if not (idf and value and frequency and self._k1):
            return None
        share = value / idf + self._offset
        if self._is_long:
            c = share * self._k1 / (self._k1 + 1 - share) - self._delta
            return frequency / c if c > 0 else None
        return frequency * (self._top / share - 1) / self._k1

    def knows(self, term: str) -> bool:
        return self._column(term) is not None

    def weight(self, term: str, document: int, frequency: int) -> Weight | None:
        column = self._column(term)
        if column is None:
            return None
        value = self._value(column, document)
        constant = 0.0 if self._constants is None else float(self._constants[column])
        factor = self._factor(idf := self._idf(column), value, frequency)
        numbers = {"idf": idf, "frequency": float(frequency)}
        return Weight(value, constant, numbers if factor is None else {**numbers, "length factor": factor})

    def scores(self, terms: Sequence[str]) -> Numbers:
        columns = [column for term in terms if (column := self._column(term)) is not None]
        if not columns:
            return np.zeros(self.size)
        return np.asarray(self._index.get_scores_from_ids(columns), np.float64)

    def statistics(self) -> tuple[dict[str, Any], list[str], list[Numbers]]:
        """Columns have another order in each process, since bm25s numbers a set of words."""
        settings = {name: str(getattr(self._index, name)) for name in _SETTINGS}
        known = sorted((str(term), column) for term in self._columns if (column := self._column(term)) is not None)
        columns = np.array([column for _, column in known], np.int64)
        frequencies = np.diff(self._starts)[columns]
        used = np.flatnonzero(np.diff(self._starts))
        sums = np.zeros((2, len(self._starts) - 1))
        if len(used):
            starts = np.asarray(self._starts)[used]
            sums[0, used] = np.add.reduceat(self._data, starts, dtype=np.float64)
            sums[1, used] = np.add.reduceat(self._data * (1 + self._rows % 1009), starts, dtype=np.float64)
        return settings, [term for term, _ in known], [frequencies, *sums[:, columns]]
