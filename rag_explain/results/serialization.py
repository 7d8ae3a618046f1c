"""Results as plain data: what JSON can carry, and how a table of fields is written and read back."""

import json
import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from rag_explain.errors import FormatError
from rag_explain.results.notices import Level, Notice
from rag_explain.texts.tokens import Part, Role, Token, Unit

T = TypeVar("T")
Write = Callable[[Any], Any]
# Reads a field's plain value; the second argument holds all plain values, for a field that depends on another.
Read = Callable[[Any, Mapping[str, Any]], Any]
Row = tuple[Write | None, Read | None]
FieldTable = Mapping[str, Row]


def to_plain(value: Any) -> Any:
    """`value` as JSON knows it: numpy becomes numbers, tuples lists, NaN None, the unknown a string."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_plain(item) for item in value]
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


def table(kind: type[Any], without: Collection[str] = (), **rows: Row) -> FieldTable:
    """One row per field of a dataclass, which is written and read as it is unless a row says otherwise."""
    return {item.name: rows.get(item.name, (None, None)) for item in fields(kind) if item.name not in without}


def fields_to_dict(result: object, rows: FieldTable) -> dict[str, Any]:
    """The fields of a result that are in the table, as plain data."""
    values = ((name, write, getattr(result, name)) for name, (write, _) in rows.items())
    return {name: value if write is None or value is None else write(value) for name, write, value in values}


def fields_from_dict(data: Mapping[str, Any], rows: FieldTable, form: str, version: int, what: str) -> dict[str, Any]:
    """The inverse of `fields_to_dict`; another format, another version and damaged data are refused."""
    found = data.get("format") if isinstance(data, Mapping) else type(data).__name__
    if found != form:
        raise FormatError(f"this is not {what}: its format is {found!r}, not {form!r}")
    if data.get("version") != version:
        raise FormatError(f"format version {data.get('version')!r} cannot be read: this library reads {version}")
    return read_fields(data, rows, what)


def read_fields(data: Mapping[str, Any], rows: FieldTable, what: str) -> dict[str, Any]:
    """The fields of the table, read from plain data; refuses damaged data."""
    try:
        return {
            name: data[name] if read is None or data[name] is None else read(data[name], data)
            for name, (_, read) in rows.items()
        }
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise FormatError(f"{what} is damaged: {error!r}") from error


def made(kind: type[T], values: Mapping[str, Any], what: str) -> T:
    """An object of a dataclass from values that were read; refuses a value that is not of its field's type."""
    declared: Any = kind
    for name, fits in _checks(declared).items():
        if name in values and not fits(values[name]):
            raise FormatError(f"{what} is damaged: its {name} is {type(values[name]).__name__}")
    try:
        return kind(**values)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise FormatError(f"{what} is damaged: {error}") from error


@cache
def _checks(kind: Any) -> dict[str, Callable[[Any], bool]]:
    return {name: _check(hint) for name, hint in get_type_hints(kind).items()}


def _check(hint: Any) -> Callable[[Any], bool]:
    """Whether a value is of a declared type; what a mapping holds is not looked at."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is UnionType and any(get_origin(one) or one is float for one in arguments):
        options = [_check(one) for one in arguments]
        return lambda value: any(fits(value) for fits in options)
    if origin is Literal:
        return lambda value: isinstance(value, str | NoneType) and value in arguments
    if origin is tuple:
        fits, size = _check(arguments[0]), None if arguments[-1] is ... else len(arguments)
        return lambda value: isinstance(value, tuple) and size in (None, len(value)) and all(map(fits, value))
    if hint is float:
        return is_number
    kind = origin if isinstance(origin, type) and origin is not UnionType else hint
    return lambda value: isinstance(value, kind)


def is_number(value: object) -> bool:
    """Whether this is a finite number."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def read_matrix(*, rest: int) -> Read:
    """Reads a matrix with one row per query token and one column per document token, and `rest` more of each."""

    def read(values: Any, data: Mapping[str, Any]) -> NDArray[np.float32]:
        numbers = np.asarray(values)
        if numbers.dtype.kind not in "fiu":
            raise ValueError("something in a matrix is not a number")
        if np.any(np.abs(numbers[np.isfinite(numbers)]) > np.finfo(np.float32).max):
            raise ValueError("a number in a matrix is too large")
        return numbers.astype(np.float32).reshape(len(data["query_tokens"]) + rest, len(data["document_tokens"]) + rest)

    return read


def write_tokens(tokens: Sequence[Token]) -> list[list[Any]]:
    """Tokens without their texts, which their offsets give."""
    return [[token.start, token.end, token.part, token.piece] for token in tokens]


def read_tokens(side: Role) -> Read:
    """Reads tokens whose texts are in the field `side`."""
    return lambda items, data: tuple(_token(item, data[side]) for item in items)


def _token(item: Sequence[Any], text: str | None) -> Token:
    start, end, part, piece = item
    if part not in get_args(Part) or not 0 <= start <= end or (text is not None and end > len(text)):
        raise ValueError(f"no such token: {item!r}")
    return Token("" if text is None else text[start:end], int(start), int(end), part, str(piece))


def read_unit(value: Any, data: Mapping[str, Any]) -> Any:
    if value not in get_args(Unit):
        raise ValueError(f"unknown unit {value!r}")
    return value


def write_notices(notices: Sequence[Notice]) -> list[list[Any]]:
    return [[notice.code, notice.text, notice.level, notice.side] for notice in notices]


def read_notices(items: Any, data: Mapping[str, Any]) -> tuple[Notice, ...]:
    notices = tuple(Notice(code, text, level, side) for code, text, level, side in items)
    for one in notices:
        is_known = one.level in get_args(Level) and one.side in (None, *get_args(Role))
        if not is_known or not isinstance(one.code, str) or not isinstance(one.text, str):
            raise ValueError(f"no such notice: {one!r}")
    return notices
