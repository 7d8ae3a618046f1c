"""What must not be written: spans of a text that are masked, character for character, so that offsets stay true."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import regex

from rag_explain.errors import InvalidInput

Span = tuple[int, int]
Redactor = Callable[[str], Iterable[Span]]
"""Takes a text and gives the `(start, end)` spans of it that must not be written."""

MASK = "█"


def patterns(*expressions: str) -> Redactor:
    """A redactor that masks whatever matches one of the regular expressions.

    ExplanationLog(path, redact=patterns(r"[\\w.+-]+@[\\w-]+\\.[\\w.]+", r"\\b\\d{13,19}\\b"))
    """
    if not expressions:
        raise InvalidInput("patterns needs at least one regular expression")
    try:
        compiled = [regex.compile(expression) for expression in expressions]
    except regex.error as error:
        raise InvalidInput(f"this is not a regular expression: {error}") from error

    def redact(text: str) -> Iterable[Span]:
        return [match.span() for expression in compiled for match in expression.finditer(text)]

    return redact


def mask(text: str, redact: Redactor | None) -> str:
    """`text` with every redacted character replaced by one █."""
    if redact is None:
        return text
    characters = list(text)
    for start, end in redact(text):
        if not 0 <= start <= end <= len(text):
            raise InvalidInput(f"the redaction hook gave the span ({start}, {end}) of a text of {len(text)} characters")
        characters[start:end] = MASK * (end - start)
    return "".join(characters)


def mask_all(value: Any, redact: Redactor | None) -> Any:
    """The same for every string inside plain data; keys are left alone."""
    if redact is None:
        return value
    if isinstance(value, str):
        return mask(value, redact)
    if isinstance(value, Mapping):
        return {key: mask_all(item, redact) for key, item in value.items()}
    if isinstance(value, list):
        return [mask_all(item, redact) for item in value]
    return value
