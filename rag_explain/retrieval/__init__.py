"""What an adapter of a framework is built from: retrieved documents in, hits with explanations out."""

from __future__ import annotations

from rag_explain.retrieval.adapter import ExplainMode, HitExplainer, RetrievedDocument, check_mode
from rag_explain.retrieval.sharing import ExplainerSource, held_model
from rag_explain.retrieval.truth import TOLERANCE, faiss_metric, retriever_reason

__all__ = [
    "TOLERANCE",
    "ExplainMode",
    "ExplainerSource",
    "HitExplainer",
    "RetrievedDocument",
    "check_mode",
    "faiss_metric",
    "held_model",
    "retriever_reason",
]
