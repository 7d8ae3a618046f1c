"""A passage: the string that was embedded, and where the caller's own text stands in it."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TypeVar

from rag_explain.errors import InvalidInput, whole_number

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Passage:
    """A text inside the string that was really embedded, when the two differ.

    LlamaIndex, for example, embeds metadata and text together. `string` is what the encoder read, `string[start:end]`
    the caller's text. Offsets in an explanation point into that text; tokens outside it are "metadata".

    `within` are the places in the caller's text whose words are asked for, where those of all of it are too many.
    """

    string: str
    start: int = 0
    end: int = -1
    within: tuple[tuple[int, int], ...] | None = None

    def __post_init__(self) -> None:
        _check_string(self.string)
        length = len(self.string)
        start, end = whole_number(self.start, "start"), whole_number(self.end, "end")
        end = length if end == -1 else end
        if not 0 <= start <= end <= length:
            raise InvalidInput(f"a passage's text must lie in its {length} characters, not at {start} to {end}")
        object.__setattr__(self, "start", start)
        object.__setattr__(self, "end", end)

    @property
    def text(self) -> str:
        return self.string[self.start : self.end]

    @property
    def around(self) -> tuple[str, str]:
        """What the encoder read before and after the text."""
        return self.string[: self.start], self.string[self.end :]


def as_passage(text: str | Passage) -> Passage:
    """A text as a passage; a text that no tokenizer can read is refused."""
    passage = text if isinstance(text, Passage) else Passage(text)
    check_text(passage.string)
    return passage


def as_passages(texts: Sequence[str | Passage]) -> tuple[Passage, ...]:
    return tuple(map(as_passage, texts))


def check_id(name: object) -> None:
    """Refuse a document's id that is not a string: a store could not find it again."""
    if not isinstance(name, str):
        raise InvalidInput(f"a document's id must be a string, not {name!r}: give str(id)")


def many_passages(texts: Sequence[str | Passage], otherwise: str) -> tuple[Passage, ...]:
    """A list of texts as passages; one text, or what is no list, is refused with these words."""
    if isinstance(texts, (str, Passage)) or not isinstance(texts, Iterable):
        raise InvalidInput(otherwise)
    return as_passages(texts)


def checked_ids(ids: Iterable[str | None], count: int) -> list[str | None]:
    """One string, or None, for each of the documents; anything else is refused."""
    names = list(ids) if isinstance(ids, Iterable) and not isinstance(ids, str) else []
    if len(names) != count:
        raise InvalidInput(f"give one id, or None, for each of the {count} documents")
    for name in names:
        if name is not None:
            check_id(name)
    return names


def named(texts: Iterable[T], ids: Iterable[str | None]) -> Iterator[tuple[T, str | None]]:
    """Each text with its id, as they come."""
    if isinstance(ids, str) or not isinstance(ids, Iterable):
        raise InvalidInput("ids must be a list: one id, or None, for each text")
    missing = object()
    for number, (text, name) in enumerate(zip_longest(texts, ids, fillvalue=missing)):
        if text is missing or name is missing:
            raise InvalidInput(f"there are not as many ids as texts: one of them ended after {number}")
        if name is not None:
            check_id(name)
        yield text, name  # type: ignore[misc]  # neither is the filling


def _check_string(text: object) -> str:
    if not isinstance(text, str):
        raise InvalidInput(f"a text must be a string, not {type(text).__name__}")
    return text


def check_text(text: object) -> None:
    """Refuse what is not a string of valid Unicode."""
    try:
        _check_string(text).encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(
            f"the text has a lone surrogate at position {error.start}, which is not valid Unicode: "
            "clean it with text.encode('utf-8', 'replace').decode()"
        ) from None
