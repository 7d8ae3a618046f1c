"""Factors as bytes, and back: a fixed header, JSON for tokens and settings, plain arrays, a checksum.

    header     magic, version, precision, shape, lengths, norm, error, the key
    about      JSON: tokens, notices, role, method, settings, fingerprint, unit, references
    payload    for int8 scales (n,) fp16; rows (n, h); in fp32 rest (h,), embedding (h,)
    checksum   XXH3-128 over all of the above

Bytes may come from anywhere: every length is checked against the bytes at hand before anything is allocated, nothing is
unpickled, and whatever does not add up is a `FormatError`, which a store treats as a miss. The checksum finds damage,
not forgery: a program that can write to a store can write wrong factors with a right checksum.
"""

import json
import math
import struct
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import xxhash
from numpy.typing import NDArray

from rag_explain.errors import FormatError, InvalidInput, StoreError
from rag_explain.factors import Array, Factors
from rag_explain.results.serialization import read_notices, write_notices
from rag_explain.store.key import KEY_BYTES
from rag_explain.texts.tokens import Part, Role, Token, Unit

Precision = Literal["fp32", "fp16", "int8"]

MAX_BYTES = 256 * 2**20  # of one row: a text of 32k tokens with 1024 dimensions in fp32 takes half of it
_MAGIC = b"RXF1"
_VERSION = 3
_PRECISIONS: tuple[Precision, ...] = get_args(Precision)  # a header has the number of one of them
_ITEMS: dict[str, np.dtype[Any]] = {"fp32": np.dtype("<f4"), "fp16": np.dtype("<f2"), "int8": np.dtype(np.int8)}
_HEADER = struct.Struct(f"<4sHBxIIIh2x2d{KEY_BYTES}s")
_CHECKSUM = 16
_MAX_SHIFT = 100  # powers of two up to here are exact in float32, and so is what they multiply
_COLUMNS = ("text", "start", "end", "part", "piece")  # of the tokens, in the order of their fields
# The other fields in the JSON, and their types.
_FIELDS = {"role": str, "method": str, "settings": dict, "fingerprint": str, "unit": str, "references": dict | None}


class _Header(NamedTuple):
    magic: bytes
    version: int
    code: int  # of the precision
    n: int
    h: int
    about: int  # bytes
    shift: int
    norm: float
    error: float
    key: bytes

    @property
    def precision(self) -> Precision:
        return _PRECISIONS[self.code]

    @property
    def scales(self) -> int:  # bytes
        return 2 * self.n if self.precision == "int8" else 0


def encode(key: bytes, factors: Factors, precision: Precision = "fp16") -> bytes:
    """`factors` as bytes that `decode` reads back under the same key.

    Rows are kept in `precision`, or in fp32 where they are so large or small that fp16 cannot hold them; rest and
    embedding always in fp32. The error that comes back with the factors is measured on the rows as they will be read.
    """
    if precision not in _PRECISIONS:
        raise InvalidInput(f"precision must be one of {', '.join(_PRECISIONS)}, not {precision!r}")
    if not (np.isfinite(factors.rows).all() and np.isfinite(factors.rest).all() and math.isfinite(factors.norm)):
        raise StoreError("factors with infinite or undefined numbers are not kept")
    precision, shift, packed, kept = _pack(factors.rows, precision)
    error = factors.error
    if precision != "fp32":
        embedding = factors.embedding.astype(np.float64)  # squares leave the range of float32 early
        missed = kept.sum(0, dtype=np.float64) + factors.rest - embedding
        error = float(np.linalg.norm(missed) / (np.linalg.norm(embedding) or 1.0))
    columns = {f"{name}s": [getattr(token, name) for token in factors.tokens] for name in _COLUMNS}
    fields = {name: getattr(factors, name) for name in _FIELDS}
    notices = {"notices": write_notices(factors.notices)}
    about = json.dumps(columns | fields | notices, separators=(",", ":"), default=dict).encode("ascii")
    about += b" " * (-len(about) % 8)  # arrays that begin at a multiple of 8 are read without a copy
    n, h = factors.rows.shape
    code = _PRECISIONS.index(precision)
    header = _Header(_MAGIC, _VERSION, code, n, h, len(about), shift, factors.norm, error, key)
    tail = [np.ascontiguousarray(vector, "<f4").tobytes() for vector in (factors.rest, factors.embedding)]
    body = b"".join((_HEADER.pack(*header), about, *packed, *tail))
    if len(body) + _CHECKSUM > MAX_BYTES:
        raise StoreError(f"factors of {len(body) >> 20} MiB are not kept: the limit is {MAX_BYTES >> 20} MiB")
    return body + xxhash.xxh3_128_digest(body)


def decode(key: bytes, data: bytes) -> Factors:
    """The factors that were encoded under `key`; a `FormatError` for anything else."""
    header = _checked_header(key, data)
    rows, rest, embedding = _numbers(data, header)
    try:
        about = json.loads(data[_HEADER.size : _HEADER.size + header.about])
        return Factors(
            tokens=_tokens(about, header.n),
            rows=rows,
            rest=rest,
            embedding=embedding,
            norm=header.norm,
            notices=read_notices(about["notices"], about),
            error=header.error,
            **_fields(about),
        )
    except (KeyError, TypeError, ValueError, IndexError, RecursionError) as problem:
        raise FormatError(f"stored factors are damaged: {problem!r}") from problem


