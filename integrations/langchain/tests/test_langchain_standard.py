"""LangChain's own standard tests of a retriever."""

from __future__ import annotations

from typing import Any

import pytest

standard = pytest.importorskip("langchain_tests.integration_tests")

from langchain_core.retrievers import BaseRetriever  # noqa: E402
from langchain_rag_explain import ExplainingRetriever  # noqa: E402
from langchain_rag_explain.faiss import FaissDocumentRetriever  # noqa: E402

from integrations.langchain.tests.test_langchain_retrievers import QUERY, TEXTS, model, store  # noqa: E402


class TestAroundARetriever(standard.RetrieversIntegrationTests):  # type: ignore[misc,name-defined]
    @property
    def retriever_constructor(self) -> type[BaseRetriever]:
        return ExplainingRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"retriever": store().as_retriever()}

    @property
    def retriever_query_example(self) -> str:
        return QUERY


class TestAroundAVectorStore(TestAroundARetriever):
    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"vectorstore": store(), "explain": "eager"}


class TestOverAFaissIndex(TestAroundARetriever):
    @property
    def retriever_constructor(self) -> type[BaseRetriever]:
        return FaissDocumentRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        built = FaissDocumentRetriever.from_documents(TEXTS, model())
        return {"index": built.index, "documents": built.documents, "embeddings": model()}
