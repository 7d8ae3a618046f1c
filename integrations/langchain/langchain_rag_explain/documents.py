"""A Document with an explanation beside it: for prompts, equality and whatever stores it, it is the plain document."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, SupportsIndex

from langchain_core.documents import Document
from pydantic import PrivateAttr

from rag_explain import Explanation, Hit
from rag_explain.errors import FormatError, InvalidInput
from rag_explain.log import LogSource, explain_again
from rag_explain.retrieval import UNNAMED, RetrievedDocument, same_score, scored
from rag_explain.texts.tokens import Unit

if TYPE_CHECKING:
    from rag_explain import Explainer

_ALONE = (
    "no explanation stands beside this document: it was made from fields, as one that is read back; "
    "get_explanation(document, query=..., log=...) looks up what was logged"
)
_RERANKED = "relevance_score"  # where LangChain's rerankers write their score: in a document's metadata


class ExplanationData(dict[str, Any]):
    """An explanation as plain data for a document's metadata: serialises in full, prints as one short line."""

    def __repr__(self) -> str:
        return f"<explanation: {self.get('method')}, score {self.get('score', 0.0):.4f}>"

    __str__ = __repr__


class ExplainedDocument(Document):
    """What the retriever returned, with its `hit`: score, status, and the explanation, computed on first use.

    That is beside it, and beside its copies, in this process. What is stored of it or sent elsewhere is the plain
    document: in a checkpoint, a pickle, JSON.
    """

    _hit: Hit | None = PrivateAttr(default=None)

    @classmethod
    def beside(cls, document: Document, hit: Hit, metadata_key: str | None = None) -> ExplainedDocument:
        """A copy of `document`, which is left as it is: a docstore hands out the very object that it keeps."""
        metadata = dict(document.metadata)
        if metadata_key is not None and hit.status == "ready" and hit.explanation is not None:
            metadata[metadata_key] = ExplanationData(hit.explanation.to_dict())
        explained = cls.model_construct(id=document.id, metadata=metadata, page_content=document.page_content)
        explained.__pydantic_private__ = {"_hit": hit}  # pydantic looks for private attributes in `__class__`
        return explained

    # What serializers write down to make an object again: LangGraph's strict checkpoints know Document, and not us.
    __class__ = property(lambda self: Document)

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        return self._plain().__reduce_ex__(protocol)

    def copy(self, **changes: Any) -> Document:  # type: ignore[override]
        """The plain document; pydantic would put what is private here into a Document. Deprecated: see `model_copy`."""
        return self._plain().copy(**changes)

    def _plain(self) -> Document:
        return Document.model_construct(self.model_fields_set, **dict(self))

    def __getattr__(self, name: str) -> Any:
        if name in ("hit", "explanation") and self._hit is None:
            raise AttributeError(_ALONE)
        return super().__getattr__(name)  # type: ignore[misc]  # pydantic's, which type checkers are not shown

    @property
    def hit(self) -> Hit:
        """The document's score and what gave it, the exact similarity, and where the explanation stands.

        A document does not know its place in a list: after a reranker, `hit.rank` is still the rank in the search.
        """
        if self._hit is None:
            raise AttributeError(_ALONE)
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


def get_explanation(
    document: Document,
    *,
    query: str | None = None,
    log: LogSource | None = None,
    explainer: Explainer | None = None,
    unit: Unit = "word",
) -> Explanation | None:
    """The explanation of a document: computed on first use, or read back from its metadata; None if there is none.

    A document that was stored and read back has none beside it. With `query`, the question that it was found for, it is
    looked up in `log` (an ExplanationLog or its folder), or else computed again by `explainer`, in this `unit`. A
    `LogError` says what the log has instead.
    """
    if not isinstance(document, Document):
        raise InvalidInput(f"get_explanation takes a Document that a retriever returned, not {type(document).__name__}")
    return _carried_explanation(document) or explain_again(
        RetrievedDocument(id=document.id, text=document.page_content), query, log, explainer, unit
    )


def _carried_explanation(document: Document) -> Explanation | None:
    if isinstance(document, ExplainedDocument) and document._hit is not None and (beside := document.hit.explanation):
        return beside
    for value in document.metadata.values():
        if isinstance(value, dict) and value.get("format") == "rag_explain.explanation":
            try:
                return Explanation.from_dict(value)
            except FormatError:
                continue
    return None
