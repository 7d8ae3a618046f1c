"""FaissDocumentRetriever: LangChain's documents out of a FAISS index, each with the reason why it was found.

retriever = FaissDocumentRetriever.from_documents(documents, HuggingFaceEmbeddings(model_name=...))
retriever = FaissDocumentRetriever(index=index, documents=documents, embeddings=...)  # an index that is there already
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Self, TypeAlias, TypeVar

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import LangSmithRetrieverParams
from pydantic import Field, PrivateAttr

from langchain_rag_explain.hits import NAME, HitRetriever
from langchain_rag_explain.refusals import in_one_sentence
from langchain_rag_explain.stores import embedder_of
from rag_explain import Explainer
from rag_explain.errors import InvalidInput
from rag_explain.faiss import FaissRetriever
from rag_explain.results.calibration import Calibration
from rag_explain.results.hits import Hits
from rag_explain.results.precomputed import Precomputed
from rag_explain.results.what_if import WhatIf
from rag_explain.results.why_not import WhyNot
from rag_explain.retrieval import Embedder, ExplainMode, held_model
from rag_explain.texts.passage import Passage

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

logger = logging.getLogger("langchain_rag_explain")

T = TypeVar("T", covariant=True)
_Given: TypeAlias = "Sequence[Document | str] | Mapping[int, Document | str]"


class FaissDocumentRetriever(HitRetriever):
    """The documents whose vectors a FAISS index finds nearest, in its order, each with its explanation beside it.

    Index and documents are only read, at each search: what is added to both is found.
    """

    index: Any = Field(repr=False)
    """Any FAISS index of float vectors: Flat, HNSW, IVF, PQ, inside an IDMap or not; inner product or L2."""
    documents: Any = Field(repr=False)
    """The `Document`, or the text, of each row (or of each id of an IDMap): a sequence or a mapping."""
    embeddings: Any
    """What embedded the documents, and embeds the queries: LangChain's Embeddings, a SentenceTransformer or an
    Explainer."""
    explainer: Any = None
    """An Explainer, for embeddings whose model is elsewhere; None: the model inside `embeddings`, with the prompts,
    instructions and dimensions that they use."""
    k: int = 4
    """How many documents; also `invoke(query, k=...)`. Fewer where the index has or finds fewer."""
    normalize: bool = False
    """Scale the query's vector to length one, for an index of vectors that were scaled."""

    _made: tuple[list[object], FaissRetriever] | None = PrivateAttr(default=None)

    def __init__(self, **fields: Any) -> None:
        """Look whether an index, its documents and what embeds them were given."""
        # Not in model_post_init: pydantic would hide what is refused there behind an error of its own.
        with in_one_sentence(type(self), fields):
            super().__init__(**fields)
        self._faiss()

    @classmethod
    def from_documents(cls, documents: Iterable[Document | str], embeddings: Any, **fields: Any) -> Self:
        """Embed the documents, and search them exactly by the similarity that the model was made for."""
        kept = documents if isinstance(documents, str) else list(documents)
        texts = list(_texts(kept).values())
        if not texts:
            raise InvalidInput("from_documents takes a list of at least one document")
        built = FaissRetriever.from_vectors(_vectors(embeddings, texts), texts, _encoder(embeddings))
        return cls(index=built.index, documents=kept, embeddings=embeddings, normalize=built.normalize, **fields)

    @classmethod
    def load(cls, folder: str | Path, embeddings: Any, **fields: Any) -> Self:
        """What `save` wrote, with the embeddings that it was built with; or `rag-explain index`, with an Explainer."""
        searched = FaissRetriever.load(folder, _encoder(embeddings))
        documents = {}
        for row, kept in searched.rows().items():
            if isinstance(kept.text, Passage):
                raise InvalidInput(f"the index in {folder} holds passages of texts: search it with FaissRetriever")
            if kept.text is not None:
                documents[row] = Document(kept.text, id=kept.id, metadata=dict(kept.metadata))
        given = {"index": searched.index, "documents": documents, "normalize": searched.normalize}
        return cls(embeddings=embeddings, **given, **fields)

    def save(self, folder: str | Path, *, model: str | None = None) -> None:
        """Write the index, the documents as JSON lines, and which model they belong to. Nothing is pickled."""
        self._faiss().save(folder, model=model)

    def precompute(self, **options: Any) -> Precomputed:
        """Fill the explainer's store with the factors of all documents; options of `Explainer.precompute`."""
        return self._faiss().precompute(**options)

    # ------------------------------------------------------------------ questions about a result

    def why_not(self, query: str, id: str, *, k: int | None = None, **options: Any) -> WhyNot:
        """Why this document was not returned; see `rag_explain.faiss.FaissRetriever.why_not`."""
        return self._faiss().why_not(query, id, k=self.k if k is None else k, **options)

    def what_if(self, query: str, id: str, **options: Any) -> WhatIf:
        """Its score and rank with other texts; see `rag_explain.faiss.FaissRetriever.what_if`."""
        return self._faiss().what_if(query, id, **options)

    def calibrate(self, queries: Sequence[str] | None = None) -> Calibration:
        """What unrelated texts score here; see `rag_explain.faiss.FaissRetriever.calibrate`."""
        return self._faiss().calibrate(queries)

    # ------------------------------------------------------------------ retrieval

    def _get_relevant_documents(
        self,
        query: str,
        *,
        run_manager: CallbackManagerForRetrieverRun,
        k: int | None = None,
        explain: ExplainMode | None = None,
        top: int | None = None,
    ) -> list[Document]:
        found, hits = self._found(query, k, explain, top)
        return self._delivered(query, found, hits, run_manager)

    async def _aget_relevant_documents(
        self,
        query: str,
        *,
        run_manager: AsyncCallbackManagerForRetrieverRun,
        k: int | None = None,
        explain: ExplainMode | None = None,
        top: int | None = None,
    ) -> list[Document]:
        found, hits = await asyncio.to_thread(self._found, query, k, explain, top)
        return await self._adelivered(query, found, hits, run_manager)

    def _found(
        self, query: str, k: int | None, explain: ExplainMode | None, top: int | None
    ) -> tuple[list[Document], Hits]:
        rows, hits = self._faiss().search_rows(query, self.k if k is None else k, explain, top=top)
        kept = _Rows(self.documents, lambda document: document)
        found = [(kept[row], hit) for row, hit in zip(rows, hits, strict=True) if row in kept]
        if len(found) < len(rows):
            logger.warning("%d of the rows that were found have no document, and are left out", len(rows) - len(found))
        return [document for document, _ in found], Hits(hit for _, hit in found)

    def _faiss(self) -> FaissRetriever:
        """What searches: made anew where one of the fields is another since."""
        given = [self.index, self.documents, self.embeddings, self.explainer, self.normalize, *self._modes().values()]
        made = self._made
        if made is None or any(one is not other for one, other in zip(made[0], given, strict=True)):
            made = self._made = given, self._searcher()
        return made[1]

    def _searcher(self) -> FaissRetriever:
        embeds = _encoder(self.embeddings)
        if not isinstance(self.explainer, Explainer | None):
            raise InvalidInput(f"explainer must be Explainer(model), not {type(self.explainer).__name__}")
        if isinstance(embeds, Explainer) and self.explainer is not None:
            raise InvalidInput("an Explainer as embeddings explains too: leave explainer= out")
        searcher = FaissRetriever(
            self.index,
            _texts(self.documents),
            self.explainer or embeds,
            ids=_Rows(self.documents, lambda document: document.id).__getitem__,
            metadata=_Rows(self.documents, lambda document: document.metadata).__getitem__,
            normalize=self.normalize,
            embedder=embeds if isinstance(embeds, Embedder) else None,
            **self._modes(),
        )
        if not isinstance(self.documents, Mapping) and len(self.documents) < len(searcher):
            raise InvalidInput(
                f"the index has {len(searcher)} vectors and only {len(self.documents)} documents were given: give one "
                "for each row, in the order in which they were added"
            )
        return searcher

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        copied = super().__deepcopy__(memo)
        copied._made = None  # it searches the original's index
        return copied

    def __reduce__(self) -> NoReturn:
        raise InvalidInput(
            f"{type(self).__name__} cannot be pickled: use save(folder), and load(folder, embeddings) where it is "
            "needed"
        )

    def _get_ls_params(self, **kwargs: Any) -> LangSmithRetrieverParams:
        """What tracing calls this, in the words of LangChain's own stores."""
        provider = type(self.embeddings).__name__
        return LangSmithRetrieverParams(
            ls_retriever_name=NAME, ls_vector_store_provider="FAISS", ls_embedding_provider=provider
        )


