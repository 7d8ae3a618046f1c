from __future__ import annotations

import os
import tempfile
from functools import cache
from typing import Any

import torch
from haystack import Document, Pipeline
from haystack.components.retrievers.in_memory import InMemoryEmbeddingRetriever
from haystack.document_stores.in_memory import InMemoryDocumentStore
from haystack_integrations.components.embedders.sentence_transformers import (
    SentenceTransformersDocumentEmbedder,
    SentenceTransformersTextEmbedder,
)
from haystack_integrations.components.explainers.rag_explain import DocumentExplainer
from sentence_transformers.sentence_transformer.modules import Normalize

from tests.support.models import CORPUS, tiny

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HAYSTACK_TELEMETRY_ENABLED", "False")

QUERY = "why did the dog look at the moon?"


@cache
def saved(*, normalize: bool = True, architecture: str = "bert") -> str:
    """Where a model is kept, for embedders that load it by name."""
    folder = tempfile.mkdtemp(prefix="tiny-")
    modules = [Normalize()] if normalize else []
    tiny(architecture, after=lambda: modules, dtype=torch.float32).save(folder, create_model_card=False)
    return folder


def text_embedder(model: str | None = None, **settings: Any) -> SentenceTransformersTextEmbedder:
    return SentenceTransformersTextEmbedder(model=model or saved(), progress_bar=False, **settings)


def document_embedder(model: str | None = None, **settings: Any) -> SentenceTransformersDocumentEmbedder:
    return SentenceTransformersDocumentEmbedder(model=model or saved(), progress_bar=False, **settings)


def documents() -> list[Document]:
    return [Document(content=text, meta={"title": f"number {n}"}) for n, text in enumerate(CORPUS)]


def filled(
    embedder: SentenceTransformersDocumentEmbedder | None = None, similarity: Any = "cosine"
) -> InMemoryDocumentStore:
    """A store with a few documents."""
    store = InMemoryDocumentStore(embedding_similarity_function=similarity)
    store.write_documents((embedder or document_embedder()).run(documents())["documents"])
    return store


def retrieval(
    explainer: DocumentExplainer | None,
    store: InMemoryDocumentStore,
    embedder: SentenceTransformersTextEmbedder | None = None,
    **settings: Any,
) -> Pipeline:
    """What finds documents by their embeddings, with or without an explainer behind it."""
    pipeline = Pipeline()
    pipeline.add_component("embedder", embedder or text_embedder())
    pipeline.add_component("retriever", InMemoryEmbeddingRetriever(store, top_k=4, **settings))
    pipeline.connect("embedder.embedding", "retriever.query_embedding")
    if explainer is not None:
        pipeline.add_component("explainer", explainer)
        pipeline.connect("retriever.documents", "explainer.documents")
    return pipeline


def asked(pipeline: Pipeline, query: str = QUERY, **more: Any) -> Any:
    """The explainer's output."""
    data = {"embedder": {"text": query}, "explainer": {"query": query}, **more}
    return pipeline.run(data, include_outputs_from={"explainer"})["explainer"]
