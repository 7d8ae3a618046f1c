"""Retrievers that search chunks and return the documents that these are of: ParentDocument and MultiVectorRetriever.

What was embedded, scored and so can be explained is the chunk. The retriever itself runs, once, as it is: a copy of it
holds its own stores behind an ear, so that it is known which chunks were found and which document is of which.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever

from langchain_rag_explain.stores import tells_scores
from rag_explain.retrieval import RetrievedDocument

logger = logging.getLogger("langchain_rag_explain")

# Where the search is known to go from chunks to documents by a key in the chunks' metadata.
_HOME = "retrievers.multi_vector"
_SEARCHES = ("similarity_search", "similarity_search_with_relevance_scores", "max_marginal_relevance_search")


def finds_chunks(retriever: BaseRetriever | None) -> bool:
    """Whether a retriever returns the documents of the chunks that it finds; one with a search of its own may not."""
    methods = (getattr(type(retriever), name, None) for name in ("_get_relevant_documents", "_aget_relevant_documents"))
    return all(method is not None and inspect.unwrap(method).__module__.endswith(_HOME) for method in methods)


def tells_chunk_scores(retriever: Any) -> bool:
    """Whether the store of the chunks tells their scores in the very same search."""
    return finds_chunks(retriever) and retriever.search_type == "similarity" and tells_scores(retriever.vectorstore)


class ChunkSearch:
    """One search: `retriever` is asked, then `found` tells which chunk each of its documents was found by."""

    def __init__(self, retriever: Any) -> None:
        self._chunks: list[tuple[Document, float | None]] = []
        self._keys: dict[int, str] = {}
        self._id_key: str = retriever.id_key
        ears = {
            "vectorstore": _Ear(retriever.vectorstore, self._hear_chunks),
            "docstore": _Ear(retriever.docstore, self._hear_documents),
        }
        self.retriever: BaseRetriever = retriever.model_copy(update=ears)

    def _hear_chunks(self, call: tuple[Any, ...], found: Sequence[Any]) -> None:
        self._chunks += [one if isinstance(one, tuple) else (one, None) for one in found]

    def _hear_documents(self, call: tuple[Any, ...], found: Sequence[Document | None]) -> None:
        self._keys |= {id(document): key for key, document in zip(call[0], found, strict=True) if document is not None}

    def found(self, documents: Sequence[Document]) -> list[RetrievedDocument]:
        """The first chunk of each document that the search returned: where that is by similarity, the best one."""
        first: dict[str, tuple[Document, float | None]] = {}
        for chunk, score in self._chunks:
            first.setdefault(chunk.metadata.get(self._id_key, ""), (chunk, score))
        keys = [self._keys[id(document)] for document in documents]
        return [_of_chunk(key, document, *first[key]) for key, document in zip(keys, documents, strict=True)]


def _of_chunk(key: str, document: Document, chunk: Document, score: float | None) -> RetrievedDocument:
    whole, text = document.page_content, chunk.page_content
    told: Any = chunk.metadata.get("start_index")  # written by splitters that were asked to
    is_there = isinstance(told, int) and told >= 0 and whole.startswith(text, told)
    start: int = told if is_there else whole.find(text)
    return RetrievedDocument(
        id=key,
        text=text,
        score=None if score is None else float(score),
        metadata=document.metadata,
        whole=whole,
        start=None if start < 0 else start,
        vector_id=chunk.id,
    )


class _Ear:
    """A store for one search: it is the store itself, but that what searches and look-ups return is heard too."""

    def __init__(self, store: Any, hear: Callable[[tuple[Any, ...], Any], None]) -> None:
        self._store, self._hear = store, hear

    def __getattr__(self, name: str) -> Any:
        plain = name.removeprefix("a")
        if plain not in (*_SEARCHES, "mget"):
            return getattr(self._store, name)
        is_told = plain == "similarity_search" and tells_scores(self._store)
        method = getattr(self._store, f"{name}_with_score" if is_told else name)

        def asked(*call: Any, **options: Any) -> Any:
            return self._heard(call, method(*call, **options), is_told)

        async def awaited(*call: Any, **options: Any) -> Any:
            return self._heard(call, await method(*call, **options), is_told)

        return asked if plain == name else awaited

    def _heard(self, call: tuple[Any, ...], found: Sequence[Any], is_told: bool) -> Sequence[Any]:
        documents = [one[0] if isinstance(one, tuple) else one for one in found]
        self._hear(call, found if is_told else documents)  # a relevance score is no score of the store
        return documents if is_told else found


def owners(retriever: Any, chunks: Sequence[tuple[str | None, str]]) -> list[tuple[str | None, str]]:
    """The texts of chunks under the keys of their documents, by which hits are known and a store can forget them."""
    try:
        found = retriever.vectorstore.get_by_ids([name for name, _ in chunks if name is not None])
    except Exception as error:  # not every store can look up
        logger.debug("the documents of chunks are not known: %s: %s", type(error).__name__, error)
        return list(chunks)
    keys = {chunk.id: chunk.metadata.get(retriever.id_key) for chunk in found}
    return [(keys.get(name) or name, text) for name, text in chunks]
