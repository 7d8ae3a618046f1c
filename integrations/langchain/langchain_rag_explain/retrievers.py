"""ExplainingRetriever: any LangChain retriever, or a vector store, whose documents say why they were found."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from langchain_core.callbacks import (
    AsyncCallbackManagerForRetrieverRun,
    CallbackManagerForRetrieverRun,
    adispatch_custom_event,
    dispatch_custom_event,
)
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever, LangSmithRetrieverParams
from langchain_core.vectorstores import VectorStore, VectorStoreRetriever
from pydantic import Field, PrivateAttr

from langchain_rag_explain._internals import tracing_parameters
from langchain_rag_explain.documents import ExplainedDocument, reranked_score
from langchain_rag_explain.stores import (
    document_id,
    embedder_of,
    embeddings_in,
    engine_of_store,
    other_search,
    stage_name,
    stored_documents,
    tells_scores,
)
from rag_explain.errors import InvalidInput
from rag_explain.results.hits import Hits
from rag_explain.results.metric import UNKNOWN, Metric
from rag_explain.results.precomputed import Precomputed
from rag_explain.retrieval import (
    Engine,
    ExplainMode,
    HitExplainer,
    RetrievedDocument,
    Search,
    has_model,
    retriever_reason,
)

logger = logging.getLogger("langchain_rag_explain")

EVENT = "rag_explain.explanation"
_BY_SIMILARITY = ("similarity", "similarity_score_threshold")
_Scored = tuple[Document, float | None]


class ExplainingRetriever(BaseRetriever):
    """The same documents in the same order, each with its explanation beside it.

        ExplainingRetriever(retriever=store.as_retriever())     # around any retriever
        ExplainingRetriever(vectorstore=store, k=4)             # keeps the store's scores

    See `langchain_rag_explain.get_explanation` for the explanation of a document.
    """

    retriever: BaseRetriever | None = None
    vectorstore: VectorStore | None = None
    explainer: Any = None
    """An Explainer, or a model to make one from; None: the SentenceTransformer inside the store's embeddings, with the
    prompts, instructions and dimensions that they use."""
    explain: Any = "lazy"
    """"lazy", "eager" or "off"; also `invoke(query, explain=...)`."""
    top: int | None = None
    """Only the first `top` documents get an explanation; None: all. Also `invoke(query, top=...)`."""
    time_limit: float | None = None
    """Seconds that eager explanations of one query may take."""
    unit: Any = None
    """"token", "word" or "sentence"; None: by words when looked at, by sentences where explanations are eager."""
    k: int | None = None
    """How many documents; None: what the retriever or the store returns by default."""
    search_kwargs: dict[str, Any] = Field(default_factory=dict)
    """What else the search takes, such as a filter."""
    metric: str | None = None
    """What the store's scores are, by the name of a `rag_explain.results.metric.Metric`; None: found out."""
    surrogate: str | bool | None = None
    """Why the documents were not chosen by this encoder's similarity alone; False: they were; None: found out."""
    metadata_key: str | None = None
    """Where eager explanations also go into the documents' metadata, as plain data; None: nowhere."""

    _hit_explainer: HitExplainer = PrivateAttr()
    _engine: Engine | None = PrivateAttr(default=None)  # as it was in the last search: it may have asked a server

    def __init__(self, **fields: Any) -> None:
        """Find out what the documents are scored by."""
        # Not in model_post_init: pydantic would hide what is refused there behind an error of its own.
        super().__init__(**fields)
        if (self.retriever is None) == (self.vectorstore is None):
            raise InvalidInput("ExplainingRetriever takes a retriever or a vectorstore, and not both")
        search = self._search()
        if self.explainer is None and not has_model(search.embedder):
            raise InvalidInput(
                f"no SentenceTransformer was found in {type(self.retriever or self.vectorstore).__name__}: "
                "pass explainer=Explainer(model) with the model that embeds its documents"
            )
        self._hit_explainer = HitExplainer(
            explain=self.explain, top=self.top, time_limit=self.time_limit, unit=self.unit
        )
        self._hit_explainer.prepare(search)

    def _search(self) -> Search:
        """What searches, embeds and scores at the moment: attributes, which people may set at any time."""
        store = self._store
        embedder = None if store is None else embedder_of(embeddings_in(store))
        self._engine = engine = engine_of_store(store, self._engine)
        is_told = self.vectorstore is not None or _tells_scores(self.retriever)
        told = engine.metric if engine is not None and is_told else UNKNOWN
        metric = told if self.metric is None else Metric.named(self.metric)
        mode = other_search(store)
        is_plain = (self.retriever is None or _is_plain(self.retriever)) and mode is None
        return Search(
            source=embedder if self.explainer is None else self.explainer,
            embedder=embedder,
            engine=engine,
            metric=metric if is_plain else UNKNOWN,
            surrogate=retriever_reason(self.surrogate, _surrogate(self.retriever) or mode),
            name=stage_name(self.retriever or self.vectorstore),
        )

    @property
    def _store(self) -> VectorStore | None:
        return self.vectorstore or getattr(self.retriever, "vectorstore", None)

    # ------------------------------------------------------------------ retrieval

    def _get_relevant_documents(
        self,
        query: str,
        *,
        run_manager: CallbackManagerForRetrieverRun,
        explain: ExplainMode | None = None,
        top: int | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        options = self._options(kwargs)
        if self.retriever is not None:
            asked = _asked(self.retriever)
            found = asked.invoke(query, config={"callbacks": run_manager.get_child()}, **options)
            scored: list[_Scored] = _with_scores(asked, found)
        else:
            assert self.vectorstore is not None
            scored = list(self.vectorstore.similarity_search_with_score(query, **options))
        scored = scored[: options.get("k")]
        hits = self._hit_explainer.hits(query, _found(scored, self._store), explain, top=top, search=self._search())
        if run_manager.handlers:
            try:
                dispatch_custom_event(EVENT, _event(query, hits), config={"callbacks": run_manager.get_child()})
            except Exception as error:
                logger.warning("the explanation event was not sent: %s: %s", type(error).__name__, error)
        return self._documents(scored, hits)

    async def _aget_relevant_documents(
        self,
        query: str,
        *,
        run_manager: AsyncCallbackManagerForRetrieverRun,
        explain: ExplainMode | None = None,
        top: int | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        options = self._options(kwargs)
        if self.retriever is not None:
            asked = _asked(self.retriever)
            found = await asked.ainvoke(query, config={"callbacks": run_manager.get_child()}, **options)
            scored: list[_Scored] = _with_scores(asked, found)
        else:
            assert self.vectorstore is not None
            scored = list(await self.vectorstore.asimilarity_search_with_score(query, **options))
        scored = scored[: options.get("k")]
        hits = await self._hit_explainer.ahits(
            query, _found(scored, self._store), explain, top=top, search=self._search()
        )
        if run_manager.handlers:
            try:
                await adispatch_custom_event(EVENT, _event(query, hits), config={"callbacks": run_manager.get_child()})
            except Exception as error:
                logger.warning("the explanation event was not sent: %s: %s", type(error).__name__, error)
        return self._documents(scored, hits)

    def _options(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        options = {**self.search_kwargs, **kwargs}
        if self.k is not None:
            options.setdefault("k", self.k)
        return options

    def _documents(self, scored: Sequence[_Scored], hits: Hits) -> list[Document]:
        return [
            ExplainedDocument.beside(document, hit, self.metadata_key)
            for (document, _), hit in zip(scored, hits, strict=True)
        ]

    def _get_ls_params(self, **kwargs: Any) -> LangSmithRetrieverParams:
        """What tracing calls this: the wrapped retriever's own parameters, under our name."""
        inner = self.retriever
        if inner is None:
            assert self.vectorstore is not None
            inner = self.vectorstore.as_retriever()
        params = tracing_parameters(inner, **kwargs)
        params["ls_retriever_name"] = "rag_explain"
        return params

    # ------------------------------------------------------------------ the cache

    def precompute(self, documents: Iterable[Document] | VectorStore | None = None, **options: Any) -> Precomputed:
        """Fill the explainer's store with the factors of these documents, or of all in a vector store.

        None: the wrapped vector store. Options and result are those of `Explainer.precompute`.
        """
        source = self._store if documents is None else documents
        if source is None:
            raise InvalidInput(f"{type(self.retriever).__name__} has no vector store: pass the documents to precompute")
        if isinstance(source, VectorStore):
            known: list[tuple[str | None, str]] = list(stored_documents(source))
        else:
            given = list(source)
            if not all(isinstance(document, Document) for document in given):
                raise InvalidInput("precompute takes a list of documents, or a vector store")
            known = [(document.id, document.page_content) for document in given]
        texts, ids = [text for _, text in known], [name for name, _ in known]
        return self._hit_explainer.precompute(texts, self._search(), ids=ids, **options)


class _Telling(VectorStoreRetriever):
    """A vector store's retriever for one search, which keeps the scores that it was made to drop."""

    _scores: list[float] = PrivateAttr(default_factory=list)

    @classmethod
    def like(cls, retriever: VectorStoreRetriever) -> _Telling:
        return cls.model_construct(**{**dict(retriever), "name": retriever.get_name()})  # traces see no difference

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        return self._keep(self.vectorstore.similarity_search_with_score(query, **self.search_kwargs | kwargs))

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        return self._keep(await self.vectorstore.asimilarity_search_with_score(query, **self.search_kwargs | kwargs))

    def _keep(self, scored: Sequence[tuple[Document, float]]) -> list[Document]:
        self._scores = [score for _, score in scored]
        return [document for document, _ in scored]


def _asked(retriever: BaseRetriever) -> BaseRetriever:
    """What is asked in the retriever's place: itself, or one that keeps the scores of the very same search."""
    return _Telling.like(retriever) if _tells_scores(retriever) else retriever  # type: ignore[arg-type]


def _tells_scores(retriever: BaseRetriever | None) -> bool:
    is_known = _is_plain(retriever) and getattr(retriever, "search_type", None) == "similarity"
    return is_known and tells_scores(retriever.vectorstore)  # type: ignore[union-attr]


def _with_scores(asked: BaseRetriever, found: Sequence[Document]) -> list[_Scored]:
    """Documents with the store's score, or with that of a reranker in the retriever, which writes it down."""
    if isinstance(asked, _Telling):
        return list(zip(found, asked._scores, strict=True))
    return [(document, None if _is_plain(asked) else reranked_score(document)) for document in found]


def _found(scored: Iterable[_Scored], store: VectorStore | None) -> Iterator[RetrievedDocument]:
    for document, score in scored:
        yield RetrievedDocument(
            id=document_id(document, store),
            text=document.page_content,
            score=None if score is None else float(score),
            metadata=document.metadata,
        )


def _event(query: str, hits: Hits) -> dict[str, Any]:
    return {"query": query, "hits": [hit.to_dict() for hit in hits]}


def _surrogate(retriever: BaseRetriever | None) -> str | None:
    """Why the documents were not chosen by this encoder's similarity alone, or None when they were."""
    if retriever is not None and not _is_plain(retriever):
        return f"the documents were chosen by {stage_name(retriever)}, not by this encoder's similarity alone"
    kind = getattr(retriever, "search_type", "similarity")
    if kind == "mmr":
        return "the documents were chosen for their diversity too (MMR), not by this encoder's similarity alone"
    if kind not in _BY_SIMILARITY:
        return f"the documents were chosen by a search of type {kind!r}, not by this encoder's similarity alone"
    return None


def _is_plain(retriever: BaseRetriever | None) -> bool:
    """Whether a vector store is asked as it is. A class of its own may do anything with the query and what is found."""
    return type(retriever) is VectorStoreRetriever
