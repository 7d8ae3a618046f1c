"""Vector engines: one module each, recognised by the handle that a framework's store keeps, whatever the framework."""

from typing import Any

from rag_explain.retrieval.engines.base import TOLERANCE, Engine
from rag_explain.retrieval.engines.chroma import ChromaEngine
from rag_explain.retrieval.engines.faiss import FaissEngine, Rows
from rag_explain.retrieval.holders import attributes

__all__ = ["TOLERANCE", "ChromaEngine", "Engine", "FaissEngine", "coded", "engine_of"]


def engine_of(store: object, rows: Rows | None = None) -> Engine | None:
    """The engine whose handle this is, or keeps in an attribute; None for engines that are not known here.

    `rows` gives the rows of documents, for an engine that does not know them by id.
    """
    for handle in (store, *attributes(store).values()):
        engine = ChromaEngine.of(handle) or FaissEngine.of(handle, rows)
        if engine is not None:
            return engine
    return None


def coded(engine: Engine, vectors: Any) -> Any:
    """(D, e): vectors as the engine compares them; None where it loses something of them, and does not say what."""
    return engine.coded(vectors) if isinstance(engine, FaissEngine) else vectors
