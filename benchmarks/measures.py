"""Small measures of one explanation, and how their means over many pairs are compared.

An explanation here is by words, so that its last row and column hold the special tokens and the rest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr

from rag_explain import Explanation, Token
from rag_explain.results.contrast import Contrast
from rag_explain.texts.segments import Span, group

Values = NDArray[np.float64]
Score = Callable[[Sequence[str]], Sequence[float]]  # what the model gives a document for one query

RESAMPLES, SEED = 10_000, 0


# What no word carries


def no_pair(explanation: Explanation) -> float:
    """score - pairs.sum(): what no pair of words carries."""
    return explanation.unattributed


def no_word(explanation: Explanation) -> float:
    """What no word of the document carries, over the whole query."""
    return explanation.score - float(over_whole_query(explanation).sum())


def exceeds_difference(contrast: Contrast, left: Callable[[Explanation], float]) -> float:
    """1.0 where what no word carries differs by more between two documents than their scores do, else 0.0."""
    return float(abs(left(contrast.got) - left(contrast.wanted)) > abs(contrast.difference))


def pair_sums(explanation: Explanation) -> tuple[float, float]:
    """The sum of pairs, and of |pairs|."""
    pairs = explanation.pairs.astype(np.float64)
    return float(pairs.sum()), float(np.abs(pairs).sum())


def rank_correlation(values: NDArray[Any], others: NDArray[Any]) -> float:
    """Spearman's, over all cells."""
    return float(spearmanr(values.ravel(), others.ravel()).statistic)


# Deletion


def over_query_words(explanation: Explanation) -> Values:
    """(n_d,): what each word of the document carries, summed over the words of the query."""
    return explanation.pairs.sum(axis=0, dtype=np.float64)


def over_whole_query(explanation: Explanation) -> Values:
    """(n_d,): what each word of the document carries over the whole query, special tokens and rest included."""
    return explanation.matrix[:, :-1].sum(axis=0, dtype=np.float64)


def largest_first(values: Values) -> list[int]:
    return [int(index) for index in np.argsort(-values, kind="stable")]


def without(text: str, words: Sequence[Token]) -> str:
    """`text` with some of its words cut out, and no blanks left where they stood."""
    for word in sorted(words, key=lambda token: -token.start):
        text = text[: word.start] + text[word.end :]
    return " ".join(text.split())


def deletions(explanation: Explanation, order: Sequence[int], counts: Sequence[int]) -> list[str]:
    """The document without its first `count` words in `order`, for each count."""
    text, tokens = explanation.document, explanation.document_tokens
    assert text is not None
    return [without(text, [tokens[index] for index in order[:count]]) for count in counts]


def every_count(words: int) -> list[int]:
    """One word, two, and so on; the last word stays, since an empty text has no meaning to compare."""
    return list(range(1, words))


def top_counts(words: int, shares: Sequence[float]) -> list[int]:
    """How many words a share of them is: at least one, and never all."""
    return [min(max(1, round(share * words)), max(words - 1, 1)) for share in shares]


def area(curve: Sequence[float]) -> float:
    """The area under score_k / score_0 for k = 0, 1, ..., on a base of length one (trapezoids). Lower is better."""
    values = np.asarray(curve, dtype=np.float64) / curve[0]
    return float((values[1:] + values[:-1]).mean() / 2)


def lost(first: float, after: float) -> float:
    """The share of the score that is gone."""
    return 1 - after / first


# Tokens added back (Vasileiou & Eberle 2024, section 4.3 and appendix B)


def fractions(step: float = 0.04) -> Values:
    """0, 0.04, ..., 1: "steps of fractions of 0.04 until the original sentence is fully recovered"."""
    return np.minimum(np.arange(round(1 / step) + 1) * step, 1.0)


def added(elements: int, shares: Values) -> list[int]:
    """How many of the elements each share of them is; half an element is one."""
    return [int(count) for count in np.floor(shares * elements + 0.5)]


def restored(order: Sequence[int], counts: Sequence[int]) -> NDArray[np.bool_]:
    """(k, n): which elements each of k texts has back, the first `count` in `order`."""
    ranks = np.argsort(order)
    return np.asarray(ranks[None, :] < np.array(counts)[:, None])


