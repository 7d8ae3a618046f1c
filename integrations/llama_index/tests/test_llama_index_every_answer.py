"""What runs on every answer: with sentences kept, an engine that explains and logs all answers reads queries only."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.llms import MockLLM
from llama_index.core.postprocessor import SimilarityPostprocessor
from llama_index.core.query_engine import BaseQueryEngine, RetrieverQueryEngine
from llama_index.core.schema import MetadataMode, TextNode
from llama_index.core.vector_stores.types import BasePydanticVectorStore
from llama_index.embeddings.huggingface import HuggingFaceEmbedding
from llama_index.retrievers.rag_explain import ExplainingRetriever, log_queries
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize

from integrations.llama_index.tests.conftest import LocalEmbedding
from rag_explain.log import ExplanationLog, Record
from tests.support.encodes import Encodes, encodes
from tests.support.models import CORPUS, tiny

# Of several sentences each, so that an explanation by sentences is not one by documents.
TEXTS = [f"{text.rstrip('.')}. {CORPUS[number - 1].rstrip('.')}." for number, text in enumerate(CORPUS)]
QUERIES = ["where did the small dog look at the moon?", "which capital is in germany", "honeybees and the sun"]
TOP = 3


@pytest.fixture
def model() -> SentenceTransformer:
    # One for each test: what is kept belongs to a model, and would be found by the next test.
    return tiny(dtype=torch.float32, after=lambda: [Normalize()])


def nodes() -> list[TextNode]:
    """Metadata are embedded with the text, and are a part of what is kept."""
    return [
        TextNode(text=text, id_=f"id-{number}", metadata={"title": "moon"} if number % 2 else {})
        for number, text in enumerate(TEXTS)
    ]


def simple() -> None:
    """LlamaIndex's own store."""


def faiss() -> BasePydanticVectorStore:
    stores = pytest.importorskip("llama_index.vector_stores.faiss")
    made: BasePydanticVectorStore = stores.FaissVectorStore(faiss_index=pytest.importorskip("faiss").IndexFlatIP(16))
    return made


def chroma() -> BasePydanticVectorStore:
    stores, client = pytest.importorskip("llama_index.vector_stores.chroma"), pytest.importorskip("chromadb")
    collection = client.EphemeralClient().create_collection(uuid4().hex)
    made: BasePydanticVectorStore = stores.ChromaVectorStore(chroma_collection=collection)
    return made


def retriever_of(embedding: BaseEmbedding, explain: Any = "eager", store: Any = None) -> ExplainingRetriever:
    context = None if store is None else StorageContext.from_defaults(vector_store=store)
    index = VectorStoreIndex(nodes(), storage_context=context, embed_model=embedding)
    return ExplainingRetriever(index.as_retriever(similarity_top_k=TOP), explain=explain)


def queried(engine: BaseQueryEngine, query: str) -> str:
    return str(engine.query(query))


def awaited(engine: BaseQueryEngine, query: str) -> str:
    return str(asyncio.run(engine.aquery(query)))  # type: ignore[arg-type]  # a coroutine


def answered(retriever: ExplainingRetriever, log: ExplanationLog, ask: Any = queried) -> tuple[Encodes, list[Record]]:
    """What all models read while every query is answered and logged, and the records."""
    keep_all = SimilarityPostprocessor(similarity_cutoff=-1.0)
    engine = RetrieverQueryEngine.from_args(retriever, llm=MockLLM(), node_postprocessors=[keep_all])
    with encodes() as seen, log_queries(log):
        answers = [ask(engine, query) for query in QUERIES]
        assert log.flush(60)  # what the log does in the background counts too
    records = list(log.records())
    assert [(one.query, one.answer) for one in records] == list(zip(QUERIES, answers, strict=True))
    assert all(query in answer for query, answer in zip(QUERIES, answers, strict=True))  # the prompt comes back
    return seen, records


def check_only_queries_were_read(seen: Encodes, model: SentenceTransformer) -> None:
    assert seen.documents == []
    assert set(seen.texts) == set(QUERIES)
    assert set(seen.passes) == {tuple(model.tokenizer(query)["input_ids"]) for query in QUERIES}
    assert len(seen.passes) <= 3 * len(QUERIES)  # the search, the explanation, and a comparison of the two


def check_explanations(records: list[Record]) -> None:
    for record in records:
        assert len(record.hits) == TOP
        for hit, logged in zip(record.hits, record.logged_hits, strict=True):
            assert logged.status == "ready"
            assert hit.explanation is not None
            assert (hit.explanation.unit, hit.explanation.provenance["path"]) == ("sentence", "memory")
            assert hit.explanation.surrogate is None
            assert hit.explanation.query == record.query
            assert len(hit.explanation.document_tokens) > 1  # sentences
            assert hit.explanation.gap == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("ask", [queried, awaited])
def test_an_engine_that_explains_and_logs_every_answer_encodes_no_document(
    model: SentenceTransformer, log: ExplanationLog, ask: Any
) -> None:
    retriever = retriever_of(LocalEmbedding(model))
    assert retriever.precompute(progress=False).built == len(TEXTS)
    seen, records = answered(retriever, log, ask)
    check_only_queries_were_read(seen, model)
    check_explanations(records)


@pytest.mark.parametrize("store", [simple, faiss, chroma])
def test_nor_do_real_stores_with_hugging_face_embeddings(
    model: SentenceTransformer, log: ExplanationLog, tmp_path: Path, store: Any
) -> None:
    model.save(str(tmp_path / "model"), create_model_card=False)
    retriever = retriever_of(HuggingFaceEmbedding(str(tmp_path / "model"), device="cpu"), store=store())
    assert retriever.precompute(nodes(), progress=False).built == len(TEXTS)
    seen, records = answered(retriever, log)
    check_only_queries_were_read(seen, model)
    check_explanations(records)


def test_nor_does_the_log_where_explanations_are_lazy(model: SentenceTransformer, log: ExplanationLog) -> None:
    retriever = retriever_of(LocalEmbedding(model), "lazy")
    assert retriever.precompute(progress=False).built == len(TEXTS)
    seen, records = answered(retriever, log)
    check_only_queries_were_read(seen, model)
    check_explanations(records)


@pytest.mark.parametrize("explain", ["eager", "lazy"])
def test_with_nothing_kept_the_same_counts_see_documents(
    model: SentenceTransformer, log: ExplanationLog, explain: str
) -> None:
    seen, records = answered(retriever_of(LocalEmbedding(model), explain), log)
    embedded = {node.node_id: node.get_content(MetadataMode.EMBED) for node in nodes()}
    returned = {embedded[hit.id] for record in records for hit in record.hits}
    assert set(seen.documents) >= returned  # beside the probes, which every new Explainer reads
    assert set(seen.texts) >= returned | set(QUERIES)
    assert set(seen.passes) >= {tuple(model.tokenizer(text)["input_ids"]) for text in returned}
