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
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore, VectorStoreRetriever
from pydantic import Field, PrivateAttr

from langchain_rag_explain._internals import docstore_documents, tracing_parameters
from langchain_rag_explain.documents import ExplainedDocument
from rag_explain.errors import InvalidInput
from rag_explain.results.hits import Hits
from rag_explain.results.metric import UNKNOWN, Metric
from rag_explain.retrieval import (
    ExplainMode,
    HitExplainer,
    RetrievedDocument,
    faiss_metric,
    held_model,
    retriever_reason,
)

logger = logging.getLogger("langchain_rag_explain")

EVENT = "rag_explain.explanation"
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
    """An Explainer, or a model to make one from; None: the SentenceTransformer inside the store's embeddings."""
    explain: Any = "lazy"
    """"lazy", "eager" or "off"; also `invoke(query, explain=...)`."""
    top: int | None = None
    """Only the first `top` documents get an explanation; None: all. Also `invoke(query, top=...)`."""
    time_limit: float | None = None
    """Seconds that eager explanations of one query may take."""
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

    def model_post_init(self, context: Any, /) -> None:
        """Find out what the documents are scored by."""
        if (self.retriever is None) == (self.vectorstore is None):
            raise InvalidInput("ExplainingRetriever takes a retriever or a vectorstore, and not both")
        store = self.vectorstore if self.retriever is None else getattr(self.retriever, "vectorstore", None)
        model = None if store is None else held_model(store.embeddings)
        source = model if self.explainer is None else self.explainer
        if source is None:
            raise InvalidInput(
                f"no SentenceTransformer was found in {type(self.retriever or self.vectorstore).__name__}: "
                "pass explainer=Explainer(model) with the model that embeds its documents"
            )
        metric = _metric(self.vectorstore) if self.metric is None else Metric.named(self.metric)
        # Where there is a score to compare with, every explanation is checked against it: nothing need be assumed.
        surrogate = _surrogate(self.retriever, store, known=model is not None or metric != UNKNOWN)
        self._hit_explainer = HitExplainer(
            source,
            explain=self.explain,
            top=self.top,
            time_limit=self.time_limit,
            metric=metric,
            surrogate=retriever_reason(self.surrogate, surrogate),
        )

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
            found = self.retriever.invoke(query, config={"callbacks": run_manager.get_child()}, **options)
            scored: list[_Scored] = [(document, None) for document in found]
        else:
            assert self.vectorstore is not None
            scored = list(self.vectorstore.similarity_search_with_score(query, **options))
        scored = scored[: options.get("k")]
        hits = self._hit_explainer.hits(query, _found(scored), explain, top=top)
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
            found = await self.retriever.ainvoke(query, config={"callbacks": run_manager.get_child()}, **options)
            scored: list[_Scored] = [(document, None) for document in found]
        else:
            assert self.vectorstore is not None
            scored = list(await self.vectorstore.asimilarity_search_with_score(query, **options))
        scored = scored[: options.get("k")]
        hits = await self._hit_explainer.ahits(query, _found(scored), explain, top=top)
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

    def precompute(self, documents: Iterable[Document] | VectorStore | None = None, **options: Any) -> int:
        """Fill the explainer's store with the factors of these documents, or of all in a vector store.

        None: the wrapped vector store. Options are those of `Explainer.precompute`.
        """
        if documents is None:
            documents = self.vectorstore or getattr(self.retriever, "vectorstore", None)
        known = list(_stored(documents) if isinstance(documents, VectorStore) or documents is None else documents)
        ids = [document.id for document in known]
        return self._hit_explainer.precompute([document.page_content for document in known], ids=ids, **options)


def _found(scored: Iterable[_Scored]) -> Iterator[RetrievedDocument]:
    for document, score in scored:
        yield RetrievedDocument(
            id=document.id,
            text=document.page_content,
            score=None if score is None else float(score),
            metadata=document.metadata,
        )


def _event(query: str, hits: Hits) -> dict[str, Any]:
    return {"query": query, "hits": [hit.to_dict() for hit in hits]}


def _metric(store: VectorStore | None) -> Metric:
    """What a store's scores are, for the stores that tell."""
    if isinstance(store, InMemoryVectorStore):
        return Metric("cosine")
    if type(store).__name__ == "FAISS":  # its index decides, whatever its strategy says
        return faiss_metric(getattr(store, "index", None))
    return UNKNOWN


def _surrogate(retriever: BaseRetriever | None, store: VectorStore | None, *, known: bool) -> str | None:
    """Why the documents were not chosen by this encoder's similarity alone, or None when they were."""
    if retriever is not None:
        name = type(retriever).__name__
        if not isinstance(retriever, VectorStoreRetriever):
            return f"the documents were chosen by {name}, not by this encoder's similarity alone"
        if retriever.search_type == "mmr":
            return "the documents were chosen for their diversity too (MMR), not by this encoder's similarity alone"
    if not known and store is not None and store.embeddings is not None:
        return f"the documents were scored by {type(store.embeddings).__name__}, which is not known to be this encoder"
    return None


def _stored(store: VectorStore | None) -> list[Document]:
    """All documents of a vector store, for the stores that can list them."""
    if isinstance(store, InMemoryVectorStore):
        return [Document(id=key, page_content=value["text"]) for key, value in store.store.items()]
    kept = docstore_documents(store)
    if kept is not None:
        return [Document(id=key, page_content=document.page_content) for key, document in kept.items()]
    raise InvalidInput(f"{type(store).__name__} cannot list its documents: pass them to precompute")