def distances(vectors: NDArray[Any], whole: NDArray[Any]) -> Values:
    """(k,): the Euclidean distance of each representation from that of the unperturbed sentence."""
    return np.asarray(np.linalg.norm(np.asarray(vectors, dtype=np.float64) - whole, axis=1))


def area_over(shares: Values, curve: Sequence[float] | Values) -> float:
    """AUPC: the area under a curve over the shares of elements that are there (trapezoids). Lower is better."""
    values = np.asarray(curve, dtype=np.float64)
    return float(((values[1:] + values[:-1]) / 2 * np.diff(shares)).sum())


# Agreement with people


def blank_spans(text: str) -> list[Span]:
    """What stands between blanks: the words that people aligned."""
    return [match.span() for match in re.finditer(r"\S+", text)]


def regrouped(explanation: Explanation, values: NDArray[Any], how: np.ufunc) -> Values:
    """Values (n_q, n_d) of an explanation's words as a matrix of the words between blanks: their sum, or the largest.

    Zero where the encoder did not read a word.
    """
    assert explanation.query is not None
    assert explanation.document is not None
    rows, n_rows = _places(explanation.query, explanation.query_tokens)
    columns, n_columns = _places(explanation.document, explanation.document_tokens)
    empty = 0.0 if how is np.add else -np.inf
    result = np.full((n_rows + 1, n_columns + 1), empty)  # the last of each: words that belong to none
    how.at(result, (rows[:, None], columns[None, :]), values)
    return np.where(np.isfinite(result), result, 0.0)[:-1, :-1]


def _places(text: str, tokens: Sequence[Token]) -> tuple[NDArray[np.intp], int]:
    spans = blank_spans(text)
    found, index = group([(token.start, token.end) for token in tokens], spans, join=False, clip=False)
    at = [spans.index(span) for span in found]
    return np.array([at[place] if place >= 0 else -1 for place in index], dtype=np.intp), len(spans)


def exact_matches(query: str, document: str) -> Values:
    """1.0 where two words are the same but for capitals."""
    asked, read = query.casefold().split(), document.casefold().split()
    return np.array([[float(one == other) for other in read] for one in asked])


def average_precision(values: Values, wanted: NDArray[np.bool_]) -> float:
    """The mean, over the wanted cells, of the share of wanted ones among all cells that are at least as large."""
    order = np.argsort(-values, axis=None, kind="stable")
    ranked, hits = values.ravel()[order], np.cumsum(wanted.ravel()[order])
    ends = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))  # equal cells are ranked together
    gained = np.diff(hits[ends], prepend=0)
    return float((hits[ends] / (ends + 1) * gained).sum() / hits[-1])


def mutual_best(values: Values) -> NDArray[np.bool_]:
    """Cells above zero that are the largest of their row and of their column; of equal ones the first."""
    chosen = np.zeros(values.shape, dtype=bool)
    if values.size:
        columns = values.argmax(axis=1)
        rows = np.arange(len(values))
        chosen[rows, columns] = (values.argmax(axis=0)[columns] == rows) & (values[rows, columns] > 0)
    return chosen


def precision_recall_f1(chosen: NDArray[np.bool_], wanted: NDArray[np.bool_]) -> tuple[float, float, float]:
    hits = int((chosen & wanted).sum())
    precision, recall = hits / max(int(chosen.sum()), 1), hits / max(int(wanted.sum()), 1)
    return precision, recall, 2 * precision * recall / (precision + recall) if hits else 0.0


def marked(links: frozenset[tuple[int, int]], shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Links as a matrix."""
    wanted = np.zeros(shape, dtype=bool)
    for i, j in links:
        wanted[i, j] = True
    return wanted


# Means over pairs


def bounded(values: Sequence[float]) -> dict[str, float]:
    """The mean, and where 95 % of the means of resampled pairs lie (bootstrap, seed fixed)."""
    array = np.asarray(values, dtype=np.float64)
    drawn = np.random.default_rng(SEED).integers(len(array), size=(RESAMPLES, len(array)))
    low, high = np.percentile(array[drawn].mean(axis=1), (2.5, 97.5))
    return {"mean": float(array.mean()), "low": float(low), "high": float(high)}


def difference(values: Sequence[float], against: Sequence[float]) -> dict[str, float]:
    """The same of values - against, pair by pair."""
    return bounded([one - other for one, other in zip(values, against, strict=True)])
