"""What stands before a component in its pipeline: what found the documents, what came after that, what embedded."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, get_args

from haystack import Document, Pipeline
from haystack.components.retrievers import TextEmbeddingRetriever
from haystack.core.component import Component
from haystack.document_stores.in_memory import InMemoryDocumentStore
from haystack_integrations.components.explainers.rag_explain._internals import input_names, owning_pipeline

from rag_explain.results.metric import UNKNOWN, Metric
from rag_explain.retrieval import Embedder, Engine, engine_of
from rag_explain.types import Passage

_BY_VECTOR = "query_embedding"  # what a retriever calls the input that it searches by
_ALONE = "not by this encoder's similarity alone"
_IN_MEMORY = {"cosine": Metric("cosine"), "dot_product": Metric("inner product")}
# What `scale_score` makes of a similarity, in every store of Haystack that has it.
_SCALED = {"cosine": Metric("(1 + cosine) / 2"), "inner product": Metric("sigmoid(inner product / 100)")}


@dataclass(frozen=True)
class Upstream:
    """What made the documents that a component is given: components, as far as the pipeline shows them."""

    finders: list[Any] = field(default_factory=list)  # retrievers, or what else documents come from
    after: list[Any] = field(default_factory=list)  # joiners, rankers and filters; the nearest comes first
    recent: list[Any] = field(default_factory=list)  # those of them that come after another component of this kind
    embedders: list[Any] = field(default_factory=list)  # what gives the finders the query's vector

    @classmethod
    def of(cls, component: Component) -> Upstream:
        """Read from the pipeline as it is connected now."""
        pipeline = owning_pipeline(component)
        if pipeline is None:
            return cls()
        names, finders, embedders = [pipeline.get_component_name(component)], {}, dict[int, Any]()
        for name in names:  # which grows on the way
            senders = [sender for sender, type_, _ in _senders(pipeline, name) if Document in get_args(type_)]
            if not senders and name != names[0]:
                finder = finders[name] = pipeline.get_component(name)
                given = [pipeline.get_component(one) for one, _, to in _senders(pipeline, name) if to == _BY_VECTOR]
                found = [*given, *(getattr(finder, name, None) for name in ("text_embedder", "query_embedder"))]
                embedders.update({id(one): one for one in found if one is not None})
            names += [sender for sender in dict.fromkeys(senders) if sender not in names]
        passed = [pipeline.get_component(name) for name in names[1:] if name not in finders]
        after = [one for one in passed if not isinstance(one, type(component))]
        recent = list(takewhile(lambda one: not isinstance(one, type(component)), passed))
        return cls(list(finders.values()), after, recent, list(embedders.values()))

    @property
    def retriever(self) -> Any:
        """What searched, where that was one retriever by the query's vector alone; None: something else did."""
        inner = [one.retriever if isinstance(one, TextEmbeddingRetriever) else one for one in self.finders]
        asked_by = {name for one in inner for name in input_names(one) if "query" in name}
        return inner[0] if len(inner) == 1 and asked_by == {_BY_VECTOR} else None

    @property
    def store(self) -> Any:
        """The document store that was searched."""
        return getattr(self.retriever, "document_store", None)

    @property
    def embedder(self) -> Any:
        """What embedded the query, where that was one component."""
        return self.embedders[0] if len(self.embedders) == 1 else None

    @property
    def name(self) -> str:
        """What found the documents, with what came after."""
        return (names_of(self.finders) or "the retriever") + (" with " if self.after else "") + names_of(self.after)

    def reason(self) -> str | None:
        """Why the documents were not chosen by one encoder's similarity alone, as far as that can be seen."""
        others = [*([] if self.retriever else self.finders), *self.after]
        return f"the documents were chosen by {names_of(others)}, {_ALONE}" if others else None


def names_of(components: Iterable[object]) -> str:
    """Their classes."""
    return " and ".join(dict.fromkeys(type(one).__name__ for one in components))


def _senders(pipeline: Pipeline, name: str) -> Iterator[tuple[str, Any, str]]:
    """Which components a component is connected to, by name, what they send, and to which of its inputs."""
    for sender, _, edge in pipeline.graph.in_edges(name, data=True):
        yield sender, edge["from_socket"].type, edge["to_socket"].name


