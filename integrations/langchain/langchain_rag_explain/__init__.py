"""Why did the retriever return this document? Explanations for any LangChain retriever.

`langchain_rag_explain.faiss` has one of its own, over a FAISS index.
"""

from __future__ import annotations

from langchain_rag_explain.byte_store import ByteStoreObjects
from langchain_rag_explain.callback import ExplanationLogHandler
from langchain_rag_explain.documents import ExplainedDocument, get_explanation
from langchain_rag_explain.hits import EVENT
from langchain_rag_explain.retrievers import ExplainingRetriever

__all__ = [
    "EVENT",
    "ByteStoreObjects",
    "ExplainedDocument",
    "ExplainingRetriever",
    "ExplanationLogHandler",
    "get_explanation",
]
