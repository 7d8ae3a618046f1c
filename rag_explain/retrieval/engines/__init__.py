"""Vector engines: one module each, recognised by the handle that a framework's store keeps, whatever the framework."""

from rag_explain.retrieval.engines.base import TOLERANCE, Engine, Kept, Place, Rows
from rag_explain.retrieval.engines.chroma import ChromaEngine
from rag_explain.retrieval.engines.faiss import FaissEngine
from rag_explain.retrieval.engines.lancedb import LanceDBEngine
from rag_explain.retrieval.engines.milvus import MilvusEngine
from rag_explain.retrieval.engines.pgvector import PgvectorEngine
from rag_explain.retrieval.engines.qdrant import QdrantEngine
from rag_explain.retrieval.holders import attributes

__all__ = ["TOLERANCE", "ChromaEngine", "Engine", "FaissEngine", "Kept", "LanceDBEngine", "MilvusEngine"]
__all__ += ["PgvectorEngine", "Place", "QdrantEngine", "Rows", "engine_of"]

_ENGINES: tuple[type[Engine], ...] = (
    ChromaEngine,
    FaissEngine,
    LanceDBEngine,
    MilvusEngine,
    PgvectorEngine,
    QdrantEngine,
)


def engine_of(store: object, place: Place | None = None, known: Engine | None = None) -> Engine | None:
    """The engine whose handle this is, or keeps in an attribute; None for engines that are not known here.

    `known` is what was found last: it is returned again where it still is the engine, with what it has learnt.
    """
    place = place or Place()
    for handle in (store, *attributes(store).values()):
        if known is not None and known.handle is handle and known.place == place:
            return known
        for kind in _ENGINES:
            engine = kind.of(handle, place)
            if engine is not None:
                return engine
    return None
