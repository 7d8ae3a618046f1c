"""A search whose result is questioned: what was returned, and what can be asked of what was searched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from rag_explain.errors import InvalidInput, whole_number
from rag_explain.results.hits import Hit, Hits
from rag_explain.retrieval.corpus import Corpus, Entry, Ranking, Vector
from rag_explain.retrieval.search import RetrievedDocument
from rag_explain.retrieval.trace import Run
from rag_explain.texts.passage import Passage, as_passage

if TYPE_CHECKING:
    from rag_explain.explainer import Explainer


def no_reason(entry: Entry) -> str | None:
    """Nothing is known that would leave an entry out."""
    return None


class Removed(NamedTuple):
    """Why a search's own filter, or its threshold, leaves an entry out; each gives None where it does not."""

    by_filter: Callable[[Entry], str | None] = no_reason
    by_threshold: Callable[[Entry], str | None] = no_reason


NOTHING = Removed()


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One search, and what tells why it did not return something else.

    Attributes:
        hits: what was returned, as the caller got it.
        k: how many were asked for; 0 where that is not known.
        vector: (e,) what was searched with.
        searched: what to call what was searched.
        removed: what the search's own settings leave out.
        sought: how an approximate index would have found an entry; None where no setting is known that does.
        surrogate: why the search does not rank by the similarity of vectors alone, where it does not.
        otherwise: why the scores are not the similarity that is explained, where they are not.
        reencode: how many documents may be encoded again to know a rank.
        run: what ran inside the search, where it has stages.
        staged: all that the last of these stages ranked, where that is known.
    """

    query: str
    hits: Hits
    corpus: Corpus
    explainer: Explainer
    vector: Vector
    searched: str = "the index"
    removed: Removed = NOTHING
    sought: Callable[[Entry], str | None] = no_reason
    surrogate: str | None = None
    otherwise: str | None = None
    reencode: int = 0
    k: int = 0
    run: Run | None = None
    staged: Hits = field(default_factory=Hits)
    _known: dict[str, float] = field(default_factory=dict, repr=False)

    @cached_property
    def ranking(self) -> Ranking | None:
        """All entries that the filter lets through by exact search, as far as that can be known."""
        found = self.corpus.ranking(self.vector, self.explainer)
        count = len(self.corpus.entries or ())
        if (found is None or not found.is_exact) and 0 < count <= self.reencode:
            found = self.corpus.encoded(self.vector, self.explainer)
        if found is None or self.removed.by_filter is no_reason:
            return found
        return found.without({one.key for one in self.corpus.entries or () if self.removed.by_filter(one) is not None})

    @property
    def most(self) -> int:
        """As many as may have been returned."""
        return max(self.k, len(self.hits))

    @cached_property
    def total(self) -> int | None:
        """How many a rank is among; where none is known, how many there are, if the index tells that."""
        entries = self.corpus.entries if self.ranking is None else self.ranking
        return None if entries is None else len(entries)

    def rank(self, entry: Entry) -> int | None:
        """Where an entry stands among all; None where that is not known."""
        return None if self.ranking is None else self.ranking.rank(entry.key)

    def last_rank(self, entry: Entry) -> int | None:
        """Where it stands when all of the same score come before it."""
        return None if self.ranking is None else self.ranking.last(entry.key)

    def hit(self, name: str | None) -> Hit | None:
        """The hit with this id."""
        return next((hit for hit in self.hits if hit.id == name), None)

    def ranked(self, name: str | None) -> Hit | None:
        """The hit with this id as the last stage ranked it, returned or not."""
        return next((hit for hit in self.staged or self.hits if hit.id == name), None)

    def similarity(self, text: str | Passage) -> float:
        """Of the query and a text, by the encoder itself; each text once."""
        passage = as_passage(text)
        if passage.string not in self._known:
            self._known[passage.string] = float(self.explainer.scorer.score(self.query, [passage])[0])
        return self._known[passage.string]


def checked_id(name: object, what: str) -> None:
    """Refuse what is no id."""
    if not isinstance(name, str):
        raise InvalidInput(f"{what} must be the id of a document, a string, not {name!r}")


def checked_limit(value: object) -> int:
    """How many documents may be encoded again: none unless that is asked for."""
    number = whole_number(value, "reencode")
    if number < 0:
        raise InvalidInput(f"reencode must be 0 or more documents, not {number}")
    return number


def embedded(hit: Hit) -> str | Passage:
    """What was embedded of a hit: its text, with what stood around it, or the chunk by which it was found."""
    text = hit.text or ""
    if hit.chunk is not None:
        return text[slice(*hit.chunk)]
    before, after = hit.around
    return Passage(before + text + after, len(before), len(before) + len(text)) if before or after else text


def document_of(hit: Hit) -> RetrievedDocument:
    """A hit as what was retrieved."""
    text = None if hit.text is None else embedded(hit)
    return RetrievedDocument(id=hit.id, text=text, score=hit.score, metadata=hit.metadata)
