"""Results as plain data: the JSON format of an Explanation, its version, and what may stand in it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rag_explain.errors import FormatError

if TYPE_CHECKING:
    from rag_explain.types import Explanation, Token

FORMAT = "rag_explain.explanation"
VERSION = 1
PARTS = frozenset(("text", "special", "prompt", "metadata"))
UNITS = frozenset(("token", "word", "sentence"))


def plain(value: Any) -> Any:
    """`value` as JSON knows it: numpy becomes numbers, tuples lists, NaN None, the unknown a string."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return str(value)


def to_json(data: Mapping[str, Any] | Sequence[Any], *, compact: bool = False) -> str:
    """One line of JSON that any UTF-8 file can hold, even when a text in it holds half a surrogate pair."""
    separators = (",", ":") if compact else None
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=separators)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(data, allow_nan=False, separators=separators)
    return text


def explanation_to_dict(explanation: Explanation) -> dict[str, Any]:
    """Everything that `explanation_from_dict` needs, and the sums that a reader wants to see."""
    similarities, references = explanation.similarities, explanation.references
    return {
        "format": FORMAT,
        "version": VERSION,
        "query": explanation.query,
        "document": explanation.document,
        "query_tokens": [_token_to_list(token) for token in explanation.query_tokens],
        "document_tokens": [_token_to_list(token) for token in explanation.document_tokens],
        "matrix": explanation.matrix.tolist(),
        "score": explanation.score,
        "gap": explanation.gap,
        "unattributed": explanation.unattributed,
        "additive": explanation.additive,
        "unit": explanation.unit,
        "method": explanation.method,
        "settings": dict(explanation.settings),
        "model": explanation.model,
        "fingerprint": explanation.fingerprint,
        "references": None if references is None else dict(references),
        "similarities": None if similarities is None else similarities.tolist(),
        "surrogate": explanation.surrogate,
        "truncated": list(explanation.truncated),
        "provenance": dict(explanation.provenance),
    }


def explanation_from_dict(data: Mapping[str, Any]) -> Explanation:
    """The inverse of `explanation_to_dict`; refuses another format, another version, and damaged data."""
    from rag_explain.types import Explanation

    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, Mapping) else type(data).__name__
        raise FormatError(f"this is not an explanation: its format is {found!r}, not {FORMAT!r}")
    if data.get("version") != VERSION:
        raise FormatError(f"format version {data.get('version')!r} cannot be read: this library reads {VERSION}")
    try:
        if data["unit"] not in UNITS:
            raise ValueError(f"unknown unit {data['unit']!r}")
        query_tokens = tuple(_token_from_list(item, data["query"]) for item in data["query_tokens"])
        document_tokens = tuple(_token_from_list(item, data["document"]) for item in data["document_tokens"])
        shape = (len(query_tokens) + 1, len(document_tokens) + 1)
        similarities = data["similarities"]
        if similarities is not None:
            similarities = _numbers(similarities, (shape[0] - 1, shape[1] - 1))
        return Explanation(
            query=data["query"],
            document=data["document"],
            query_tokens=query_tokens,
            document_tokens=document_tokens,
            matrix=_numbers(data["matrix"], shape),
            score=data["score"],
            method=data["method"],
            additive=data["additive"],
            unit=data["unit"],
            settings=data["settings"],
            model=data["model"],
            fingerprint=data["fingerprint"],
            references=data["references"],
            similarities=similarities,
            surrogate=data["surrogate"],
            truncated=data["truncated"],
            provenance=data["provenance"],
        )
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise FormatError(f"the explanation is damaged: {error!r}") from error


def explanation_from_json(text: str) -> Explanation:
    """The inverse of `to_json` of an explanation."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise FormatError(f"this is not JSON: {error}") from error
    return explanation_from_dict(data)


def _numbers(values: Any, shape: tuple[int, int]) -> NDArray[np.float32]:
    numbers = np.asarray(values)
    if numbers.dtype.kind not in "fiu":
        raise ValueError("something in a matrix is not a number")
    if np.any(np.abs(numbers[np.isfinite(numbers)]) > np.finfo(np.float32).max):
        raise ValueError("a number in a matrix is too large")
    return numbers.astype(np.float32).reshape(shape)


def _token_to_list(token: Token) -> list[Any]:
    return [token.start, token.end, token.part, token.piece]


def _token_from_list(item: Sequence[Any], text: str | None) -> Token:
    from rag_explain.types import Token

    start, end, part, piece = item
    if part not in PARTS or not 0 <= start <= end or (text is not None and end > len(text)):
        raise ValueError(f"no such token: {item!r}")
    return Token("" if text is None else text[start:end], int(start), int(end), part, str(piece))
