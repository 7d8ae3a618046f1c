"""An explanation as it stands in a record: its figures, its strongest word pairs, and the whole matrix if asked for.

Words are what a person asks about months later, and what two encoders with different tokenizers have in common, so
pairs are kept by word wherever the texts are known. The matrix, where it is kept, is the explanation's own.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from rag_explain.errors import FormatError
from rag_explain.factors import Array
from rag_explain.log.redaction import MASK
from rag_explain.results.explanation import FORMAT, VERSION, Explanation, Pair
from rag_explain.results.serialization import read_notices, write_notices
from rag_explain.texts.tokens import Token

_CARRIED = ("additive", "method", "model", "fingerprint", "measure", "returned", "error")


def compact(
    explanation: Explanation, *, top: int, matrix: bool, query: str | None, document: str | None, redacted: bool
) -> dict[str, Any]:
    """Plain data. `query` and `document` are the texts as they will be written: masked, or None when not kept."""
    shown = explanation
    if explanation.unit == "token" and explanation.query is not None and explanation.document is not None:
        shown = explanation.by_word()
    data = {
        "score": explanation.score,
        "gap": explanation.gap,
        "unattributed": shown.unattributed,
        "surrogate": explanation.surrogate,
        **{name: getattr(explanation, name) for name in _CARRIED},
        "settings": dict(explanation.settings),
        "notices": write_notices(explanation.notices),
        "references": None if explanation.references is None else dict(explanation.references),
        "provenance": dict(explanation.provenance),
        "metadata_tokens": sum(token.part == "metadata" for token in explanation.document_tokens),
        "unit": shown.unit,
        "size": list(shown.pairs.shape),
        "absolute": _short(float(np.abs(shown.pairs, dtype=np.float64).sum())),
        "pairs": [
            [pair.query.start, pair.query.end, pair.document.start, pair.document.end, _short(pair.value)]
            for pair in shown.top_pairs(top)
        ],
    }
    if matrix:
        data["matrix"] = _pack_matrix(explanation, query, document, redacted)
    return data


def expand(data: Mapping[str, Any], query: str | None, document: str | None) -> Explanation:
    """The explanation of a record: whole where its matrix was kept, else only its strongest pairs.

    In the second case the matrix holds the pairs that were kept, and the corner holds all the others together, so that
    score and gap are the original's; `provenance["kept"]` says how many of how many pairs there are.
    """
    try:
        return _unpack_matrix(data, query, document) if data.get("matrix") else _from_pairs(data, query, document)
    except (KeyError, TypeError, ValueError, IndexError, zlib.error) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"the explanation in this record is damaged: {error!r}") from error


def kept_pairs(data: Mapping[str, Any], query: str | None, document: str | None) -> list[Pair]:
    """The pairs of a record, strongest first, each with its share among ALL pairs of the original explanation."""
    total = float(data["absolute"]) or 1.0
    return [
        Pair(_token(q0, q1, query), _token(d0, d1, document), float(value), abs(value) / total)
        for q0, q1, d0, d1, value in data["pairs"]
    ]


def _from_pairs(data: Mapping[str, Any], query: str | None, document: str | None) -> Explanation:
    cells = [((q0, q1), (d0, d1), value) for q0, q1, d0, d1, value in data["pairs"]]
    rows = sorted({cell[0] for cell in cells})
    columns = sorted({cell[1] for cell in cells})
    matrix = np.zeros((len(rows) + 1, len(columns) + 1))
    for row, column, value in cells:
        matrix[rows.index(row), columns.index(column)] += value
    if data["additive"]:
        matrix[-1, -1] = data["score"] - data["gap"] - matrix.sum()
    n_q, n_d = data["size"]
    return Explanation(
        query=query,
        document=document,
        query_tokens=tuple(_token(start, end, query) for start, end in rows),
        document_tokens=tuple(_token(start, end, document) for start, end in columns),
        matrix=matrix.astype(np.float32),
        score=data["score"],
        unit=data["unit"],
        provenance={**data["provenance"], "kept": f"the strongest {len(cells)} of {n_q * n_d} pairs"},
        settings=data["settings"],
        notices=read_notices(data["notices"], data),
        references=data["references"],
        **{name: data[name] for name in _CARRIED},
    )


def _pack_matrix(explanation: Explanation, query: str | None, document: str | None, redacted: bool) -> dict[str, Any]:
    whole = explanation.to_dict()
    tokens = [
        _tokens(whole["query_tokens"], query, redacted),
        _tokens(whole["document_tokens"], document, redacted),
    ]
    similarities = explanation.similarities
    return {
        "unit": explanation.unit,
        "shape": list(explanation.matrix.shape),
        "tokens": _pack(json.dumps(tokens, ensure_ascii=False).encode("utf-8", "surrogatepass")),
        "cells": _pack(explanation.matrix.astype("<f4").tobytes()),
        "similarities": None if similarities is None else _pack(similarities.astype("<f4").tobytes()),
    }


def _tokens(tokens: list[list[Any]], written: str | None, redacted: bool) -> list[list[Any]]:
    """Tokens whose vocabulary piece says no more than the text that is written beside them."""
    kept = []
    for start, end, part, piece in tokens:
        # The text of "metadata" tokens is not in the record, so no redaction hook has seen it.
        unseen = redacted and part == "metadata"
        hidden = part != "special" and (written is None or unseen or MASK in written[start:end])
        kept.append([start, end, part, "" if hidden else piece])
    return kept


def _unpack_matrix(data: Mapping[str, Any], query: str | None, document: str | None) -> Explanation:
    packed = data["matrix"]
    n_q, n_d = packed["shape"]
    query_tokens, document_tokens = json.loads(_unpack(packed["tokens"]).decode("utf-8", "surrogatepass"))
    similarities = packed["similarities"]
    return Explanation.from_dict(
        {
            **{name: data[name] for name in (*_CARRIED, "settings", "notices", "references", "provenance", "score")},
            "format": FORMAT,
            "version": VERSION,
            "query": query,
            "document": document,
            "query_tokens": query_tokens,
            "document_tokens": document_tokens,
            "unit": packed["unit"],
            "matrix": _cells(packed["cells"], (n_q, n_d)),
            "similarities": None if similarities is None else _cells(similarities, (n_q - 1, n_d - 1)),
        }
    )


def _token(start: int, end: int, text: str | None) -> Token:
    return Token("" if text is None else text[start:end], start, end, "text" if end > start else "special")


def _cells(packed: str, shape: tuple[int, int]) -> Array:
    return np.frombuffer(_unpack(packed), dtype="<f4").reshape(shape)


def _pack(raw: bytes) -> str:
    return base64.b64encode(zlib.compress(raw)).decode("ascii")


def _unpack(packed: str) -> bytes:
    return zlib.decompress(base64.b64decode(packed))


def _short(value: float) -> float:
    return float(f"{value:.6g}")  # a float32 has no more to say
