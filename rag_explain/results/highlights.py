"""Highlights: what each word of a document carries over the whole query. They are the score, split by words."""

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from typing import Any, Self

from rag_explain.results.explanation import Explanation
from rag_explain.results.spans import ValuedSpans


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Highlights(ValuedSpans):
    """The words of a document, or its sentences, in its order, each with what it carries, in score units.

    `gap` is the score less everything that was attributed, special tokens and rest included: rounding where the method
    is exact; None where it is not additive.
    """

    FORMAT = "rag_explain.highlights"
    WHAT = "the highlights"

    score: float
    gap: float | None = None
    measure: str = "cosine"
    returned: float | None = None  # what the user saw, where that is a function of the score

    @classmethod
    def of(cls, explanation: Explanation) -> Self:
        """What an explanation says of the document's words."""
        shown = explanation.in_words()
        names = {item.name for item in dataclass_fields(cls)} - {"spans"}
        fields: dict[str, Any] = {name: getattr(shown, name) for name in names}
        return cls(spans=shown.document_spans(), **fields)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        return super().from_dict({"returned": None, **data} if isinstance(data, Mapping) else data)

    @property
    def unattributed(self) -> float:
        """score - the sum of all words: what no word of the document carries."""
        return self.score - sum(span.value for span in self.spans)

    def __repr__(self) -> str:
        return f"Highlights({len(self)} spans, score={self.score:.4f}, {self.method})"
