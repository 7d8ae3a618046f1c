"""Where a document stands in an index when query or document are other ones: the ranks beside a what-if."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rag_explain.errors import InvalidInput
from rag_explain.results.what_if import WhatIf
from rag_explain.retrieval.corpus import Corpus, Ranking, Vector, similarities
from rag_explain.texts.passage import Passage

if TYPE_CHECKING:
    from rag_explain.explainer import Explainer
    from rag_explain.what_if import Tried

Embed = Callable[[Sequence[str]], NDArray[np.float32]]

_QUERIES = 64  # whose rankings are kept: the hits of one query are asked about one after the other
UNKNOWN = "the index does not give the vectors of all its documents"


class Places:
    """The ranks of the documents of one index. Rankings are kept, for one question about several hits."""

    def __init__(self, corpus: Corpus, explainer: Explainer, embed: Embed | None = None) -> None:
        self.corpus, self._explainer = corpus, explainer
        self._embed: Embed = embed or (lambda queries: explainer.scorer.embed(queries, "query"))
        self._vector = lru_cache(_QUERIES)(lambda query: self._embed([query])[0])
        self._ranking = lru_cache(_QUERIES)(lambda query: corpus.ranking(self._vector(query), explainer))

    def ranking(self, query: str) -> Ranking | None:
        """All documents of the index for a query."""
        with self._explainer.scorer.computing():
            found: Ranking | None = self._ranking(query)
        return found

    def what_if(self, query: str, name: str, **options: Any) -> WhatIf:
        """Asked of the document with this id; of several entries, of the one that stands highest."""
        found = [(one.key, one.document.text) for one in self.corpus.named(name) if one.document.text is not None]
        if not found:
            raise InvalidInput(f"the index lists no document {name!r} with a text")
        ranking = self.ranking(query) if len(found) > 1 else None
        if ranking is not None:
            found.sort(key=lambda one: ranking.rank(one[0]) or len(ranking) + 1)
        key, text = found[0]
        return placed(self._explainer, query, text, self, key, **options)

    def of(self, query: str, key: Hashable) -> Callable[[Sequence[Tried]], list[int | None]]:
        """The ranks of one document, for each of what was tried on it and on the query."""
        return lambda tried: [self._rank(query, key, one) for one in tried]

    def _rank(self, query: str, key: Hashable, tried: Tried) -> int | None:
        if tried.query is not None:
            ranking = self.ranking(tried.query)
            return None if ranking is None else ranking.rank(key)
        ranking = self.ranking(query)
        if ranking is None or tried.document is None or tried.score is None:
            return None
        score = tried.score if ranking.is_exact else self._as_kept(self._vector(query), tried.document)
        return None if score is None else ranking.rank_of(score, key)

    def _as_kept(self, query: Vector, document: Passage) -> float | None:
        """The similarity of a document as the index would keep it."""
        coded = self.corpus.coded(self._explainer.scorer.embed([document], "document"))
        return None if coded is None else float(similarities(self._explainer, query, coded)[0])


def placed(
    explainer: Explainer, query: str, document: str | Passage, places: Places | None, key: Hashable, **options: Any
) -> WhatIf:
    """As `Explainer.what_if`, with the ranks in the index beside the scores."""
    ranking = None if places is None else places.ranking(query)
    if places is None or ranking is None:
        return replace(explainer.what_if(query, document, **options), unknown_rank=UNKNOWN)
    found = explainer.what_if(query, document, ranks=places.of(query, key), **options)
    return replace(found, rank=ranking.rank(key), total=len(ranking))
