"""FaissRetriever, where people look for it."""

from rag_explain.retrieval.faiss import FaissRetriever
from rag_explain.retrieval.saved_index import read_manifest

__all__ = ["FaissRetriever", "read_manifest"]
