"""Terms: what a score is a sum over where texts are compared by words of a vocabulary, as BM25 and SPLADE do."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rag_explain.results.readonly import readonly_mapping
from rag_explain.results.serialization import is_number


@dataclass(frozen=True, slots=True)
class Term:
    """A term that both texts can meet in, and what it adds to the score.

    Attributes:
        text: as the index or the vocabulary has it.
        query, document: the words of the caller's texts that it was read from, each once; none where it was not.
        value: what the document's words add to the score by it, in score units.
        numbers: what else is known of it, by name.
    """

    text: str
    query: tuple[str, ...]
    document: tuple[str, ...]
    value: float
    numbers: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "numbers", readonly_mapping(self.numbers))

    def __reduce__(self) -> tuple[Any, ...]:
        return Term, (self.text, self.query, self.document, self.value, dict(self.numbers))


def distinct(words: Iterable[str]) -> tuple[str, ...]:
    """Each word once, in the order of the text, whatever the case of its letters."""
    return tuple({word.lower(): word for word in reversed([word for word in words if word])}.values())[::-1]


def write_terms(terms: Sequence[Term]) -> list[list[Any]]:
    return [[one.text, [*one.query], [*one.document], one.value, dict(one.numbers)] for one in terms]


def read_terms(items: Any, data: Mapping[str, Any]) -> tuple[Term, ...]:
    terms = tuple(Term(text, tuple(asked), tuple(met), value, numbers) for text, asked, met, value, numbers in items)
    for one in terms:
        words, numbers = (one.text, *one.query, *one.document), (one.value, *one.numbers.values())
        if not all(isinstance(word, str) for word in words) or not all(map(is_number, numbers)):
            raise ValueError(f"no such term: {one!r}")
    return terms
