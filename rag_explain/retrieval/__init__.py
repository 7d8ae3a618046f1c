"""What an adapter of a framework is built from: retrieved documents in, hits with explanations out."""

from __future__ import annotations

from rag_explain.retrieval.adapter import (
    TOLERANCE,
    Explain,
    ExplainerSource,
    HitExplainer,
    RetrievedDocument,
    check_explain,
    find_model,
    surrogate_reason,
    wanted_hits,
)

__all__ = [
    "TOLERANCE",
    "Explain",
    "ExplainerSource",
    "HitExplainer",
    "RetrievedDocument",
    "check_explain",
    "find_model",
    "surrogate_reason",
    "wanted_hits",
]
