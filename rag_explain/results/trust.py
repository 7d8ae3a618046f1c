"""Trust: what the papers warn of, measured on one explanation by what is stored of it. A logged one tells it too.

The thresholds are where the papers or measurements place them (docs/methods.md); below all of them nothing is said.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rag_explain.results.notices import KEPT_PAIRS
from rag_explain.texts.segments import sentence_spans
from rag_explain.texts.tokens import Token

if TYPE_CHECKING:
    from rag_explain.results.explanation import Explanation

# The pairs' sum, as a share of the sum of |pairs|, below which most of what they carry cancels.
_CANCELS = 1 / 4
# The share of the sum of |values| that belongs to no word from which it is more than usual.
_NO_WORD = 1 / 4
# A reference similarity that is no longer small, and the score below which approximate attributions were not trusted.
_REFERENCE, _APPROXIMATE = 0.1, 0.5
# English words that turn a statement around, and the share of what the strongest word of their sentence carries below
# which they hardly count. The terms of an index carry nothing wherever they were not asked for.
_NEGATIONS = ("not", "no", "never", "cannot", "without", "neither", "nor")
_HARDLY, _OF_TERMS = 0.1, "terms"
# Methods whose pairs are of last-layer vectors. Others say by their layer where they look.
_LAST_LAYER = ("pooled", "alignment", "bti")


@dataclass(frozen=True, slots=True)
class Trust:
    """How far the numbers of an explanation, by words where it can be, are to be trusted.

    `doubts` are what a reader should know of, in words; none when all is well.
    """

    positive: float  # the sum of all pairs above zero
    negative: float  # and of those below
    no_word: float | None  # the share of the sum of |values| that belongs to no word; None where that is not known
    doubts: tuple[str, ...]

    @classmethod
    def of(cls, explanation: Explanation) -> Trust:
        """What the matrix, the references and the settings of an explanation tell."""
        shown = explanation.in_words()
        positive, negative = shown.sums or _sums(shown.pairs.astype(np.float64))
        no_word = _no_word(shown)
        doubts = [*_doubts(shown, positive, negative, no_word)] if shown.additive else []
        return cls(positive, negative, no_word, (*doubts, *_context(shown)))


def _sums(pairs: NDArray[np.float64]) -> tuple[float, float]:
    return float(pairs[pairs > 0].sum()), float(pairs[pairs < 0].sum())


def _no_word(shown: Explanation) -> float | None:
    """Special tokens, prompts, metadata and the rest; not where that holds references, or pairs that were not kept."""
    is_partial = any(notice.code == KEPT_PAIRS for notice in shown.notices)
    if "cut" in shown.settings:  # of a cross-encoder: what words read of their own text is in no pair, and is theirs
        return _no_words(shown)
    sizes = np.abs(shown.matrix, dtype=np.float64)
    total = float(sizes.sum())
    if is_partial or _references(shown) or not total:
        return None
    words = sizes[np.ix_(_are_words(shown.query_tokens), _are_words(shown.document_tokens))]
    return max(0.0, 1 - float(words.sum()) / total)


def _no_words(shown: Explanation) -> float | None:
    """The same where each row and column sums to what its own word carries, and these to the score."""
    sides = (shown.query_tokens, shown.query_saliency()), (shown.document_tokens, shown.document_saliency())
    words = np.concatenate([np.asarray(values, np.float64)[_are_words(tokens)[:-1]] for tokens, values in sides])
    left, total = abs(shown.score - float(words.sum())), float(np.abs(words).sum())
    return left / (left + total) if total else None


def _are_words(tokens: tuple[Token, ...]) -> NDArray[np.bool_]:
    """For each row or column of a matrix, the rest's among them, whether it belongs to the caller's own text."""
    return np.array([*(token.part == "text" for token in tokens), False])


def _references(shown: Explanation) -> dict[str, float]:
    """The similarities with a reference, by their names: what a method says is left over."""
    return {name: value for name, value in (shown.references or {}).items() if name.startswith("f(")}


def _doubts(shown: Explanation, positive: float, negative: float, no_word: float | None) -> Iterator[str]:
    left_over, is_cosine = _references(shown), shown.measure == "cosine"
    if abs(positive + negative) < _CANCELS * (positive - negative):
        yield "most of it cancels, and negative values are less reliable"
    elif is_cosine and positive > 1 + max(0.0, left_over.get("f(r_a, r_b)", 0.0)):
        yield "more than a score can be, and negative values are less reliable"
    beside = positive + negative - shown.score
    if left_over and abs(beside) > _REFERENCE * (1 if is_cosine else abs(shown.score)):
        yield f"{beside:+.2f} is the references', not the score's"
    if left_over and is_cosine and shown.score < _APPROXIMATE:
        yield f"rough at a score below {_APPROXIMATE}"
    if no_word is not None and no_word > _NO_WORD:
        yield f"{no_word:.0%} of all values belongs to no {'sentence' if shown.unit == 'sentence' else 'word'}"
    if shown.document is not None and shown.unit == "word" and shown.method != _OF_TERMS:
        yield from _passed_over(shown.document, shown.document_tokens, shown.document_saliency())


def _passed_over(document: str, tokens: tuple[Token, ...], values: NDArray[np.float32]) -> Iterator[str]:
    """A "not" that hardly counts, in the sentence of the word that carries most: the opposite would score alike."""
    strongest = int(np.abs(values).argmax()) if len(values) else 0
    for start, end in sentence_spans(document) if len(values) else ():
        if start <= tokens[strongest].start < end:
            limit = _HARDLY * abs(float(values[strongest]))
            for one, value in zip(tokens, values.tolist(), strict=True):
                if start <= one.start < end and _negates(one) and abs(value) < limit:
                    yield f"“{one.label}” hardly counts ({value:+.4f} beside {tokens[strongest].label})"
                    return


def _negates(token: Token) -> bool:
    word = token.label.casefold()
    return token.part == "text" and (word in _NEGATIONS or word.endswith(("n't", "n’t")))


def _context(shown: Explanation) -> Iterator[str]:
    layer = shown.settings.get("layer")
    if shown.method in _LAST_LAYER and not layer:
        yield "of last-layer vectors, which have read their texts, not of bare words"
    elif isinstance(layer, int) and layer > 0:
        yield f"of places at block {layer}, which have read their texts, not of bare words"
