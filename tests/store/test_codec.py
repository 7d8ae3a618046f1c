from __future__ import annotations

import json
import struct

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from rag_explain.errors import FormatError, InvalidInput, StoreError
from rag_explain.factors import Factors
from rag_explain.store.codec import Precision, decode, encode
from rag_explain.texts.tokens import Token
from tests.support.samples import truncation
from tests.support.synthetic import make_factors, make_key

KEY = make_key()
HEADER = 72


def same_about(left: Factors, right: Factors) -> bool:
    names = ("tokens", "norm", "role", "method", "settings", "fingerprint", "unit", "truncated", "notices")
    return all(getattr(left, name) == getattr(right, name) for name in names)


def stored_precision(data: bytes) -> str:
    return ("fp32", "fp16", "int8")[data[6]]


def resealed(data: bytes) -> bytes:
    """What a forger would do: change bytes, then make the checksum right."""
    return data[:-16] + xxhash.xxh3_128_digest(data[:-16])


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 0.0), ("fp16", 4e-4), ("int8", 1e-2)])
def test_round_trip(precision: Precision, tolerance: float) -> None:
    tokens = (
        Token("", 0, 0, "special", "[CLS]"),
        Token("", 0, 0, "prompt", "passage"),
        Token("", 0, 0, "metadata", "title"),
        Token("Übel\ud800", 0, 5, "text", "übel"),
        Token("", 5, 5, "special", "[SEP]"),
    )
    references = {"nodes": 16, "similarity": 0.5, "reference": [0.25, -1.0]}
    factors = make_factors(
        n=5,
        tokens=tokens,
        notices=(truncation("document"),),
        unit="word",
        references=references,
        settings={"layer": 3, "x": [1, None]},
    )
    data = encode(KEY, factors, precision)
    back = decode(KEY, data)
    assert same_about(back, factors)
    assert stored_precision(data) == precision
    assert np.linalg.norm(back.rows - factors.rows) <= tolerance * np.linalg.norm(factors.rows)
    np.testing.assert_array_equal(back.rest, factors.rest)
    np.testing.assert_array_equal(back.embedding, factors.embedding)
    assert back.references == references
    assert not back.rows.flags.writeable


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_the_error_that_comes_back_is_that_of_the_rows_that_come_back(precision: Precision) -> None:
    back = decode(KEY, encode(KEY, make_factors(n=50, h=64), precision))
    missed = back.rows.sum(0, dtype=np.float64) + back.rest - back.embedding
    assert back.error == pytest.approx(np.linalg.norm(missed) / np.linalg.norm(back.embedding), rel=1e-4)
    assert back.error > 0


def test_fp32_keeps_the_measured_error() -> None:
    assert decode(KEY, encode(KEY, make_factors(error=3e-7), "fp32")).error == 3e-7


@pytest.mark.parametrize("precision", ["fp16", "int8"])
@pytest.mark.parametrize("scale", [1e12, 1e7, 1e-4, 1e-9, 1e-20])
def test_numbers_beyond_the_range_of_fp16_are_moved_into_it(precision: Precision, scale: float) -> None:
    factors = make_factors(scale=scale)
    data = encode(KEY, factors, precision)
    assert stored_precision(data) == precision
    lost = (decode(KEY, data).rows - factors.rows).astype(np.float64)  # squares leave the range of float32 early
    loss = np.linalg.norm(lost) / np.linalg.norm(factors.rows.astype(np.float64))
    assert loss < {"fp16": 4e-4, "int8": 1e-2}[precision]


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_the_largest_number_of_a_row_survives_int8(precision: Precision) -> None:
    rows = np.array([[1.0, -0.5, 1e-3], [1e-6, -1e-6, 5e-7], [1e-30, 0, 0]], np.float32)
    vector = np.zeros(3, np.float32)
    factors = make_factors(n=3, h=3, rows=rows, rest=vector, embedding=rows.sum(0))
    back = decode(KEY, encode(KEY, factors, precision)).rows
    np.testing.assert_allclose(back[:2].max(axis=1), rows[:2].max(axis=1), rtol=5e-3)
    assert np.abs(back[2]).max() < 1e-9


@pytest.mark.parametrize("precision", ["fp16", "int8"])
@pytest.mark.parametrize("scale", [2e37, 1e-32])
def test_numbers_that_cannot_be_moved_there_are_kept_in_fp32(precision: Precision, scale: float) -> None:
    factors = make_factors(n=2, scale=scale)
    data = encode(KEY, factors, precision)
    assert stored_precision(data) == "fp32"
    np.testing.assert_array_equal(decode(KEY, data).rows, factors.rows)


def test_int8_keeps_rows_of_zeros() -> None:
    rows = make_factors().rows.copy()
    rows[2] = 0
    back = decode(KEY, encode(KEY, make_factors(rows=rows), "int8"))
    np.testing.assert_array_equal(back.rows[2], 0)


@settings(deadline=None)  # a busy machine is slow, not wrong
@given(n=st.integers(0, 12), h=st.integers(1, 40), scale=st.floats(1e-33, 1e33), seed=st.integers(0, 999))
def test_any_shape_and_scale_comes_back_within_the_promised_error(n: int, h: int, scale: float, seed: int) -> None:
    factors = make_factors(seed, n, h, scale)
    for precision, tolerance in (("fp32", 0.0), ("fp16", 1e-3), ("int8", 2e-2)):
        back = decode(KEY, encode(KEY, factors, precision))
        assert back.rows.shape == (n, h)
        assert np.linalg.norm((back.rows - factors.rows).astype(np.float64)) <= tolerance * np.linalg.norm(
            factors.rows.astype(np.float64)
        )


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_every_flipped_bit_is_noticed(precision: Precision) -> None:
    """Header, tokens, scales, rows, checksum: one bit of every byte."""
    data = encode(KEY, make_factors(n=3, h=8), precision)
    for position in range(len(data)):
        broken = bytearray(data)
        broken[position] ^= 1 << (position % 8)
        with pytest.raises(FormatError):
            decode(KEY, bytes(broken))


