"""What an adapter of a framework is built from: retrieved documents in, hits with explanations out."""

from rag_explain.retrieval import fusion
from rag_explain.retrieval.adapter import ExplainMode, HitExplainer, check_mode
from rag_explain.retrieval.asked import Removed, no_reason
from rag_explain.retrieval.black_box import MAX_CALLS
from rag_explain.retrieval.corpus import Corpus, EngineCorpus, Entry
from rag_explain.retrieval.engines import Engine, Kept, Place, engine_of
from rag_explain.retrieval.hidden import asked_again
from rag_explain.retrieval.holders import held_model, inside, models_inside
from rag_explain.retrieval.legs import LegBatches, Legs, reranked, reranker_of, scorer_of
from rag_explain.retrieval.mmr import Diversity
from rag_explain.retrieval.nested import Encoder, Encoders, InnerHits, collecting, report
from rag_explain.retrieval.search import RetrievedDocument, Search, readable
from rag_explain.retrieval.sharing import ExplainerSource, check_source
from rag_explain.retrieval.stages import UNNAMED, StagedHits, after, same_score, scored
from rag_explain.retrieval.store_questions import StoreQuestions
from rag_explain.retrieval.trace import Combination, Found, Reader, Run, Trace, ordered, overheard
from rag_explain.retrieval.truth import retriever_reason
from rag_explain.retrieval.usage import Embedder, has_model

__all__ = ["MAX_CALLS", "UNNAMED", "Embedder", "Encoder", "Encoders", "Engine", "ExplainMode"]
__all__ += [
    "ExplainerSource",
    "HitExplainer",
    "InnerHits",
    "Kept",
    "Place",
    "RetrievedDocument",
    "Search",
    "StagedHits",
    "after",
]
__all__ += ["Corpus", "EngineCorpus", "Entry", "Removed", "StoreQuestions", "no_reason"]
__all__ += ["check_mode", "check_source", "collecting", "engine_of", "has_model", "held_model", "inside"]
__all__ += ["models_inside", "readable", "report", "retriever_reason", "same_score", "scored"]
__all__ += ["Combination", "Found", "LegBatches", "Legs", "Reader", "Run", "Trace", "fusion", "ordered", "reranked"]
__all__ += ["Diversity", "asked_again", "overheard", "reranker_of", "scorer_of"]