def _checked_header(key: bytes, data: bytes) -> _Header:
    if not isinstance(data, bytes):
        raise FormatError(f"stored factors must be bytes, not {type(data).__name__}")
    if not _HEADER.size + _CHECKSUM <= len(data) <= MAX_BYTES:
        raise FormatError(f"{len(data)} bytes cannot be stored factors")
    header = _Header(*_HEADER.unpack_from(data))
    if header.magic != _MAGIC or header.version != _VERSION or header.code >= len(_PRECISIONS):
        raise FormatError(f"stored factors of another format ({header.magic!r}, {header.version}) cannot be read")
    numbers = header.scales + header.n * header.h * _ITEMS[header.precision].itemsize + 8 * header.h
    expected = _HEADER.size + header.about + numbers + _CHECKSUM
    if expected != len(data):
        raise FormatError(f"stored factors declare {expected} bytes and are {len(data)}")
    if xxhash.xxh3_128_digest(memoryview(data)[:-_CHECKSUM]) != data[-_CHECKSUM:]:
        raise FormatError("stored factors are damaged: their checksum does not match")
    if header.key != key:
        raise FormatError("stored factors belong to another key")
    if abs(header.shift) > _MAX_SHIFT or not (math.isfinite(header.norm) and math.isfinite(header.error)):
        raise FormatError("stored factors hold undefined numbers, or numbers out of range")
    return header


def _pack(rows: Array, precision: Precision) -> tuple[Precision, int, list[bytes], NDArray[np.float32]]:
    """The precision that will do, the shift, the bytes, and the rows as they will be read back.

    fp16 reaches from 6e-5 to 65504. A power of two, which rounds nothing, moves the largest number to 2**13: nothing
    overflows, and what is too small for fp16 then is too small to matter beside the largest.
    """
    largest = np.abs(rows).max(axis=1, initial=0.0)
    top = float(largest.max(initial=0.0)) / (127.0 if precision == "int8" else 1.0)
    shift = 14 - math.frexp(top)[1] if top else 0
    if precision == "fp32" or abs(shift) > _MAX_SHIFT:
        return "fp32", 0, [np.ascontiguousarray(rows, "<f4").tobytes()], rows
    up, down = np.float32(2.0**shift), np.float32(2.0**-shift)
    if precision == "fp16":
        half = (rows * up).astype("<f2")
        return "fp16", shift, [half.tobytes()], half.astype(np.float32) * down
    wanted = largest / np.float32(127) * up
    scales = wanted.astype("<f2")
    scales = np.where(scales < wanted, np.nextafter(scales, np.float16(np.inf)), scales)  # 127 steps must reach
    step = scales.astype(np.float32)[:, None] * down
    levels = np.rint(np.divide(rows, step, out=np.zeros_like(rows), where=step > 0)).astype(np.int8)
    return "int8", shift, [scales.astype("<f2").tobytes(), levels.tobytes()], levels.astype(np.float32) * step


def _numbers(data: bytes, header: _Header) -> tuple[Array, Array, Array]:
    """Rows (n, h), rest (h,) and embedding (h,). Lengths have been checked."""
    n, h, at = header.n, header.h, _HEADER.size + header.about
    kept = np.frombuffer(data, _ITEMS[header.precision], n * h, at + header.scales).reshape(n, h)
    rows = kept.astype(np.float32, copy=False)
    if header.precision != "fp32":
        scales = np.frombuffer(data, "<f2", n, at).astype(np.float32)[:, None] if header.scales else np.float32(1)
        rows *= scales * np.float32(2.0**-header.shift)
    tail = np.frombuffer(data, "<f4", 2 * h, len(data) - _CHECKSUM - 8 * h).astype(np.float32)
    # A sum is undefined as soon as one of its terms is: one pass instead of a mask as large as the rows.
    if not (np.isfinite(rows.sum(0)).all() and np.isfinite(tail.sum())):
        raise FormatError("stored factors hold undefined numbers")
    rows.flags.writeable = tail.flags.writeable = False  # else every Factors would copy them
    return rows, tail[:h], tail[h:]


def _tokens(about: dict[str, Any], n: int) -> tuple[Token, ...]:
    texts, starts, ends, parts, pieces = columns = [about[f"{name}s"] for name in _COLUMNS]
    if any(len(column) != n for column in columns):
        raise ValueError(f"not {n} tokens")
    if not (all(type(x) is int for x in starts + ends) and all(type(x) is str for x in texts + pieces)):
        raise TypeError("tokens of the wrong types")
    if not set(parts).issubset(get_args(Part)) or any(not 0 <= a <= b for a, b in zip(starts, ends, strict=True)):
        raise ValueError("tokens out of range")
    return tuple(map(Token, *columns))


def _fields(about: dict[str, Any]) -> dict[str, Any]:
    fields = {name: about[name] for name in _FIELDS}
    if not all(isinstance(fields[name], kind) for name, kind in _FIELDS.items()):
        raise TypeError("fields of the wrong types")
    if fields["role"] not in get_args(Role) or fields["unit"] not in get_args(Unit):
        raise ValueError("an unknown role or unit")
    return fields
