"""BM25: a sum over the words of the query, by the statistics of one index.

    score(q, d) = sum over words t of q of (weight(t, d) + constant(t))                scorers/term_index.py has both

A score is that of a document in the index: its length and its counts are part of it. So a text is found in the index by
the terms that it has and how often, and one that is not there is refused. What a term adds is shared evenly by its
occurrences in the document; the constant is the rest.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rag_explain.encoder.batch import Batch
from rag_explain.encoder.reading import own_tokens
from rag_explain.errors import InvalidInput, ModelChanged, ProcessBound
from rag_explain.probes import Probes
from rag_explain.results.notices import METHOD, Notice
from rag_explain.results.terms import Term, distinct
from rag_explain.scorers.analyser import Analyser
from rag_explain.scorers.base import Scorer, TermSplit
from rag_explain.scorers.holders import held, is_held, kind_of
from rag_explain.scorers.term_index import TermIndex
from rag_explain.texts.passage import Passage, as_passage, as_passages
from rag_explain.texts.segments import part_spans
from rag_explain.texts.tokens import Role, Token

_KEPT_TEXTS = 256
_FILTERED = Notice(METHOD, "The retriever's filter leaves this document out.", "warning", "document")


class Document(NamedTuple):
    """A document as its index reads it: its tokens, whose pieces are terms, and its number."""

    tokens: tuple[Token, ...]
    number: int


class BM25(Scorer, ProcessBound):
    """An index of bm25s or rank_bm25, or the retriever of LangChain or LlamaIndex that holds one.

    Args:
        index: a bm25s.BM25, a BM25Okapi, BM25L or BM25Plus of rank_bm25, or a BM25Retriever.
        analyser: what split the texts when the index was made: a function from a text to its words, a Tokenizer of
            bm25s, or `functools.partial(bm25s.tokenize, stopwords=..., stemmer=...)`. A retriever has its own.
        name: what to call it.
    """

    measure = "BM25"
    methods = ("terms",)
    instead = "make it anew where it is unpickled"

    def __init__(self, index: Any, analyser: Any = None, *, name: str | None = None) -> None:
        if not is_held(index):
            raise InvalidInput(f"{type(index).__name__} is no BM25 index: give one of bm25s or of rank_bm25")
        self._holder = type(index).__name__
        self._held = held(index, analyser)
        self._made = self._held.index()
        self._current: tuple[Hashable, TermIndex] | None = None
        self._document = lru_cache(_KEPT_TEXTS)(self._looked_up)
        self.name = name or self.index.name

    @property
    def index(self) -> TermIndex:
        """The statistics as they are now. An index that was made anew in place is explained as it is."""
        made, kind = self._held.index(), kind_of(self._made)
        if made is not self._made or kind is None:
            raise ModelChanged.because(f"{self._holder} holds another index")
        state = kind.state(made)
        current = self._current
        if current is None or current[0] != state:
            current = self._current = state, kind(made, self._held.vocabulary())
        return current[1]

    @property
    def fingerprint(self) -> str:
        weights = self._held.weights()
        parts = (self.index.digest, self._held.query.description, None if weights is None else list(weights))
        return hashlib.blake2b(repr(parts).encode(errors="surrogatepass"), digest_size=16).hexdigest()

    @property
    def probes(self) -> Probes:
        """Of an index, some of its statistics."""
        return Probes.of(self.index.sample)

    def describe(self) -> dict[str, str]:
        read = {"documents": f"{self.index.size:,}", "reads texts by": self._held.query.name}
        return {**super().describe(), **read}

    def read(self, passages: Sequence[Passage], role: Role) -> Batch:
        """By terms, which are the pieces of tokens; a word that the analyser leaves out is a token without a piece."""
        index = self.index
        if role == "document":
            tokens = [self._document(index, passage).tokens for passage in passages]
        else:
            tokens = [read_terms(passage, self._held.query) for passage in passages]
        notices = tuple(tuple(self._notices(found, role)) for found in tokens)
        return Batch(passages=tuple(passages), role=role, tokens=tuple(tokens), notices=notices)

    def score(self, query: str, documents: Sequence[str | Passage]) -> NDArray[np.float64]:
        (tokens,) = self.read([as_passage(query)], "query").tokens
        numbers = [self._document(self.index, passage).number for passage in as_passages(documents)]
        return self._scores(tokens)[numbers]

    def by_terms(self, query: Batch, documents: Batch) -> Iterator[TermSplit]:
        (asked,) = query.tokens
        index, weights, scores = self.index, self._held.weights(), self._scores(asked)
        for passage in documents.passages:
            tokens, number = self._document(index, passage)
            weight = 1.0 if weights is None else float(weights[number])
            yield _split(index, asked, tokens, number, weight, float(scores[number]))

    def token_vectors(self, batch: Batch) -> Any:
        raise InvalidInput(
            f"{self.name} compares words and has no vectors to look for sentences with: "
            'explain(..., unit="sentence") says what each sentence carries'
        )

    def _scores(self, query: Sequence[Token]) -> NDArray[np.float64]:
        """(size,) what the retriever gives for the terms of a query."""
        scores = self.index.scores(terms_of(query))
        weights = self._held.weights()
        return scores if weights is None else scores * np.asarray(weights, np.float64)

    def _looked_up(self, index: TermIndex, passage: Passage) -> Document:
        """A text in the index, as the first of the ways to read it makes it one of its documents."""
        around = () if passage.string == passage.text else (Passage(passage.text),)
        for text in (passage, *around):
            for analyser in self._held.documents:
                tokens = read_terms(text, analyser)
                number = index.find(terms_of(tokens), text.string)
                if number is not None:
                    return Document(tokens, number)
        raise InvalidInput(
            f"this text is none of the {index.size:,} documents of {self.name}, and a BM25 score is of a document: "
            "give the text as it was indexed, with the analyser that split it"
        )

    def _notices(self, tokens: Sequence[Token], role: Role) -> Iterator[Notice]:
        """What a reader must know of how a text was read; counted and not quoted."""
        lost = sum(token.part == "special" for token in tokens)
        if lost:
            told = f"where {lost} of {len(terms_of(tokens))} terms of the {role} stand in it: they stand by themselves"
            yield Notice(METHOD, f"The analyser does not tell {told}.", "note", role)
        if role == "document":
            return
        words = [token for token in tokens if token.part == "text"]
        dropped = sum(not token.piece for token in words)
        unknown = sum(not self.index.knows(term) for term in terms_of(tokens))
        for count, why in ((dropped, "left out by the analyser"), (unknown, "in no document of the index")):
            if count:
                verb = "is" if count == 1 else "are"
                text = f"{count} of {len(words)} words of the query {verb} {why}, and {verb} not looked for."
                yield Notice(METHOD, text, "note", role)


def terms_of(tokens: Sequence[Token]) -> list[str]:
    """The terms among the tokens of a text."""
    return [token.piece for token in tokens if token.piece]


def read_terms(passage: Passage, analyser: Analyser) -> tuple[Token, ...]:
    """A text by its terms, and by the words that are left out; a term without a place is a special token."""
    placed = [one for one in analyser.placed(passage.string) if one[0]]
    taken = sorted(span for _, span in placed if span is not None)
    left = [("", span) for span in part_spans(passage.string) if not any(a < span[1] and b > span[0] for a, b in taken)]
    inside = sorted([(term, span) for term, span in [*placed, *left] if span is not None], key=lambda one: one[1])
    outside = [(term, (passage.end, passage.end), 1) for term, span in placed if span is None]
    return own_tokens(passage, 0, [*((term, span, 0) for term, span in inside), *outside])


def _split(
    index: TermIndex, query: Sequence[Token], document: Sequence[Token], number: int, weight: float, score: float
) -> TermSplit:
    """What each pair of a query's token and a document's carries, and the terms that they met in."""
    places: dict[str, list[int]] = {}
    for column, token in enumerate(document):
        places.setdefault(token.piece, []).append(column)
    matrix, terms = np.zeros((len(query) + 1, len(document) + 1)), []
    times = Counter(terms_of(query))
    for row, token in enumerate(query):
        found = index.weight(token.piece, number, len(places.get(token.piece, ()))) if token.piece else None
        if found is not None:
            columns = places.get(token.piece, [])
            matrix[row, columns] = weight * found.value / max(1, len(columns))
            matrix[row, -1] = weight * found.constant
    for term, count in times.items():
        found = index.weight(term, number, len(places.get(term, ())))
        words = distinct(token.label for token in query if token.piece == term)
        met = distinct(document[column].label for column in places.get(term, ()))
        value, numbers = (0.0, {}) if found is None else (weight * count * found.value, dict(found.numbers))
        if found is not None and found.constant:
            numbers["constant"] = weight * count * found.constant
        terms.append(Term(term, words, met, value, numbers))
    return TermSplit(matrix, score, tuple(terms), () if weight else (_FILTERED,))
