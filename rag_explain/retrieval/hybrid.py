"""HybridRetriever: words and vectors, fused, and reranked where a cross-encoder is given. Every stage is explained.

retriever = HybridRetriever(FaissRetriever.from_texts(texts, Explainer("all-MiniLM-L6-v2")))
retriever.search("how do bees find home?", k=3)[0].stages
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rag_explain.errors import InvalidInput, ProcessBound, import_extra, whole_number
from rag_explain.explainer import Explainer
from rag_explain.results.deferred import Deferred
from rag_explain.results.explanation import Explanation
from rag_explain.results.hits import Hits
from rag_explain.results.stages import Stage
from rag_explain.results.why_not import WhyNot
from rag_explain.retrieval import fusion
from rag_explain.retrieval.adapter import ExplainMode, HitExplainer
from rag_explain.retrieval.faiss import FaissRetriever
from rag_explain.retrieval.faiss_rows import Sieve
from rag_explain.retrieval.ladder import climb
from rag_explain.retrieval.legs import LegBatches, Legs, reranker_of
from rag_explain.retrieval.search import RetrievedDocument, Search
from rag_explain.retrieval.trace import Combination, Found, Reader, Run
from rag_explain.texts.passage import Passage
from rag_explain.texts.tokens import Unit

_NAME = "HybridRetriever"
_REASON = "the documents were chosen by {}, not by this encoder's similarity alone"


class HybridRetriever(ProcessBound):
    """Asks a BM25 index and a vector index, fuses both by reciprocal ranks, and lets a cross-encoder rank the best.

    Args:
        vectors: the vector index, whose documents the BM25 index is made of.
        reranker: a loaded CrossEncoder, or None.
        depth: how many documents each index is asked for, and how many the reranker reads.
        unit: see `rag_explain.retrieval.HitExplainer`.
    """

    instead = "make it anew from a FaissRetriever where it is needed"

    def __init__(
        self, vectors: FaissRetriever, *, reranker: Any = None, depth: int = 50, unit: Unit | None = None
    ) -> None:
        bm25s = import_extra("bm25s", "bm25s", "demo")
        self.vectors, self.reranker = vectors, reranker
        self.depth = whole_number(depth, "depth")
        if self.depth < 1:
            raise InvalidInput(f"depth must be at least 1, not {depth}")
        self._documents = {row: one for row, one in vectors.rows().items() if one.text is not None}
        self._rows = list(self._documents)
        self._analyse = partial(bm25s.tokenize, stopwords="en", show_progress=False)
        self.words = bm25s.BM25()
        terms = self._analyse([_text(one.text) for one in self._documents.values()])
        if not any(terms.ids):
            raise InvalidInput("no document has a word that BM25 could look for: search by vectors alone")
        self.words.index(terms, show_progress=False)
        self._hit_explainer, self._legs = HitExplainer(vectors.explainer, unit=unit), Legs()

    def search(self, query: str, k: int = 10, explain: ExplainMode | None = None, *, top: int | None = None) -> Hits:
        """The k best documents; `hit.stages` says what each index, their fusion and the reranker made of them."""
        k = whole_number(k, "k")
        if k < 1:
            raise InvalidInput(f"k must be at least 1, not {k}")
        return self._hits(query, self._ran(query), k, explain, top)

    def why_not(self, query: str, id: str, *, got: str | None = None, k: int = 10, reencode: int = 0) -> WhyNot:
        """Why this document was not among the k that `search` returns, or not before the hit `got`: stage by stage."""
        run = self._ran(query)
        ranked = self._hits(query, run, len(self._rows))
        asked = self.vectors.asked(query, ranked[:k], k, Sieve(None, None, self.vectors.index), reencode)
        return climb(replace(asked, run=run, staged=ranked), id, got)

    def _ran(self, query: str) -> Run:
        fused = self._fused(query)
        return fused if self.reranker is None else self._reranked(query, fused)

    def _hits(self, query: str, last: Run, k: int, explain: ExplainMode | None = None, top: int | None = None) -> Hits:
        ranked = list(last.found or ())[:k]
        reader, batches = Reader(query, _combination, _metric), LegBatches()

        def stages(index: int, handle: Deferred[Explanation]) -> tuple[Stage, ...]:
            own = partial(self._handle, query, batches, handle)
            return replace(reader, handle=own, rerank=own).stages(last, index + 1, ranked[index])

        found = [self._document(one) for one in ranked]
        search = Search(source=self.vectors.explainer, surrogate=_REASON.format(last.name), name=_NAME)
        return self._hit_explainer.hits(query, found, explain, top=top, search=search, stages=stages)

    def _document(self, found: Found) -> RetrievedDocument:
        one = self._documents[found.item]
        return replace(one, id=str(found.item) if one.id is None else one.id, score=found.score)

    def _fused(self, query: str) -> Run:
        legs = [self._by_words(query), self._by_vectors(query)]
        totals = fusion.totals(_shares(legs))
        ranked = sorted(totals.items(), key=lambda one: -one[1])
        run = Run(_NAME, self, query, inner=legs)
        run.found = _found(ranked)
        return run

    def _by_words(self, query: str) -> Run:
        """Those in which a word of the query is."""
        terms = self._analyse([query], return_ids=False)
        numbers, scores = self.words.retrieve(terms, k=min(self.depth, len(self._rows)), show_progress=False)
        ranked = zip(numbers[0].tolist(), scores[0].tolist(), strict=True)
        return Run(
            "BM25", self.words, query, found=_found([(self._rows[one], score) for one, score in ranked if score])
        )

    def _by_vectors(self, query: str) -> Run:
        rows, hits = self.vectors.search_rows(query, self.depth, "off")
        metric = hits[0].metric if hits else "unknown"
        found = [(row, hit.score) for row, hit in zip(rows, hits, strict=True) if row in self._documents]
        return Run("FAISS", (self.vectors, metric), query, found=_found(found))

    def _reranked(self, query: str, fused: Run) -> Run:
        read = list(fused.found or ())[: self.depth]
        texts = [_text(self._documents[one.item].text) for one in read]
        scores = self.reranker.predict([(query, text) for text in texts], show_progress_bar=False) if texts else []
        ranked = sorted(zip((one.item for one in read), map(float, scores), strict=True), key=lambda one: -one[1])
        return Run(type(self.reranker).__name__, self.reranker, query, found=_found(ranked), inner=[fused])

    def _handle(
        self, query: str, batches: LegBatches, own: Deferred[Explanation], run: Run, found: Found
    ) -> Deferred[Explanation] | None:
        """What explains a stage: the encoder, the BM25 index, the reranker."""
        if run.name == "FAISS":
            return own
        make = reranker_of(self.reranker) if run.owner is self.reranker else self._explain_words
        if make is None:
            return None
        return batches.deferred(run.name, self._legs.of(run.owner, make), query, self._documents[found.item].text)

    def _explain_words(self) -> Explainer:
        return Explainer(self.words, analyser=self._analyse)


def _found(ranked: Sequence[tuple[Any, float | None]]) -> list[Found]:
    return [Found((row,), score, None, row) for row, score in ranked]


def _shares(legs: Sequence[Run]) -> fusion.Shares:
    return fusion.reciprocal_rank([fusion.Leg([(one.item, one.score) for one in leg.found or ()]) for leg in legs])


def _combination(run: Run) -> Combination | None:
    if run.name != _NAME:
        return None
    return Combination(run.inner, "fusion", "rrf", _shares(run.inner))


def _metric(run: Run) -> str:
    return str(run.owner[1]) if run.name == "FAISS" else "bm25"


def _text(text: str | Passage | None) -> str:
    return text.string if isinstance(text, Passage) else text or ""
