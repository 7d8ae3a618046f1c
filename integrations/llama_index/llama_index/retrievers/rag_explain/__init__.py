"""Why did the retriever return this node? Explanations for any LlamaIndex retriever."""

from llama_index.retrievers.rag_explain.base import ExplainingRetriever
from llama_index.retrievers.rag_explain.log import log_queries
from llama_index.retrievers.rag_explain.nodes import ExplainedNode, ExplanationEvent, embedded, get_explanation
from llama_index.retrievers.rag_explain.postprocessor import ExplanationPostprocessor

__all__ = [
    "ExplainedNode",
    "ExplainingRetriever",
    "ExplanationEvent",
    "ExplanationPostprocessor",
    "embedded",
    "get_explanation",
    "log_queries",
]
