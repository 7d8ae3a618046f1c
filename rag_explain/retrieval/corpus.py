"""What an index holds, for questions about all of it: who is in it, where would a text stand, what is a pair by chance.

Nothing here is asked in a search. A corpus is made for one question, and lists and compares when that needs it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rag_explain.results.documents import OWNERS
from rag_explain.results.metric import SCALE_FREE, Metric
from rag_explain.retrieval.engines import TOLERANCE, Engine, Kept
from rag_explain.retrieval.search import RetrievedDocument
from rag_explain.texts.passage import Passage

if TYPE_CHECKING:
    from rag_explain.explainer import Explainer

Vector = NDArray[np.float32]
Listed = Callable[[], Iterable[RetrievedDocument] | None]

_UNIT, _EQUAL = 1e-3, 1e-6
_PAGE = 500  # vectors that an engine is asked for at once
# How many documents are listed and compared for one question.
MOST = 100_000


class Entry(NamedTuple):
    """One vector of an index: what the index calls it, and the document that it is of."""

    key: Hashable
    document: RetrievedDocument


@dataclass(frozen=True, eq=False)
class Ranking:
    """All entries of an index for one query, the best first. Equal ones share the best of their ranks."""

    keys: tuple[Hashable, ...]
    values: NDArray[np.float64]  # (n,), falling: what ranks them, the larger the better
    is_similarity: bool  # whether the values are similarities: the index's own scores may tell none
    is_exact: bool  # by the vectors that were given to the index, not by what it made of them

    def rank(self, key: Hashable) -> int | None:
        """Where an entry stands, from 1; None for one that is not there."""
        place = self._places.get(key)
        return None if place is None else 1 + int((self.values > self._and_a_little(place)).sum())

    def last(self, key: Hashable) -> int | None:
        """Where it stands when all that are equal come before it."""
        place = self._places.get(key)
        return None if place is None else int((self._and_a_little(place, -1) <= self.values).sum())

    def rank_of(self, similarity: float, key: Hashable = None) -> int | None:
        """Where an entry of this similarity would stand, in the place of the one with this key."""
        if not self.is_similarity:
            return None
        place = self._places.get(key)
        others = self.values if place is None else np.delete(self.values, place)
        return 1 + int((others > similarity + _EQUAL).sum())

    def similarities_of(self, keys: Sequence[Hashable]) -> NDArray[np.float64] | None:
        """(n,): of these entries; None where one is not there, or the values are no similarities."""
        places = [self._places.get(key, -1) for key in keys]
        return self.values[places] if self.is_similarity and min(places, default=0) >= 0 else None

    def without(self, keys: Collection[Hashable]) -> Ranking:
        """The same of the other entries alone."""
        kept = [place for place, key in enumerate(self.keys) if key not in keys]
        return replace(self, keys=tuple(self.keys[place] for place in kept), values=self.values[kept])

    def _and_a_little(self, place: int, sign: int = 1) -> float:
        """The value of an entry, and what may be rounding."""
        value = float(self.values[place])
        return value + sign * _EQUAL * max(1.0, abs(value))

    @cached_property
    def _places(self) -> dict[Hashable, int]:
        return {key: place for place, key in enumerate(self.keys)}

    def __len__(self) -> int:
        return len(self.keys)


class Corpus(ABC):
    """The entries of one index."""

    @abstractmethod
    def listed(self) -> Iterable[Entry] | None:
        """Every entry; None where the index cannot list them."""

    @abstractmethod
    def ranking(self, query: Vector, explainer: Explainer) -> Ranking | None:
        """All entries for the vector of a query; None where the index does not give what that needs."""

    @abstractmethod
    def vectors(self, entries: Sequence[Entry]) -> dict[Hashable, Any]:
        """(e,) for each of these entries whose vector is kept as it was given."""

    def coded(self, vectors: Any) -> Any:
        """(D, e): vectors as the index would compare them."""
        return vectors

    def compared(self, queries: Any, entries: Sequence[Entry], explainer: Explainer) -> NDArray[np.float64] | None:
        """(Q, D): similarities of the vectors of queries and these entries; None where their vectors are not given."""
        kept = self.vectors(entries)
        if len(kept) < len(entries):
            return None
        matrix = np.asarray([kept[one.key] for one in entries], np.float64)
        return np.stack([similarities(explainer, query, matrix) for query in queries])

    @cached_property
    def entries(self) -> tuple[Entry, ...] | None:
        """Every entry, listed once; None where the index cannot list them, or has too many for a question."""
        listed = self.listed()
        found = None if listed is None else tuple(islice(listed, MOST + 1))
        return None if found is None or len(found) > MOST else found

    def named(self, name: str) -> list[Entry]:
        """The entries with this id."""
        return [one for one in self.entries or () if one.document.id == name]

    def chunks_of(self, name: str) -> list[Entry]:
        """The entries whose metadata say that they are of the document with this name."""
        return [one for one in self.entries or () if name in map(str, owners(one.document))]

    def encoded(self, query: Vector, explainer: Explainer) -> Ranking:
        """The ranking by new vectors of all texts: what an index that keeps none is compared with."""
        readable = [one for one in self.entries or () if one.document.text is not None]
        texts = [one.document.text for one in readable if one.document.text is not None]
        vectors = explainer.scorer.embed(texts, "document")
        return ranked([one.key for one in readable], similarities(explainer, query, vectors), is_exact=True)


class EngineCorpus(Corpus):
    """The entries of an engine that lists its documents, compared by the vectors that it keeps."""

    def __init__(self, engine: Engine, listed: Listed | None = None) -> None:
        self._engine, self._listed = engine, listed or partial(_of_engine, engine)

    def listed(self) -> Iterable[Entry] | None:
        found = self._listed()
        return None if found is None else (Entry(one.vector_id or one.id, one) for one in found)

    def ranking(self, query: Vector, explainer: Explainer) -> Ranking | None:
        entries = self.entries
        if not entries or not (self._engine.gives_originals or self._engine.tolerance <= TOLERANCE):
            return None
        kept = self.vectors(entries)
        if len(kept) < len(entries):
            return None
        matrix = np.asarray([kept[one.key] for one in entries], np.float64)
        keys, found = [one.key for one in entries], similarities(explainer, query, matrix)
        metric = self._engine.metric
        if metric.base in SCALE_FREE or _are_unit((query, *matrix)) or explainer.scorer.measure == "dot":
            return ranked(keys, found, is_exact=True)
        return _by_metric(metric, keys, np.asarray(query, np.float64), matrix)

    def vectors(self, entries: Sequence[Entry]) -> dict[Hashable, Any]:
        found: dict[Hashable, Any] = {}
        for start in range(0, len(entries), _PAGE):
            found.update(self._engine.vectors([str(one.key) for one in entries[start : start + _PAGE]]))
        return found

    def coded(self, vectors: Any) -> Any:
        return vectors if self._engine.gives_originals else self._engine.coded(vectors)


def _are_unit(vectors: Iterable[Any]) -> bool:
    return all(abs(float(np.linalg.norm(one)) - 1) <= _UNIT for one in vectors)


def _by_metric(metric: Metric, keys: Sequence[Hashable], query: Vector, matrix: NDArray[np.float64]) -> Ranking | None:
    """The order by what the engine compares, which tells no similarity where vectors are not of length one."""
    if metric.base == "unknown":
        return None
    values = -((matrix - query) ** 2).sum(axis=1) if metric.base.endswith("L2") else matrix @ query
    return ranked(keys, values, is_exact=True, is_similarity=False)


def ranked(
    keys: Sequence[Hashable], found: NDArray[np.float64], *, is_exact: bool, is_similarity: bool = True
) -> Ranking:
    """Entries in the order of what ranks them."""
    order = np.argsort(-found, kind="stable")
    return Ranking(tuple(keys[at] for at in order), found[order], is_similarity, is_exact)


def similarities(explainer: Explainer, query: Vector, documents: Any) -> NDArray[np.float64]:
    """(D,): the similarity that the encoder's model was made for, of vectors that are there already."""
    asked, found = np.asarray(query, np.float64), np.asarray(documents, np.float64)
    product: NDArray[np.float64] = found @ asked
    if explainer.scorer.measure == "cosine":
        product = product / np.maximum(np.linalg.norm(found, axis=1) * np.linalg.norm(asked), np.finfo(np.float32).tiny)
    return product


def owners(document: RetrievedDocument) -> list[Any]:
    """What the metadata of a chunk call the document that it is of."""
    return [document.metadata[name] for name in OWNERS if document.metadata.get(name) is not None]


def text_of(document: RetrievedDocument) -> str | None:
    """The caller's own text."""
    return document.text.text if isinstance(document.text, Passage) else document.text


def _of_engine(engine: Engine) -> Iterable[RetrievedDocument] | None:
    found = engine.documents()
    return None if found is None else map(_document, found)


def _document(kept: Kept) -> RetrievedDocument:
    """As most frameworks keep it: metadata in a field of their own, or beside the text."""
    inner = kept.fields.get("metadata")
    return RetrievedDocument(id=kept.id, text=kept.text, metadata=inner if isinstance(inner, dict) else kept.fields)
