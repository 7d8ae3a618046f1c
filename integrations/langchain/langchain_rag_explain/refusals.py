"""What a retriever is made with and cannot be: one sentence, in place of pydantic's report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import VectorStore
from pydantic import BaseModel, ValidationError

from rag_explain.errors import InvalidInput
from rag_explain.retrieval import check_source

_EXPECTED = {
    "retriever": "a LangChain retriever",
    "vectorstore": "a LangChain vector store",
    "top": "a whole number",
    "k": "a whole number",
    "time_limit": "a number of seconds",
    "max_calls": "a number of texts, or None",
    "search_kwargs": "a dictionary",
    "metric": "the name of a metric",
    "surrogate": "a sentence, False or None",
    "metadata_key": "a string",
    "normalize": "True or False",
    "index": "a FAISS index of float vectors",
    "documents": "a list of Documents, or a mapping from rows to them",
    "embeddings": "LangChain Embeddings, a SentenceTransformer or an Explainer",
}


@contextmanager
def in_one_sentence(kind: type[BaseModel], fields: Mapping[str, Any]) -> Iterator[None]:
    """Refuses names that are no fields, which pydantic would pass over, and values that are of no use."""
    unknown = [name for name in fields if name not in kind.model_fields]
    if unknown:
        known = (name for name in kind.model_fields if name not in BaseRetriever.model_fields)
        shown = ", ".join(sorted(known, key=lambda name: name not in kind.__annotations__))  # its own fields first
        raise InvalidInput(f"{kind.__name__} has no field {unknown[0]!r}: use {shown}")
    explainer, k = fields.get("explainer"), fields.get("k")
    if explainer is not None and not isinstance(explainer, Embeddings):
        check_source(explainer)
    try:
        yield
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        expected = _EXPECTED.get(name, f"of another kind ({error.errors()[0]['msg']})")
        raise InvalidInput(f"{name} must be {expected}, not {_shown(fields.get(name))}") from None
    if isinstance(k, int) and k < 0:
        raise InvalidInput(f"k must be a number of documents, not {k}")


def _shown(value: object) -> str:
    """Plain values as they are; objects by their class, with where they belong if that is known."""
    if isinstance(value, (str, int, float, type(None))):
        return repr(value)
    name = type(value).__name__
    if isinstance(value, VectorStore):
        return f"{name}: pass it as vectorstore="
    return f"{name}: pass it as retriever=" if isinstance(value, BaseRetriever) else name
