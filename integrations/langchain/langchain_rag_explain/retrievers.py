"""ExplainingRetriever: any LangChain retriever, or a vector store, whose documents say why they were found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever, LangSmithRetrieverParams
from langchain_core.vectorstores import VectorStore, VectorStoreRetriever
from pydantic import Field, PrivateAttr

from langchain_rag_explain._internals import tracing_parameters
from langchain_rag_explain.documents import carried, keys, reranked_score
from langchain_rag_explain.hidden import hidden_legs
from langchain_rag_explain.hits import NAME, HitRetriever
from langchain_rag_explain.nested import loose_encoders, parts_inside, store_encoder
from langchain_rag_explain.parents import ChunkSearch, finds_chunks, owners, tells_chunk_scores
from langchain_rag_explain.questions import Questions
from langchain_rag_explain.refusals import in_one_sentence
from langchain_rag_explain.stores import (
    document_id,
    embedder_of,
    engine_of_store,
    other_search,
    scored_options,
    stage_name,
    stored_documents,
    tells_scores,
)
from langchain_rag_explain.trace import Told, listening
from rag_explain.errors import InvalidInput
from rag_explain.results.hits import Hit
from rag_explain.results.metric import UNKNOWN, Metric
from rag_explain.results.precomputed import Precomputed
from rag_explain.retrieval import (
    Diversity,
    Encoder,
    Encoders,
    Engine,
    ExplainMode,
    HitExplainer,
    InnerHits,
    RetrievedDocument,
    Run,
    Search,
    collecting,
    readable,
    retriever_reason,
)

_OWN_SEARCH = (
    "the search of {} is not known here and told no score: that it ranks by this encoder's similarity was not checked; "
    "pass vectorstore= instead of a retriever to have its scores compared"
)
_BY_SIMILARITY = ("similarity", "similarity_score_threshold")
_Tell = Callable[[Sequence[Document]], list[RetrievedDocument]]


class ExplainingRetriever(Questions, HitRetriever):
    """The same documents in the same order, each with its explanation beside it.

        ExplainingRetriever(retriever=store.as_retriever())     # around any retriever
        ExplainingRetriever(vectorstore=store, k=4)             # keeps the store's scores

    See `langchain_rag_explain.get_explanation` for the explanation of a document.
    """

    retriever: BaseRetriever | None = None
    vectorstore: VectorStore | None = None
    explainer: Any = None
    """An Explainer, or a model or embeddings to make one from; None: the SentenceTransformer in the embeddings of the
    store, however deep in the retriever that is, with the prompts, instructions and dimensions that they use. Where
    they hold none, their own vectors of edited texts explain: nothing is sent before an explanation is looked at."""
    k: int | None = None
    """How many documents; None: what the retriever or the store returns by default."""
    search_kwargs: dict[str, Any] = Field(default_factory=dict)
    """What else the search takes, such as a filter."""
    metric: str | None = None
    """What the store's scores are, by the name of a `rag_explain.results.metric.Metric`; None: found out."""
    surrogate: str | bool | None = None
    """Why the documents were not chosen by this encoder's similarity alone; False: they were; None: found out."""
    ask_legs: bool = False
    """Whether a store that fuses in its server and tells nothing of its legs (a hybrid QdrantVectorStore) is asked for
    each of them again when the stages of a hit are looked at: two more queries, which embed the question again."""

    _hit_explainer: HitExplainer = PrivateAttr()
    _encoders: Encoders = PrivateAttr(default_factory=Encoders)
    _told: Told = PrivateAttr(default_factory=Told)
    _engine: Engine | None = PrivateAttr(default=None)  # as it was in the last search: it may have asked a server

    def __init__(self, **fields: Any) -> None:
        """Find out what the documents are scored by."""
        # Not in model_post_init: pydantic would hide what is refused there behind an error of its own.
        with in_one_sentence(type(self), fields):
            super().__init__(**fields)
        if (self.retriever is None) == (self.vectorstore is None):
            raise InvalidInput("ExplainingRetriever takes a retriever or a vectorstore, and not both")
        search = self._search()
        if search.source is None:
            self._encoders.refuse(self._encoders_inside(), self.retriever or self.vectorstore, "documents")
        self._hit_explainer = HitExplainer(**self._modes())
        self._hit_explainer.prepare(search)

    def _search(self, options: Mapping[str, Any] | None = None) -> Search:
        """What searches, embeds and scores at the moment: attributes, which people may set at any time."""
        given = embedder_of(self.explainer) if isinstance(self.explainer, Embeddings) else self.explainer
        source, embedder = self._encoders.chosen(self._encoders_inside(), given)
        store = self._store
        self._engine = engine = engine_of_store(store, self._engine)
        is_known = _is_plain(self.retriever) and tells_scores(self.retriever.vectorstore)  # type: ignore[union-attr]
        is_told = self.vectorstore is not None or (is_known and _ranks_alone(self.retriever))
        is_told = is_told or tells_chunk_scores(self.retriever)
        told = engine.metric if engine is not None and is_told else UNKNOWN
        metric = told if self.metric is None else Metric.named(self.metric)
        mode = other_search(store, {**getattr(self.retriever, "search_kwargs", {}), **(options or {})})
        return Search(
            source=source,
            embedder=embedder,
            engine=engine,
            metric=metric if mode is None and _is_by_similarity(self.retriever) else UNKNOWN,
            surrogate=retriever_reason(self.surrogate, _surrogate(self.retriever) or mode),
            name=stage_name(self.retriever or self.vectorstore),
            note=_OWN_SEARCH.format(type(store).__name__) if _is_plain(self.retriever) and not is_known else None,
            diversity=_diversity(self.retriever, options or {}),
        )

    def _read(self, options: Mapping[str, Any]) -> Search:
        return readable(
            partial(self._search, options), None if isinstance(self.explainer, Embeddings) else self.explainer
        )

    @property
    def _store(self) -> VectorStore | None:
        """What tells what is searched, where that is no retriever around others."""
        return self.vectorstore or getattr(self.retriever, "vectorstore", None)

    def _inside(self) -> list[Any]:
        return parts_inside(self.retriever or self.vectorstore, ExplainingRetriever)

    def _encoders_inside(self) -> Iterator[Encoder]:
        """Each with what explains its documents: a wrapped retriever inside knows its own."""
        found = self._inside()
        for part in found:
            if isinstance(part, VectorStore):
                yield store_encoder(part)
            else:
                search = part._search()
                yield search.source, search.embedder
        if not found:
            yield from loose_encoders(self.retriever)

    def _stores(self) -> list[VectorStore]:
        parts = ([part] if isinstance(part, VectorStore) else part._stores() for part in self._inside())
        return list({id(store): store for found in parts for store in found}.values())

    def _own_options(self, options: dict[str, Any]) -> Mapping[str, Any]:
        return {**getattr(self.retriever, "search_kwargs", {}), **self._options(options)}

    def _invoked(self, query: str, options: dict[str, Any]) -> list[Document]:
        return self.invoke(query, **options)

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
        callbacks, runs = self._callbacks(run_manager, explain)
        with collecting() as inner:
            if self.retriever is not None:
                asked, tell = _asked(self.retriever)
                documents = asked.invoke(query, config={"callbacks": callbacks}, **options)
            else:
                assert self.vectorstore is not None
                documents, tell = _scored(
                    self.vectorstore.similarity_search_with_score(query, **options), self.vectorstore
                )
        documents = documents[: options.get("k")]
        found, told = self._heard(query, documents, tell, inner, runs(), options)
        hits = self._hit_explainer.hits(query, found, explain, top=top, **told)
        return self._delivered(query, documents, hits, run_manager)

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
        callbacks, runs = self._callbacks(run_manager, explain)
        with collecting() as inner:
            if self.retriever is not None:
                asked, tell = _asked(self.retriever)
                documents = await asked.ainvoke(query, config={"callbacks": callbacks}, **options)
            else:
                assert self.vectorstore is not None
                scored = await self.vectorstore.asimilarity_search_with_score(query, **options)
                documents, tell = _scored(scored, self.vectorstore)
        documents = documents[: options.get("k")]
        found, told = self._heard(query, documents, tell, inner, runs(), options)
        hits = await self._hit_explainer.ahits(query, found, explain, top=top, **told)
        return await self._adelivered(query, documents, hits, run_manager)

    def _callbacks(self, run_manager: Any, explain: ExplainMode | None) -> tuple[Any, Callable[[], list[Run]]]:
        """What the retriever is asked with, and what tells what ran inside it, where anything may."""
        mode = self.explain if explain is None else explain
        if mode == "off" or self.retriever is None or _is_plain(self.retriever) or finds_chunks(self.retriever):
            return run_manager.get_child(), list
        return listening(run_manager)

    def _heard(
        self,
        query: str,
        documents: Sequence[Document],
        tell: _Tell,
        inner: InnerHits,
        runs: Sequence[Run],
        options: Mapping[str, Any],
    ) -> tuple[list[RetrievedDocument], dict[str, Any]]:
        """What was found, and what is known of how."""
        known, search = [_known(document, inner) for document in documents], self._read(options)
        found = _unless_known(tell(documents), documents, known)
        stages = self._told(runs, query, documents, search)
        if self.ask_legs and (self.retriever is None or _tells_scores(self.retriever)):
            asked = {**getattr(self.retriever, "search_kwargs", {}), **options}
            stages = hidden_legs(self._store, query, asked, documents, found, search)
        return found, {"search": search, "known": known, "stages": stages}

    def _options(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        options = {**self.search_kwargs, **kwargs}
        if self.k is not None:
            options.setdefault("k", self.k)
        return options

    def _get_ls_params(self, **kwargs: Any) -> LangSmithRetrieverParams:
        """What tracing calls this: the wrapped retriever's own parameters, under our name."""
        inner = self.retriever
        if inner is None:
            assert self.vectorstore is not None
            inner = self.vectorstore.as_retriever()
        params = tracing_parameters(inner, **kwargs)
        params["ls_retriever_name"] = NAME
        return params

    # ------------------------------------------------------------------ the cache

    def precompute(self, documents: Iterable[Document] | VectorStore | None = None, **options: Any) -> Precomputed:
        """Fill the explainer's store with the factors of these documents, or of all in a vector store.

        None: all in the vector stores that are searched, the chunks where those are what is found. Options and result
        are those of `Explainer.precompute`.
        """
        if documents is None:
            known = self._searched_texts()
        elif isinstance(documents, VectorStore):
            known = list(stored_documents(documents))
        else:
            given = list(documents) if isinstance(documents, Iterable) else [documents]
            if not all(isinstance(document, Document) for document in given):
                raise InvalidInput("precompute takes a list of documents, or a vector store")
            known = [(document.id, document.page_content) for document in given]
        texts, ids = [text for _, text in known], [name for name, _ in known]
        return self._hit_explainer.precompute(texts, self._search(), ids=ids, **options)

    def _searched_texts(self) -> list[tuple[str | None, str]]:
        found: list[tuple[str | None, str]] = []
        for part in (parts := self._inside()):
            found += part._searched_texts() if isinstance(part, ExplainingRetriever) else stored_documents(part)
        if not parts:
            raise InvalidInput(f"{type(self.retriever).__name__} has no vector store: pass the documents to precompute")
        return owners(self.retriever, found) if finds_chunks(self.retriever) else found


class _Telling(VectorStoreRetriever):
    """A vector store's retriever for one search, which keeps the scores that it was made to drop."""

    _tell: _Tell = PrivateAttr()

    @classmethod
    def like(cls, retriever: VectorStoreRetriever) -> _Telling:
        return cls.model_construct(**{**dict(retriever), "name": retriever.get_name()})  # traces see no difference

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        options = scored_options(self.vectorstore, self.search_kwargs | kwargs)
        return self._keep(self.vectorstore.similarity_search_with_score(query, **options))

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        options = scored_options(self.vectorstore, self.search_kwargs | kwargs)
        return self._keep(await self.vectorstore.asimilarity_search_with_score(query, **options))

    def _keep(self, scored: Sequence[tuple[Document, float]]) -> list[Document]:
        documents, self._tell = _scored(scored, self.vectorstore)
        return documents


def _asked(retriever: BaseRetriever) -> tuple[BaseRetriever, _Tell]:
    """What is asked in the retriever's place, itself or one that hears the very same search; and what it tells."""
    if _tells_scores(retriever):
        telling = _Telling.like(retriever)  # type: ignore[arg-type]
        return telling, lambda documents: telling._tell(documents)
    if finds_chunks(retriever):
        search = ChunkSearch(retriever)
        return search.retriever, search.found
    is_plain, store = _is_plain(retriever), getattr(retriever, "vectorstore", None)

    def tell(documents: Sequence[Document]) -> list[RetrievedDocument]:
        """A reranker in the retriever writes its score down."""
        return [_found(one, None if is_plain else reranked_score(one), store) for one in documents]

    return retriever, tell


def _tells_scores(retriever: BaseRetriever | None) -> bool:
    is_known = _is_plain(retriever) and _ranks_alone(retriever)
    return is_known and tells_scores(retriever.vectorstore)  # type: ignore[union-attr]


def _ranks_alone(retriever: BaseRetriever | None) -> bool:
    """Whether scores order the documents, and neither diversity nor a threshold of relevance does more."""
    return getattr(retriever, "search_type", None) == "similarity"


def _scored(found: Sequence[tuple[Document, float]], store: VectorStore) -> tuple[list[Document], _Tell]:
    """What a store returned, and what is known of its first documents."""
    retrieved = [_found(document, score, store) for document, score in found]
    return [document for document, _ in found], lambda documents: retrieved[: len(documents)]


def _found(document: Document, score: float | None, store: VectorStore | None) -> RetrievedDocument:
    return RetrievedDocument(
        id=document_id(document, store),
        text=document.page_content,
        score=None if score is None else float(score),
        metadata=document.metadata,
    )


def _known(document: Document, inner: InnerHits) -> Hit | None:
    """The hit of a wrapped retriever inside the one that was asked: the document's own, or that of an equal one."""
    own = carried(document)
    return own if own is not None and own.status != "skipped" else inner.find(keys(document))


def _unless_known(
    found: Sequence[RetrievedDocument], documents: Sequence[Document], known: Sequence[Hit | None]
) -> list[RetrievedDocument]:
    """Of a document whose hit is known already, only a score that was written down since then is new."""
    return [
        one if hit is None else replace(one, score=reranked_score(document, hit))
        for one, document, hit in zip(found, documents, known, strict=True)
    ]


def _surrogate(retriever: BaseRetriever | None) -> str | None:
    """Why the documents were not chosen by this encoder's similarity alone, or None when they were."""
    if not _is_by_similarity(retriever):
        return f"the documents were chosen by {stage_name(retriever)}, not by this encoder's similarity alone"
    kind = getattr(retriever, "search_type", "similarity")
    if kind == "mmr":
        return "the documents were chosen for their diversity too (MMR), not by this encoder's similarity alone"
    if kind not in _BY_SIMILARITY:
        return f"the documents were chosen by a search of type {kind!r}, not by this encoder's similarity alone"
    return None


def _diversity(retriever: BaseRetriever | None, options: Mapping[str, Any]) -> Diversity | None:
    """How a vector store's retriever weighs relevance against redundancy, where it does."""
    if not _is_plain(retriever) or getattr(retriever, "search_type", None) != "mmr":
        return None
    asked = {**getattr(retriever, "search_kwargs", {}), **options}
    return Diversity(float(asked.get("lambda_mult", 0.5)))


def _is_plain(retriever: BaseRetriever | None) -> bool:
    """Whether a vector store is asked as it is. A class of its own may do anything with the query and what is found."""
    return type(retriever) is VectorStoreRetriever


def _is_by_similarity(retriever: BaseRetriever | None) -> bool:
    """Whether documents are those that a vector store found, or those of the chunks that it found."""
    return retriever is None or _is_plain(retriever) or finds_chunks(retriever)
