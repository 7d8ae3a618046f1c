"""Retrievers that search chunks and return the documents that these are of: ParentDocument and MultiVectorRetriever.

What was embedded, scored and so can be explained is the chunk. The retriever itself runs, once, as it is: a copy of it
holds its own stores behind an ear, so that it is known which chunks were found and which document is of which.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever

from langchain_rag_explain.stores import scored_options, tells_scores
from rag_explain.retrieval import RetrievedDocument

logger = logging.getLogger("langchain_rag_explain")

# Where the search is known to go from chunks to documents by a key in the chunks' metadata.
_HOME = "retrievers.multi_vector"
_SEARCHES = ("similarity_search", "similarity_search_with_relevance_scores", "max_marginal_relevance_search")


def finds_chunks(retriever: BaseRetriever | None) -> bool:
    """Whether a retriever returns the documents of the chunks that it finds; one with a search of its own may not."""
    methods = (getattr(type(retriever), name, None) for name in ("_get_relevant_documents", "_aget_relevant_documents"))
    return all(method is not None and _is_at_home(method) for method in methods)


@lru_cache(maxsize=64)
def _is_at_home(method: Any) -> bool:
    return str(inspect.unwrap(method).__module__).endswith(_HOME)


def tells_chunk_scores(retriever: Any) -> bool:
    """Whether the store of the chunks tells their scores in the very same search."""
    return finds_chunks(retriever) and retriever.search_type == "similarity" and tells_scores(retriever.vectorstore)


class ChunkSearch:
    """One search: `retriever` is asked, then `found` tells which chunk each of its documents was found by."""

    def __init__(self, retriever: Any) -> None:
        self._chunks, self._documents = _Ear(retriever.vectorstore), _Ear(retriever.docstore)
        self._id_key: str = retriever.id_key
        ears = {"vectorstore": self._chunks, "docstore": self._documents}
        self.retriever: BaseRetriever = retriever.model_copy(update=ears)

    def found(self, documents: Sequence[Document]) -> list[RetrievedDocument]:
        """The first chunk of each document that the search returned: where that is by similarity, the best one."""
        try:
            return list(self._of_chunks(documents))
        except Exception as error:  # no search fails because it could not be followed
            logger.warning("which chunks were found is not known: %s: %s", type(error).__name__, error)
            return [
                RetrievedDocument(id=one.id, text=None, whole=one.page_content, metadata=one.metadata)
                for one in documents
            ]

    def _of_chunks(self, documents: Sequence[Document]) -> Iterator[RetrievedDocument]:
        first: dict[str, tuple[Document, float | None]] = {}
        for _, found in self._chunks.heard:
            for chunk, score in found:
                first.setdefault(chunk.metadata.get(self._id_key, ""), (chunk, score))
        looked_up = [both for call, found in self._documents.heard for both in zip(call[0], found, strict=True)]
        kept = [(key, document) for key, (document, _) in looked_up if document is not None]
        for document, (key, own) in zip(documents, kept, strict=False):  # the caller may have asked for fewer
            if own is not document:
                raise LookupError("the documents are not those that were looked up")
            yield _of_chunk(key, document, *first[key])


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

    def __init__(self, store: Any) -> None:
        self._store = store
        self.heard: list[tuple[tuple[Any, ...], list[tuple[Any, float | None]]]] = []  # calls, and what they returned

    def __getattr__(self, name: str) -> Any:
        plain = name.removeprefix("a")
        if plain not in (*_SEARCHES, "mget"):
            return getattr(self._store, name)
        is_told = plain == "similarity_search" and tells_scores(self._store)
        method = getattr(self._store, f"{name}_with_score" if is_told else name)

        def taken(options: dict[str, Any]) -> dict[str, Any]:
            return scored_options(self._store, options) if is_told else options

        def asked(*call: Any, **options: Any) -> Any:
            return self._hear(call, list(method(*call, **taken(options))), is_told)

        async def awaited(*call: Any, **options: Any) -> Any:
            return self._hear(call, list(await method(*call, **taken(options))), is_told)

        return asked if plain == name else awaited

    def _hear(self, call: tuple[Any, ...], found: list[Any], is_told: bool) -> list[Any]:
        documents = [one[0] if isinstance(one, tuple) else one for one in found]
        # A relevance score is no score of the store.
        self.heard.append((call, found if is_told else [(document, None) for document in documents]))
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