def test_every_truncation_is_noticed() -> None:
    data = encode(KEY, make_factors(n=3, h=8))
    for length in range(len(data)):
        with pytest.raises(FormatError):
            decode(KEY, data[:length])
    with pytest.raises(FormatError):
        decode(KEY, data + b"\0")


@settings(deadline=None)  # a busy machine is slow, not wrong
@given(st.binary(max_size=400))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        decode(KEY, data)
    with pytest.raises(FormatError):
        decode(KEY, resealed(b"RXF1\1\0\1\0" + data + b"\0" * 100))


def test_a_row_of_another_key_is_refused() -> None:
    with pytest.raises(FormatError, match="another key"):
        decode(make_key(1), encode(KEY, make_factors()))


@pytest.mark.parametrize("data", [None, "text", 7, bytearray(200)])
def test_what_is_not_bytes_is_refused(data: object) -> None:
    with pytest.raises(FormatError):
        decode(KEY, data)  # type: ignore[arg-type]  # SQLite hands out whatever a forged row holds


@pytest.mark.parametrize("shape", [(2**32 - 1, 2**32 - 1), (2**31, 1), (0, 2**32 - 1)])
def test_forged_sizes_are_refused_before_anything_is_allocated(shape: tuple[int, int]) -> None:
    data = bytearray(encode(KEY, make_factors()))
    struct.pack_into("<II", data, 8, *shape)
    with pytest.raises(FormatError, match="declare"):
        decode(KEY, resealed(bytes(data)))


def test_a_forged_length_of_the_tokens_is_refused() -> None:
    data = bytearray(encode(KEY, make_factors()))
    struct.pack_into("<I", data, 16, 2**32 - 1)
    with pytest.raises(FormatError, match="declare"):
        decode(KEY, resealed(bytes(data)))


def test_factors_that_do_not_say_what_was_not_read_are_of_an_older_format() -> None:
    data = bytearray(encode(KEY, make_factors()))
    struct.pack_into("<H", data, 4, 2)
    with pytest.raises(FormatError, match="another format"):
        decode(KEY, resealed(bytes(data)))


def forged_about(**changes: object) -> bytes:
    """A row whose JSON was changed, with every length and the checksum made right again."""
    data = encode(KEY, make_factors(n=2, h=4))
    (size,) = struct.unpack_from("<I", data, 16)
    about = {**json.loads(data[HEADER : HEADER + size]), **changes}
    text = json.dumps(about).encode()
    header = bytearray(data[:HEADER])
    struct.pack_into("<I", header, 16, len(text))
    return resealed(bytes(header) + text + data[HEADER + size :])


@pytest.mark.parametrize(
    "changes",
    [
        {"starts": [0]},
        {"starts": [-1, 0]},
        {"starts": [5, 0], "ends": [1, 1]},
        {"starts": ["0", 0]},
        {"parts": ["text", "__class__"]},
        {"texts": [None, 1]},
        {"role": "admin"},
        {"unit": []},
        {"method": 3},
        {"settings": []},
        {"references": []},
        {"notices": None},
        {"notices": [["unknown", "a sentence", "warning", "admin"]]},
        {"notices": [["unknown", "a sentence", "fatal", None]]},
        {"notices": [["unknown", 3, "warning", None]]},
        {"notices": [["unknown", "a sentence"], 5]},
        {"tokens": None, "starts": None},
    ],
)
def test_forged_tokens_and_settings_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(FormatError):
        decode(KEY, forged_about(**changes))


def test_the_forgery_used_above_is_accepted_when_nothing_is_changed() -> None:
    assert decode(KEY, forged_about()).rows.shape == (2, 4)


def test_deeply_nested_json_is_refused() -> None:
    data = encode(KEY, make_factors(n=2, h=4))
    (size,) = struct.unpack_from("<I", data, 16)
    text = b"[" * 200_000
    header = bytearray(data[:HEADER])
    struct.pack_into("<I", header, 16, len(text))
    with pytest.raises(FormatError):
        decode(KEY, resealed(bytes(header) + text + data[HEADER + size :]))


def test_forged_undefined_numbers_are_refused() -> None:
    factors = make_factors(n=2, h=4)
    data = encode(KEY, factors, "fp32")
    for value in (np.nan, np.inf):
        broken = bytearray(data)
        struct.pack_into("<f", broken, len(data) - 16 - 4 * 10, value)
        with pytest.raises(FormatError, match="undefined"):
            decode(KEY, resealed(bytes(broken)))
        broken = bytearray(data)
        struct.pack_into("<d", broken, 24, value)
        with pytest.raises(FormatError, match="undefined"):
            decode(KEY, resealed(bytes(broken)))


def test_undefined_numbers_are_not_kept() -> None:
    rows = make_factors().rows.copy()
    rows[0, 0] = np.nan
    with pytest.raises(StoreError, match="undefined"):
        encode(KEY, make_factors(rows=rows))


def test_factors_larger_than_a_row_are_neither_kept_nor_read(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(KEY, make_factors())
    monkeypatch.setattr("rag_explain.store.codec.MAX_BYTES", len(data) - 1)
    with pytest.raises(StoreError, match="limit"):
        encode(KEY, make_factors())
    with pytest.raises(FormatError, match="cannot be stored"):
        decode(KEY, data)


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(InvalidInput, match="precision"):
        encode(KEY, make_factors(), "fp8")  # type: ignore[arg-type]
