"""Documents: the chunks of one search put back together, each where it stands in the document that it is of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from rag_explain.results.display import Paged

if TYPE_CHECKING:
    from rag_explain.results.hits import Hit

# In what metadata frameworks and people write down which document a chunk is of, and at which character it begins.
OWNERS = ("doc_id", "document_id", "ref_doc_id", "parent_id", "source_id", "file_path", "source")
_STARTS = ("start_index", "start_char_idx")


@dataclass(frozen=True, slots=True)
class Document:
    """The hits that are of one document, in its order; those whose place is not known come last, by rank.

    `starts` are the characters at which they begin in it, None where nothing tells.
    """

    id: str
    hits: tuple[Hit, ...]
    starts: tuple[int | None, ...]

    @property
    def rank(self) -> int:
        """Of its best hit."""
        return min(hit.rank for hit in self.hits)


@dataclass(frozen=True, eq=False)
class Documents(Paged):
    """The documents of a search, the one with the best hit first."""

    _title: ClassVar[str] = "By document"

    documents: tuple[Document, ...]

    @classmethod
    def of(cls, hits: Iterable[Hit]) -> Documents:
        """Hits whose metadata name one document are of it; any other hit is a document."""
        groups: dict[tuple[bool, str], list[Hit]] = {}
        for hit in hits:
            owner = owner_of(hit.metadata)
            groups.setdefault((owner is None, hit.id if owner is None else str(owner)), []).append(hit)
        found = [_document(name, group) for (_, name), group in groups.items()]
        return cls(tuple(sorted(found, key=lambda one: one.rank)))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        documents = [
            {
                "id": one.id,
                "chunks": [{"start": at, **hit.to_dict()} for hit, at in zip(one.hits, one.starts, strict=True)],
            }
            for one in self.documents
        ]
        return {"format": "rag_explain.documents", "version": 1, "documents": documents}


def owner_of(metadata: Mapping[str, Any]) -> Any:
    """What the metadata of a chunk call the document that it is of; None where they do not say."""
    return next((metadata[name] for name in OWNERS if metadata.get(name) is not None), None)


def _document(name: str, hits: Iterable[Hit]) -> Document:
    placed = [(hit, _start(hit.metadata)) for hit in hits]
    placed.sort(key=lambda one: (one[1] is None, one[1] or 0, one[0].rank))
    return Document(name, tuple(hit for hit, _ in placed), tuple(start for _, start in placed))


def _start(metadata: Mapping[str, Any]) -> int | None:
    told = next((metadata[name] for name in _STARTS if metadata.get(name) is not None), None)
    return told if isinstance(told, int) and not isinstance(told, bool) and told >= 0 else None
