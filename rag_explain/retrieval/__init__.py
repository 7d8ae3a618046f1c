"""What an adapter of a framework is built from: retrieved documents in, hits with explanations out."""

from rag_explain.retrieval.adapter import ExplainMode, HitExplainer, check_mode
from rag_explain.retrieval.engines import ChromaEngine, Engine, Kept, LanceDBEngine, Place, engine_of
from rag_explain.retrieval.holders import held_model
from rag_explain.retrieval.search import RetrievedDocument, Search
from rag_explain.retrieval.sharing import ExplainerSource
from rag_explain.retrieval.stages import UNNAMED, StagedHits, after, same_score, scored
from rag_explain.retrieval.truth import retriever_reason
from rag_explain.retrieval.usage import Embedder, has_model

__all__ = ["UNNAMED", "ChromaEngine", "Embedder", "Engine", "ExplainMode", "ExplainerSource", "HitExplainer", "Kept"]
__all__ += ["LanceDBEngine", "Place", "RetrievedDocument", "Search", "StagedHits", "after", "check_mode", "engine_of"]
__all__ += ["has_model", "held_model", "retriever_reason", "same_score", "scored"]
