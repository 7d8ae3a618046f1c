"""XRay: what a chunk's vector is about, without a query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from rag_explain.results.display import Paged
from rag_explain.results.notices import Notice
from rag_explain.results.serialization import write_notices
from rag_explain.results.spans import ValuedSpan


@dataclass(frozen=True, eq=False, kw_only=True)
class XRay(Paged):
    """The share of its own embedding that each part of a text makes up.

        share[i] = <rows[i], e> / |e|^2

    The shares of all sentences, of the metadata, of special tokens and prompts and of the rest sum to 1; what
    has a share below zero turns the vector away from what it is. Words sum to their sentences.

    Attributes:
        words: each word of the text; none where it was looked at by sentences.
        sentences: each sentence.
        headers: the headings that stand in the text, which are parts of sentences too.
        metadata: each line that was embedded with the text, and its share.
        special: what special tokens and prompts make up together.
        rest: what belongs to no token.
        error: by how much the shares miss 1.
    """

    _title: ClassVar[str] = "What is this chunk about?"

    document: str
    words: tuple[ValuedSpan, ...]
    sentences: tuple[ValuedSpan, ...]
    headers: tuple[ValuedSpan, ...] = ()
    metadata: tuple[tuple[str, float], ...] = ()
    special: float = 0.0
    rest: float = 0.0
    error: float = 0.0
    method: str = ""
    model: str = ""
    fingerprint: str = ""
    notices: tuple[Notice, ...] = ()

    @property
    def no_text(self) -> float:
        """What is of no sentence: metadata, special tokens and the rest."""
        return sum(share for _, share in self.metadata) + self.special + self.rest

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        names = ("document", "special", "rest", "no_text", "error", "method", "model", "fingerprint")
        pieces = {name: [one._asdict() for one in getattr(self, name)] for name in ("words", "sentences", "headers")}
        return {
            "format": "rag_explain.x_ray",
            "version": 1,
            **{name: getattr(self, name) for name in names},
            **pieces,
            "metadata": [{"text": text, "value": share} for text, share in self.metadata],
            "notices": write_notices(self.notices),
        }

    def __repr__(self) -> str:
        return f"XRay({len(self.sentences)} sentences, no sentence {self.no_text:.2f}, {self.method})"
