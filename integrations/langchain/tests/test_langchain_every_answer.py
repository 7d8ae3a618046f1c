"""What runs on every answer: with sentences kept, a chain that explains and logs all answers reads queries only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langchain_rag_explain import ExplainingRetriever, ExplanationLogHandler
from langchain_rag_explain.faiss import FaissDocumentRetriever
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize

from integrations.langchain.tests.conftest import LocalEmbeddings
from rag_explain.log import ExplanationLog, Record
from tests.support.encodes import Encodes, encodes
from tests.support.models import CORPUS, tiny

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

# Of several sentences each, so that an explanation by sentences is not one by documents.
TEXTS = [f"{text.rstrip('.')}. {CORPUS[number - 1].rstrip('.')}." for number, text in enumerate(CORPUS)]
IDS = [f"doc-{number}" for number in range(len(TEXTS))]
QUERIES = ["where did the small dog look at the moon?", "which capital is in germany", "honeybees and the sun"]
TOP = 3


@pytest.fixture
def model() -> SentenceTransformer:
    # One for each test: what is kept belongs to a model, and would be found by the next test.
    return tiny(dtype=torch.float32, after=lambda: [Normalize()])


def hugging_face(model: SentenceTransformer, folder: Path) -> Embeddings:
    module = pytest.importorskip("langchain_huggingface")
    model.save(str(folder), create_model_card=False)
    made: Embeddings = module.HuggingFaceEmbeddings(model_name=str(folder), model_kwargs={"device": "cpu"})
    return made


def chroma(embeddings: Embeddings) -> VectorStore:
    made: VectorStore = pytest.importorskip("langchain_chroma").Chroma(uuid4().hex, embeddings)
    made.add_texts(TEXTS, ids=IDS)
    return made


def in_memory(embeddings: Embeddings) -> VectorStore:
    made = InMemoryVectorStore(embeddings)
    made.add_texts(TEXTS, ids=IDS)
    return made


def around(store: VectorStore, explain: str = "eager") -> ExplainingRetriever:
    return ExplainingRetriever(retriever=store.as_retriever(search_kwargs={"k": TOP}), explain=explain)


def with_scores(store: VectorStore, explain: str = "eager") -> ExplainingRetriever:
    return ExplainingRetriever(vectorstore=store, k=TOP, explain=explain)


def chain_of(retriever: Runnable[Any, Any]) -> Runnable[Any, Any]:
    prompt = ChatPromptTemplate.from_template("{context} Question: {question}")
    llm = FakeListChatModel(responses=["That is so."])
    return {"context": retriever | joined, "question": RunnablePassthrough()} | prompt | llm | StrOutputParser()


def joined(documents: list[Document]) -> str:
    return "\n".join(document.page_content for document in documents)


def invoked(chain: Runnable[Any, Any], query: str, config: Any) -> str:
    return str(chain.invoke(query, config))


def awaited(chain: Runnable[Any, Any], query: str, config: Any) -> str:
    return str(asyncio.run(chain.ainvoke(query, config)))


def streamed(chain: Runnable[Any, Any], query: str, config: Any) -> str:
    return "".join(chain.stream(query, config))


def answered(
    retriever: Runnable[Any, Any], log: ExplanationLog, ask: Callable[..., str] = invoked
) -> tuple[Encodes, list[Record]]:
    """What all models read while every query is answered and logged, and the records."""
    chain, config = chain_of(retriever), {"callbacks": [ExplanationLogHandler(log)]}
    with encodes() as seen:
        answers = [ask(chain, query, config) for query in QUERIES]
        assert log.flush(60)  # what the log does in the background counts too
    records = list(log.records())
    assert [(one.query, one.answer) for one in records] == list(zip(QUERIES, answers, strict=True))
    assert set(answers) == {"That is so."}
    return seen, records


def check_only_queries_were_read(seen: Encodes, model: SentenceTransformer) -> None:
    assert seen.documents == []
    assert set(seen.texts) == set(QUERIES)
    assert set(seen.passes) == {tuple(model.tokenizer(query)["input_ids"]) for query in QUERIES}
    assert len(seen.passes) <= 3 * len(QUERIES)  # the search, the explanation, and a comparison of the two


def check_explanations(records: list[Record], path: str = "memory") -> None:
    for record in records:
        assert len(record.hits) == TOP
        for hit, logged in zip(record.hits, record.logged_hits, strict=True):
            assert logged.status == "ready"
            assert hit.explanation is not None
            assert (hit.explanation.unit, hit.explanation.provenance["path"]) == ("sentence", path)
            assert hit.explanation.surrogate is None
            assert hit.explanation.query == record.query
            assert len(hit.explanation.document_tokens) > 1  # sentences
            assert hit.explanation.gap == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("ask", [invoked, awaited, streamed])
@pytest.mark.parametrize("wrap", [around, with_scores])
def test_a_chain_that_explains_and_logs_every_answer_encodes_no_document(
    model: SentenceTransformer, log: ExplanationLog, wrap: Any, ask: Any
) -> None:
    retriever = wrap(in_memory(LocalEmbeddings(model)))
    assert retriever.precompute(progress=False).built == len(TEXTS)
    seen, records = answered(retriever, log, ask)
    check_only_queries_were_read(seen, model)
    check_explanations(records)


@pytest.mark.parametrize("wrap", [around, with_scores])
@pytest.mark.parametrize("store_of", [in_memory, chroma])
def test_nor_do_real_stores_with_hugging_face_embeddings(
    model: SentenceTransformer, log: ExplanationLog, tmp_path: Path, store_of: Any, wrap: Any
) -> None:
    retriever = wrap(store_of(hugging_face(model, tmp_path / "model")))
    assert retriever.precompute(progress=False).built == len(TEXTS)
    seen, records = answered(retriever, log)
    check_only_queries_were_read(seen, model)
    check_explanations(records)


@pytest.mark.parametrize("explain", ["eager", "lazy"])
def test_nor_does_a_faiss_index_with_hugging_face_embeddings(
    model: SentenceTransformer, log: ExplanationLog, tmp_path: Path, explain: str
) -> None:
    documents = [Document(text, id=name) for name, text in zip(IDS, TEXTS, strict=True)]
    embeddings = hugging_face(model, tmp_path / "model")
    retriever = FaissDocumentRetriever.from_documents(documents, embeddings, k=TOP, explain=explain)
    assert retriever.precompute(progress=False).built == len(TEXTS)
    seen, records = answered(retriever, log)
    check_only_queries_were_read(seen, model)
    check_explanations(records)


def test_nor_does_the_log_where_explanations_are_lazy(model: SentenceTransformer, log: ExplanationLog) -> None:
    retriever = around(in_memory(LocalEmbeddings(model)), "lazy")
    assert retriever.precompute(progress=False).built == len(TEXTS)
    seen, records = answered(retriever, log)
    check_only_queries_were_read(seen, model)
    check_explanations(records)


@pytest.mark.parametrize("explain", ["eager", "lazy"])
def test_with_nothing_kept_the_same_counts_see_documents(
    model: SentenceTransformer, log: ExplanationLog, explain: str
) -> None:
    seen, records = answered(around(in_memory(LocalEmbeddings(model)), explain), log)
    returned = {hit.text for record in records for hit in record.hits}
    assert set(seen.documents) >= returned  # beside the probes, which every new Explainer reads
    assert set(seen.texts) >= returned | set(QUERIES)
    assert set(seen.passes) >= {tuple(model.tokenizer(text)["input_ids"]) for text in returned}