class _Rows(Mapping[int, T], Generic[T]):
    """Something of each document, by row; read when it is asked for, since documents may be added."""

    def __init__(self, documents: _Given, read: Callable[[Document], T]) -> None:
        self._documents, self._read = documents, read

    def __getitem__(self, row: int) -> T:
        if row not in self:
            raise KeyError(row)
        kept = self._documents[row]
        if isinstance(kept, str):
            kept = Document(kept)
        if not isinstance(kept, Document):
            raise InvalidInput(f"documents[{row}] must be a Document or a text, not {type(kept).__name__}")
        return self._read(kept)

    def __contains__(self, row: object) -> bool:
        if isinstance(self._documents, Mapping):
            return row in self._documents
        return isinstance(row, int) and 0 <= row < len(self._documents)  # Python would count from the end

    def __iter__(self) -> Iterator[int]:
        return iter(self._documents if isinstance(self._documents, Mapping) else range(len(self._documents)))

    def __len__(self) -> int:
        return len(self._documents)


def _texts(documents: Any) -> _Rows[str]:
    if isinstance(documents, str) or not isinstance(documents, Sequence | Mapping):
        kind = type(documents).__name__
        raise InvalidInput(f"documents must be a list of Documents, or a mapping from rows to them, not {kind}")
    return _Rows(documents, lambda document: document.page_content)


def _encoder(embeddings: Any) -> Explainer | Embedder:
    """What was given as embeddings, as what a FaissRetriever takes."""
    if isinstance(embeddings, Explainer):
        return embeddings
    if isinstance(embeddings, Embeddings) and (embedder := embedder_of(embeddings)) is not None:
        return embedder
    if embeddings is not None and held_model(embeddings) is embeddings:
        return Embedder(embeddings, {"query": _query, "document": _document})
    raise InvalidInput(
        "embeddings must be LangChain Embeddings, a SentenceTransformer or an Explainer, not "
        f"{type(embeddings).__name__}"
    )


def _query(model: SentenceTransformer, text: str) -> Any:
    return model.encode_query(text)


def _document(model: SentenceTransformer, text: str) -> Any:
    return model.encode_document(text)


def _vectors(embeddings: Any, texts: list[str]) -> Any:
    """(D, e): the vectors of the documents, each embedded as `_encoder` embeds."""
    if isinstance(embeddings, Explainer):
        return embeddings.scorer.embed(texts, "document")
    return (
        embeddings.embed_documents(texts) if isinstance(embeddings, Embeddings) else embeddings.encode_document(texts)
    )
