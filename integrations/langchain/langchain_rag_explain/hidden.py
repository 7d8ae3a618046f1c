"""The legs of a QdrantVectorStore in hybrid mode: its server fuses them, and returns no score of either."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from langchain_core.documents import Document
from langchain_core.vectorstores import VectorStore

from langchain_rag_explain.stores import document_id, fuses_inside
from rag_explain.results.deferred import Deferred
from rag_explain.results.explanation import Explanation
from rag_explain.results.stages import Stage
from rag_explain.retrieval import Combination, Found, RetrievedDocument, Run, Search, asked_again, fusion

# Of the fused list, and not of its legs.
_LAST = ("hybrid_fusion", "offset", "score_threshold")
_CONSTANT, _FIRST = 2, 0  # of Qdrant's reciprocal ranks
_SINGLE = 1e-6  # a server tells scores in single precision


def hidden_legs(
    store: VectorStore | None,
    query: str,
    options: Mapping[str, Any],
    documents: Sequence[Document],
    found: Sequence[RetrievedDocument],
    search: Search,
) -> Callable[[int, Deferred[Explanation]], tuple[Stage, ...]] | None:
    """What tells the stages of what this store found, by asking it again for each leg; None for any other store."""
    if not fuses_inside(store):
        return None
    fused = [
        Found((document_id(document, store),), one.score, None, document)
        for document, one in zip(documents, found, strict=True)
    ]
    metric = "unknown" if search.engine is None else search.engine.metric.name
    return asked_again(search.name, query, fused, metric, partial(_combined, store, query, dict(options)))


def _combined(store: Any, query: str, options: dict[str, Any]) -> Combination:
    given = {name: value for name, value in options.items() if name not in _LAST}
    runs = [_run(store, mode, query, given) for mode in ("dense", "sparse")]
    legs = [fusion.Leg([(one.keys[0], one.score) for one in run.found or ()]) for run in runs]
    rule, shares = _fused(options.get("hybrid_fusion"), legs)
    return Combination(runs, "fusion", rule, shares, tolerance=_SINGLE)


def _run(store: Any, mode: str, query: str, options: dict[str, Any]) -> Run:
    """The store's own search in another mode, which is what it gives its server as a leg."""
    leg = copy.copy(store)
    leg.retrieval_mode = type(store.retrieval_mode)(mode)
    scored = leg.similarity_search_with_score(query, **options)
    found = [Found((document_id(one, store),), float(score), None, one) for one, score in scored]
    return Run(f"{type(store).__name__} {mode}", leg, query, found=found)


def _fused(asked: Any, legs: Sequence[fusion.Leg]) -> tuple[str, fusion.Shares | None]:
    """What it was asked to fuse by, and what that gives; None for what is not known here."""
    kind = "rrf" if asked is None else getattr(getattr(asked, "fusion", None), "value", None)
    ranks = getattr(asked, "rrf", None)
    if kind == "rrf" or (ranks is not None and not ranks.weights):
        constant = _CONSTANT if ranks is None or ranks.k is None else ranks.k
        return "rrf", fusion.reciprocal_rank(legs, constant, first=_FIRST)
    return (
        ("distribution-based score", fusion.distribution(legs, is_sample=True)) if kind == "dbsf" else ("unknown", None)
    )
