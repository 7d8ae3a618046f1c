"""A passage: the string that was embedded, and where the caller's own text stands in it."""

from collections.abc import Sequence
from dataclasses import dataclass

from rag_explain.errors import InvalidInput, whole_number


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
