"""Evidence: where to look in a document, and not what carried its score."""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from rag_explain.results.spans import ValuedSpan, ValuedSpans, best


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Evidence(ValuedSpans):
    """The `k` sentences to read for a query, the best first; `sentences` has all of them as they stand.

    A sentence's value is how much of the query it matches: the sum over query words of their best cosine within it.
    `score` is the same sum over the whole document, which no sentence exceeds; None where a backend gave the values.
    Values do not add up to it: they are no parts of a score.
    """

    FORMAT: ClassVar[str] = "rag_explain.evidence"
    WHAT: ClassVar[str] = "evidence"

    k: int = 2

    def __new__(cls, *, spans: tuple[ValuedSpan, ...], k: int = 2, **fields: Any) -> Self:
        return super().__new__(cls, spans=best(spans, k))

    @property
    def sentences(self) -> tuple[ValuedSpan, ...]:
        """Every sentence with its value, in the order of the document."""
        return self.spans

    def __repr__(self) -> str:
        return f"Evidence({len(self)} of {len(self.spans)} sentences, {self.method})"
