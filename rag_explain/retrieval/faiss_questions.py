"""What can be asked of a FaissRetriever about a result: why not that one, what if, how sure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rag_explain.probes import TEXTS
from rag_explain.results.calibration import Calibration
from rag_explain.results.hits import Hits
from rag_explain.results.metric import Metric
from rag_explain.results.what_if import WhatIf
from rag_explain.results.why_not import WhyNot
from rag_explain.retrieval.adapter import ExplainMode, HitExplainer
from rag_explain.retrieval.asked import Asked, Removed, checked_limit, no_reason
from rag_explain.retrieval.background import calibrated
from rag_explain.retrieval.corpus import Entry
from rag_explain.retrieval.faiss_rows import FaissCorpus, Filter, Sieve, enough_effort, exhaustive
from rag_explain.retrieval.ladder import climb
from rag_explain.retrieval.places import Places
from rag_explain.retrieval.search import RetrievedDocument, Search

if TYPE_CHECKING:
    from rag_explain.explainer import Explainer


class FaissQuestions(ABC):
    """Questions about what a search of an index returned; how it searches is its subclass's."""

    index: Any
    _hit_explainer: HitExplainer
    explainer: Explainer

    @abstractmethod
    def _searched(
        self, queries: Sequence[str], k: int, explain: ExplainMode | None, top: int | None, sieve: Sieve
    ) -> list[tuple[list[int], Hits]]:
        """What is returned for each query, with the row of each hit."""

    @abstractmethod
    def rows(self) -> dict[int, RetrievedDocument]:
        """All documents by row."""

    @abstractmethod
    def _vectors(self, queries: Sequence[str]) -> NDArray[np.float32]:
        """(Q, d): the queries as they are searched with."""

    @abstractmethod
    def _scoring(self, vectors: NDArray[np.float32]) -> tuple[Metric, str | None]:
        """What the index's scores are."""

    @abstractmethod
    def _document(self, row: int, score: float | None = None) -> RetrievedDocument:
        """The document of a row."""

    def why_not(
        self,
        query: str,
        id: str,
        *,
        got: str | None = None,
        k: int = 10,
        filter: Filter | None = None,
        min_score: float | None = None,
        reencode: int = 0,
    ) -> WhyNot:
        """Why this document was not among the k that `search` returns, or not before the hit `got`.

        `filter` and `min_score` are those of the search that is asked about. Where the index does not give the vectors
        of all documents, an exact rank is known only if as many as `reencode` may be encoded again.
        """
        sieve = Sieve(filter, min_score, self.index)
        ((_, hits),) = self._searched([query], k, None, None, sieve)
        return climb(self.asked(query, hits, k, sieve, reencode), id, got)

    def asked(self, query: str, hits: Hits, k: int, sieve: Sieve, reencode: int = 0) -> Asked:
        """What tells why a search did not return something else."""
        vector = self._vectors([query])
        metric, reason = self._scoring(vector)
        by_filter = no_reason if sieve.filter is None else lambda entry: sieve.reason(entry.document)
        return Asked(
            query=query,
            hits=hits,
            k=k,
            corpus=self._corpus(metric),
            explainer=self.explainer,
            vector=vector[0],
            searched="this index",
            removed=Removed(by_filter, partial(self._below, sieve, vector)),
            sought=lambda entry: enough_effort(self.index, vector, k, entry.key),
            reencode=checked_limit(reencode),
            otherwise=reason,
        )

    def _below(self, sieve: Sieve, vector: NDArray[np.float32], entry: Entry) -> str | None:
        """Why the least score leaves a row out; None where it does not."""
        if sieve.min_score is None:
            return None
        scores, rows = exhaustive(self.index, vector, int(self.index.ntotal))
        told = zip(rows[0].tolist(), scores[0].tolist(), strict=True)
        score = next((score for row, score in told if row == entry.key), None)
        if score is None or sieve.is_enough(score):
            return None
        return f"its score is {score:.4f}, and min_score={sieve.min_score:g} lets nothing worse through"

    def what_if(self, query: str, id: str, *, without: Any = None, replace: Any = None) -> WhatIf:
        """As `Explainer.what_if`, of a document of the index by its id, with the rank that it has then."""
        places = self._places(self._scoring(self._vectors([query]))[0])
        return places.what_if(query, id, without=without, replace=replace)

    def calibrate(self, queries: Sequence[str] | None = None) -> Calibration:
        """Measure what unrelated texts score here: hits then say where they stand, and `save` keeps it with the index.

        `queries` are some that people ask, a hundred or so. None: sentences of documents, each against the others.
        """

        def measured(explainer: Explainer) -> Calibration:
            metric = self._scoring(self._vectors([TEXTS[0]]))[0]
            return calibrated(self._corpus(metric), explainer, metric, queries, self._vectors)

        return self._hit_explainer.background.measure(measured, self._calibrated_search())

    @property
    def calibration(self) -> Calibration | None:
        """What `calibrate` measured, or was kept with the index; it can be set, too."""
        return self._hit_explainer.background.calibration

    @calibration.setter
    def calibration(self, calibration: Calibration | None) -> None:
        self._hit_explainer.background.use(calibration, self._calibrated_search())

    @abstractmethod
    def _calibrated_search(self) -> Search:
        """What a search is made of."""

    def _places(self, metric: Metric) -> Places:
        return Places(self._corpus(metric), self.explainer, self._vectors)

    def _corpus(self, metric: Metric) -> FaissCorpus:
        return FaissCorpus(self.index, lambda: ((row, self._document(row)) for row in self.rows()), metric)
