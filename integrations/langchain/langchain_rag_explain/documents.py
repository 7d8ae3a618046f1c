"""A Document with an explanation beside it: for prompts, equality and JSON it is the plain document."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from numbers import Real
from typing import Any

from langchain_core.documents import Document
from pydantic import PrivateAttr

from rag_explain import Explanation, Hit
from rag_explain.errors import FormatError
from rag_explain.retrieval import UNNAMED, same_score, scored

_RERANKED = "relevance_score"  # where LangChain's rerankers write their score: in a document's metadata


class ExplanationData(dict[str, Any]):
    """An explanation as plain data for a document's metadata: serialises in full, prints as one short line."""

    def __repr__(self) -> str:
        return f"<explanation: {self.get('method')}, score {self.get('score', 0.0):.4f}>"

    __str__ = __repr__


class ExplainedDocument(Document):
    """What the retriever returned, with its `hit`: score, status, and the explanation, computed on first use."""

    _hit: Hit | None = PrivateAttr(default=None)

    @classmethod
    def beside(cls, document: Document, hit: Hit, metadata_key: str | None = None) -> ExplainedDocument:
        """A copy of `document`, which is left as it is: a docstore hands out the very object that it keeps."""
        metadata = dict(document.metadata)
        if metadata_key is not None and hit.status == "ready" and hit.explanation is not None:
            metadata[metadata_key] = ExplanationData(hit.explanation.to_dict())
        explained = cls.model_construct(id=document.id, metadata=metadata, page_content=document.page_content)
        explained._hit = hit
        return explained

    @property
    def hit(self) -> Hit:
        """The document's score and what gave it, the exact similarity, and where the explanation stands.

        A document does not know its place in a list: after a reranker, `hit.rank` is still the rank in the search.
        """
        if self._hit is None:
            raise AttributeError("this document did not come from an ExplainingRetriever")
        score = reranked_score(self, self._hit)
        return self._hit if score is None or same_score(score, self._hit.score) else scored(self._hit, UNNAMED, score)

    @property
    def explanation(self) -> Explanation | None:
        """Computed on first use; None when it was skipped or failed, and then `hit.reason` says why."""
        return self.hit.explanation

    @classmethod
    def lc_id(cls) -> list[str]:
        """Serialised as the plain document, which every reader knows."""
        return Document.lc_id()

    def __repr_name__(self) -> str:
        return Document.__name__

    def __eq__(self, other: object) -> bool:
        """By the document's own fields: retrievers that drop duplicates must still find them."""
        if not isinstance(other, Document):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in ("page_content", "metadata", "id", "type"))

    __hash__ = None  # type: ignore[assignment]  # like every Document: it can be changed


def carried(document: Document) -> Hit | None:
    """The hit that was put beside a document when it was found; None where there is none."""
    return document._hit if isinstance(document, ExplainedDocument) else None


def keys(document: Document) -> Sequence[Hashable]:
    """What a copy of a document is known by; some copies lose the id."""
    text = document.page_content
    return (text,) if document.id is None else ((document.id, text), text)


def reranked_score(document: Document, hit: Hit | None = None) -> float | None:
    """What a reranker wrote into the document's metadata since its hit was made; None where none did."""
    score = document.metadata.get(_RERANKED)
    if not isinstance(score, Real) or isinstance(score, bool):
        return None
    return float(score) if hit is None or hit.metadata.get(_RERANKED) != score else None


def get_explanation(document: Document) -> Explanation | None:
    """The explanation of a document: computed on first use, or read back from its metadata; None if there is none."""
    if isinstance(document, ExplainedDocument) and document._hit is not None:
        return document.hit.explanation
    for value in document.metadata.values():
        if isinstance(value, dict) and value.get("format") == "rag_explain.explanation":
            try:
                return Explanation.from_dict(value)
            except FormatError:
                continue
    return None