def engine_of_documents(store: object) -> Engine | None:
    """What a document store searches with, where that is known."""
    return None if store is None or isinstance(store, InMemoryDocumentStore) else engine_of(store)


def score_metric(upstream: Upstream, engine: Engine | None, scale_score: bool | None) -> Metric:
    """What the documents' scores are; `scale_score` is what the retriever was told when it was run."""
    if upstream.after or upstream.retriever is None:
        return UNKNOWN
    told = getattr(upstream.store, "embedding_similarity_function", None)
    metric = _IN_MEMORY.get(str(told), UNKNOWN) if engine is None else engine.metric
    is_scaled = getattr(upstream.retriever, "scale_score", False) if scale_score is None else scale_score
    return _SCALED.get(metric.base, UNKNOWN) if is_scaled else metric


def kept_vector(document: Document, store: object) -> list[float] | None:
    """The vector that a document carries, or that the store in memory keeps for it."""
    if document.embedding is not None or not isinstance(store, InMemoryDocumentStore):
        return document.embedding
    kept = store.storage.get(document.id)
    return None if kept is None else kept.embedding


def embedded(document: Document, embedder: object | None) -> Passage | None:
    """The string that was embedded, but for the prefix, and where in it the document's content stands."""
    if document.content is None:
        return None
    keys: list[str] = getattr(embedder, "meta_fields_to_embed", None) or []
    values = [str(document.meta[key]) for key in keys if document.meta.get(key) is not None]
    header = getattr(embedder, "embedding_separator", "\n").join([*values, ""])
    suffix = getattr(embedder, "suffix", "")
    return Passage(header + document.content + suffix, len(header), len(header) + len(document.content))


class Embedders:
    """What embeds queries and what embeds documents, as one thing that holds the model of both."""

    def __init__(self, query: Any, document: Any) -> None:
        self.query, self.document = query, document

    @property
    def model(self) -> str:
        """What the components say of their model."""
        return f"{type(self.query).__name__} {getattr(self.query, 'model', '')}".strip()

    @property
    def dimensions(self) -> Any:
        """How many they ask it for."""
        return getattr(self.query, "dimensions", None)

    def encode_query(self, texts: list[str]) -> list[Any]:
        """(D, e), one after another: a text embedder takes one."""
        return [_query(self, text) for text in texts]

    def encode_document(self, texts: list[str]) -> list[Any]:
        """(D, e), together where there is a document embedder."""
        return [_document(self, text) for text in texts] if self.document is None else _documents(self, texts)


class PairedEmbedder(Embedder):
    """Both embedding components, as they are asked for vectors of strings that have their suffix already."""

    @classmethod
    def of(cls, query: object, document: object | None) -> PairedEmbedder:
        """Without the document's, documents are taken to be embedded as queries are, but for the prefix."""
        return cls(Embedders(query, document), {"query": _query, "document": _document})

    def is_of(self, query: object, document: object | None) -> bool:
        """Whether it is made of these components."""
        holder: Any = self.holder
        return holder.query is query and holder.document is document

    @property
    def name(self) -> str:
        holder: Any = self.holder
        return type(holder.query).__name__


def _query(embedders: Embedders, text: str) -> Any:
    return _with(embedders.query, suffix="").run(text=text)["embedding"]


def _document(embedders: Embedders, text: str) -> Any:
    if embedders.document is None:
        return _with(embedders.query, prefix="", suffix="").run(text=text)["embedding"]
    return _documents(embedders, [text])[0]


def _documents(embedders: Embedders, texts: list[str]) -> list[Any]:
    embedder = _with(embedders.document, meta_fields_to_embed=[], suffix="")
    return [one.embedding for one in embedder.run(documents=[Document(content=text) for text in texts])["documents"]]


def _with(component: Any, **settings: Any) -> Any:
    """A copy with these settings, where it has them; and without a progress bar, for one text."""
    copied = copy.copy(component)
    vars(copied).update({name: value for name, value in settings.items() if name in vars(copied)})
    if "progress_bar" in vars(copied):
        copied.progress_bar = False
    return copied
