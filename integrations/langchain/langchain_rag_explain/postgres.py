"""The stores of langchain-postgres: the table in which each keeps its documents, and how it compares."""

from __future__ import annotations

from typing import Any

from langchain_core.vectorstores import VectorStore

from langchain_rag_explain._internals import distance_strategy, store_inside
from rag_explain.results.metric import Metric
from rag_explain.retrieval import Place

_STRATEGIES = {"cosine": "cosine distance", "l2": "L2", "inner": "negative inner product"}
_FUNCTIONS = {"cosine_distance": "cosine distance", "l2_distance": "L2", "inner_product": "inner product"}
# PGVector keeps the documents of all its collections in one table.
_OF_COLLECTION = '"collection_id" = (SELECT "uuid" FROM "langchain_pg_collection" WHERE "name" = %s)'


def searching_store(store: VectorStore | None) -> VectorStore | None:
    """The store itself, or the one inside a PGVectorStore, which runs it in a loop of its own."""
    return store_inside(store) if _is_a(store, "PGVectorStore") else store


def postgres_place(store: VectorStore | None) -> Place | None:
    """Where a store of langchain-postgres keeps its documents; None for any other."""
    told: Any = store
    if _is_a(store, "PGVector"):
        return Place(
            collection="langchain_pg_embedding",
            vector="embedding",
            text="document",
            metric=_metric(_STRATEGIES, distance_strategy(told)),
            condition=(_OF_COLLECTION, told.collection_name),
        )
    if _is_a(store, "AsyncPGVectorStore"):
        return Place(
            collection=told.table_name,
            key=told.id_column,
            vector=told.embedding_column,
            text=told.content_column,
            schema=told.schema_name,
            metric=_metric(_FUNCTIONS, getattr(told.distance_strategy, "search_function", None)),
        )
    return None


def _metric(names: dict[str, str], name: str | None) -> Metric | None:
    return None if name not in names else Metric(names[name])


def _is_a(store: object, name: str) -> bool:
    """Whether a store is of this class of langchain-postgres, or of one derived from it."""
    kinds = ((kind.__module__.partition(".")[0], kind.__qualname__) for kind in type(store).__mro__)
    return ("langchain_postgres", name) in kinds
