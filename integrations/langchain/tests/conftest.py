from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import InMemoryVectorStore
from sentence_transformers import SentenceTransformer

from rag_explain.log import ExplanationLog
from tests.support.models import CORPUS, tiny
from tests.support.postgres import stopped_postgres as stopped_postgres

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("LANGSMITH_TRACING", "false")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """LangChain's standard tests are in part coroutines."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


class LocalEmbeddings(Embeddings):
    """What HuggingFaceEmbeddings is at heart: a SentenceTransformer in an attribute."""

    def __init__(self, model: SentenceTransformer) -> None:
        self.client = model

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return self.client.encode_document(texts).tolist()  # type: ignore[no-any-return]

    def embed_query(self, text: str) -> list[float]:
        return self.client.encode_query(text).tolist()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def store() -> InMemoryVectorStore:
    store = InMemoryVectorStore(LocalEmbeddings(tiny("bert")))
    store.add_texts(CORPUS, ids=[f"doc-{number}" for number in range(len(CORPUS))])
    return store


@pytest.fixture
def log(tmp_path: Path) -> Iterator[ExplanationLog]:
    with ExplanationLog(tmp_path / "log") as log:
        yield log
