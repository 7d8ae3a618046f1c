"""What can be asked of a wrapped retriever about a result: why not that one, what if, how sure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rag_explain.results.calibration import Calibration
from rag_explain.results.hits import Hits
from rag_explain.results.what_if import WhatIf
from rag_explain.results.why_not import WhyNot
from rag_explain.retrieval.adapter import HitExplainer
from rag_explain.retrieval.asked import Asked, Removed, checked_limit
from rag_explain.retrieval.background import calibrated
from rag_explain.retrieval.corpus import Corpus
from rag_explain.retrieval.places import Places
from rag_explain.retrieval.search import Search
from rag_explain.retrieval.trace import overhearing

if TYPE_CHECKING:
    from rag_explain.explainer import Explainer


class StoreQuestions:
    """Questions about what a wrapped retriever returned; what is asked of its framework is its subclass's."""

    _hit_explainer: HitExplainer

    def _search(self) -> Search:
        """What searches, embeds and scores at the moment."""
        raise NotImplementedError

    def _returned(self, query: str, options: dict[str, Any]) -> Hits:
        """What is returned for a query, without explanations."""
        raise NotImplementedError

    def _corpus(self) -> Corpus:
        """What is kept in the one store that is searched; refused in words where there are several, or none."""
        raise NotImplementedError

    def _removed(self, query: str, options: dict[str, Any], corpus: Corpus) -> Removed:
        """What tells whether a filter or a threshold left a document out."""
        raise NotImplementedError

    def why_not(self, query: str, id: str, *, got: str | None = None, reencode: int = 0, **options: Any) -> WhyNot:
        """Why this document was not among those that are returned, or not before the hit `got`.

        `options` are those of the search that is asked about. The store is asked again, without a filter, say; where it
        does not give the vectors of all documents, an exact rank is known only if as many as `reencode` may be encoded
        again.
        """
        from rag_explain.retrieval.ladder import climb  # it needs torch, which adapters and logs do not

        limit, corpus, search = checked_limit(reencode), self._corpus(), self._search()
        explainer = self._hit_explainer._explainer_for(search)
        with overhearing() as runs:
            hits = self._returned(query, options)
        asked = Asked(
            query=query,
            hits=hits,
            corpus=corpus,
            explainer=explainer,
            vector=explainer.scorer.embed([query], "query")[0],
            searched=search.name,
            removed=self._removed(query, options, corpus),
            surrogate=search.surrogate,
            reencode=limit,
            run=runs[-1] if runs and runs[-1].answered else None,
        )
        return climb(asked, id, got)

    def what_if(self, query: str, id: str, *, without: Any = None, replace: Any = None) -> WhatIf:
        """As `Explainer.what_if`, of a document of the store by its id, with the rank that it has then."""
        explainer = self._hit_explainer._explainer_for(self._search())
        places = Places(self._corpus(), explainer)
        return places.what_if(query, id, without=without, replace=replace)

    def calibrate(self, queries: Sequence[str] | None = None) -> Calibration:
        """Measure what unrelated texts score here: hits then say where they stand.

        `queries` are some that people ask, a hundred or so. None: sentences of documents, each against the others. What
        comes back can be written with its `save(path)`, and set as `retriever.calibration` another time.
        """
        search = self._search()

        def measured(explainer: Explainer) -> Calibration:
            def embed(asked: Sequence[str]) -> Any:
                return explainer.scorer.embed(asked, "query")

            return calibrated(self._corpus(), explainer, search.metric, queries, embed)

        return self._hit_explainer.background.measure(measured, search)

    @property
    def calibration(self) -> Calibration | None:
        """What `calibrate` measured, or what was set."""
        return self._hit_explainer.background.calibration

    @calibration.setter
    def calibration(self, calibration: Calibration | None) -> None:
        self._hit_explainer.background.use(calibration, self._search())
