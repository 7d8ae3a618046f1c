"""The private names of Haystack that are used: each is still there, and means what it is used for."""

from __future__ import annotations

from haystack import Pipeline
from haystack.components.retrievers.in_memory import InMemoryBM25Retriever
from haystack.document_stores.in_memory import InMemoryDocumentStore
from haystack_integrations.components.explainers.rag_explain._internals import input_names, owning_pipeline


def test_the_pipeline_of_a_component() -> None:
    retriever, pipeline = InMemoryBM25Retriever(InMemoryDocumentStore()), Pipeline()
    assert owning_pipeline(retriever) is None
    pipeline.add_component("retriever", retriever)
    assert owning_pipeline(retriever) is pipeline
    pipeline.remove_component("retriever")
    assert owning_pipeline(retriever) is None


def test_the_inputs_of_a_component() -> None:
    assert input_names(InMemoryBM25Retriever(InMemoryDocumentStore())) >= {"query", "top_k"}
    assert input_names("a name") == set()
    assert input_names(None) == set()
