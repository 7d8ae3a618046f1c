"""What can be asked of a wrapped LangChain retriever about a result, and what its store is asked for that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache, partial
from typing import Any

from langchain_core.vectorstores import VectorStore

from langchain_rag_explain._internals import docstore_documents, open_table
from langchain_rag_explain.documents import carried
from langchain_rag_explain.stores import document_id, engine_of_store
from rag_explain.errors import InvalidInput
from rag_explain.results.hits import Hits
from rag_explain.retrieval import Corpus, EngineCorpus, Entry, Removed, RetrievedDocument, StoreQuestions, no_reason

# What sets how many are returned, or how they are mixed; all other options choose among the documents.
_COUNTS = ("k", "fetch_k", "lambda_mult", "score_threshold", "consistency", "search_params", "explain", "top")


class Questions(StoreQuestions):
    """The questions of a wrapped retriever or vector store."""

    def _stores(self) -> list[VectorStore]:
        """The vector stores that are searched, however deep."""
        raise NotImplementedError

    def _own_options(self, options: dict[str, Any]) -> Mapping[str, Any]:
        """What the search takes, by the attributes of the retriever and by the call."""
        raise NotImplementedError

    def _invoked(self, query: str, options: dict[str, Any]) -> Any:
        """What the retriever returns."""
        raise NotImplementedError

    def _returned(self, query: str, options: dict[str, Any]) -> Hits:
        hits = (carried(document) for document in self._invoked(query, {"explain": "lazy", **options}))
        return Hits(hit for hit in hits if hit is not None)

    def _corpus(self) -> Corpus:
        stores = self._stores()
        if len(stores) != 1:
            what = "searches no vector store" if not stores else f"searches {len(stores)} vector stores"
            raise InvalidInput(f"the retriever {what}: ask a retriever around one store")
        (store,) = stores
        open_table(store)
        engine = engine_of_store(store)
        if engine is None:
            raise InvalidInput(f"what {type(store).__name__} holds is not known here: see docs/stores.md")
        kept = docstore_documents(store)
        return EngineCorpus(engine, None if kept is None else partial(_of_docstore, kept))

    def _removed(self, query: str, options: dict[str, Any], corpus: Corpus) -> Removed:
        (store,) = self._stores()
        own = self._own_options(options)
        total = max(1, len(corpus.entries or ()))
        choosing = {name: value for name, value in own.items() if name not in _COUNTS and value is not None}

        @cache
        def removed() -> set[str | None]:
            return _found(store, query, total, {}) - _found(store, query, total, choosing)

        def filtered(entry: Entry) -> str | None:
            names = ", ".join(f"{name}={value!r}" for name, value in choosing.items())
            return (
                f"{type(store).__name__} finds it without {names}, and not with it" if entry.key in removed() else None
            )

        def below(entry: Entry) -> str | None:
            limit = own.get("score_threshold")
            if limit is None:
                return None
            scored = store.similarity_search_with_relevance_scores(query, k=total, **choosing)
            score = next((score for one, score in scored if document_id(one, store) == entry.key), None)
            if score is None or score >= limit:
                return None
            return f"its relevance score is {score:.4f}, and score_threshold={limit:g} lets nothing lower through"

        return Removed(filtered if choosing else no_reason, below)


def _found(store: VectorStore, query: str, k: int, options: Mapping[str, Any]) -> set[str | None]:
    return {document_id(one, store) for one in store.similarity_search(query, k=k, **options)}


def _of_docstore(kept: Mapping[str, Any]) -> Iterable[RetrievedDocument]:
    return (RetrievedDocument(id=name, text=one.page_content, metadata=one.metadata) for name, one in kept.items())
