"""The private names of LangChain that are used: each is still there, and means what it is used for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_rag_explain._internals import docstore_documents, open_table, tracing_parameters

from integrations.langchain.tests.test_langchain_retrievers import LocalEmbeddings, model, store


def test_get_ls_params() -> None:
    parameters = tracing_parameters(store().as_retriever())
    assert parameters["ls_retriever_name"] == "vectorstore"
    assert parameters["ls_vector_store_provider"] == InMemoryVectorStore.__name__


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_dict_of_the_docstore() -> None:
    stores = pytest.importorskip("langchain_community.vectorstores")
    made: Any = stores.FAISS.from_documents([Document("the cat", id="a")], LocalEmbeddings(model()), ids=["a"])
    documents = docstore_documents(made)
    assert documents is not None
    assert {key: document.page_content for key, document in documents.items()} == {"a": "the cat"}
    assert docstore_documents(store()) is None


def test_get_or_create_table(tmp_path: Path) -> None:
    lancedb = pytest.importorskip("langchain_lancedb")
    embeddings = LocalEmbeddings(model())
    lancedb.LanceDB.from_texts(["the cat"], embeddings, uri=tmp_path)
    made = lancedb.LanceDB(embeddings, uri=tmp_path)
    open_table(made)
    assert made._table.count_rows() == 1
    open_table(store())  # which has none
