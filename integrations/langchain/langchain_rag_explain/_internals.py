"""Every private name of LangChain that is used here, and for what. A test per name notices when one is renamed."""

from __future__ import annotations

from typing import Any

from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever, LangSmithRetrieverParams
from langchain_core.vectorstores import VectorStore


def tracing_parameters(retriever: BaseRetriever, **kwargs: Any) -> LangSmithRetrieverParams:
    """`_get_ls_params`: what traces say about a retriever."""
    return retriever._get_ls_params(**kwargs)


def open_table(store: VectorStore) -> None:
    """`_get_or_create_table`: has LanceDB's store open the table that it otherwise opens in its first search."""
    opens = getattr(store, "_get_or_create_table", None)
    if opens is not None:
        opens()


def docstore_documents(store: VectorStore | None) -> dict[str, Document] | None:
    """`_dict`: all documents of langchain-community's docstore, which can otherwise only be looked up by id."""
    kept = getattr(getattr(store, "docstore", None), "_dict", None)
    return kept if isinstance(kept, dict) else None


def store_inside(store: VectorStore | None) -> VectorStore | None:
    """`_PGVectorStore__vs`: the asynchronous store that a PGVectorStore of langchain-postgres runs in its own loop."""
    return getattr(store, "_PGVectorStore__vs", None)


def distance_strategy(store: VectorStore) -> str | None:
    """`_distance_strategy`: how a PGVector of langchain-postgres compares: a string, by its enumeration or without."""
    return getattr(store, "_distance_strategy", None)
