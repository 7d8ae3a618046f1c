"""Factors that no encoder made: any shape, any size, and the same ones for the same seed."""

from __future__ import annotations

import numpy as np

from rag_explain.factors import Factors
from rag_explain.store import NewFactors, factors_key
from rag_explain.texts.tokens import Token


def make_factors(seed: int = 0, n: int = 7, h: int = 16, scale: float = 0.1, **changes: object) -> Factors:
    random = np.random.default_rng(seed)
    words = [f"word{seed}x{i}" for i in range(n)]
    starts = np.cumsum([0] + [len(word) + 1 for word in words[:-1]]).tolist() if n else []
    rows = (random.normal(size=(n, h)) * scale).astype(np.float32)
    rest = (random.normal(size=h) * scale).astype(np.float32)
    given = {
        "tokens": tuple(
            Token(word, start, start + len(word), "text", f"##{word}")
            for word, start in zip(words, starts, strict=True)
        ),
        "rows": rows,
        "rest": rest,
        "embedding": rows.sum(0) + rest,
        "norm": 2.5,
        "role": "document",
        "method": "bilrp",
        "settings": {"layer": 0, "rules": "lrp"},
        "fingerprint": "f" * 32,
    }
    return Factors(**{**given, **changes})  # type: ignore[arg-type]  # a test may change any field


def make_key(seed: int = 0, **changes: object) -> bytes:
    given = {"role": "document", "fingerprint": "f" * 32, "method": "bilrp", "settings": {}, "precision": "fp16"}
    return factors_key(f"text {seed}", **{**given, **changes})  # type: ignore[arg-type]


def make_entry(seed: int = 0, ids: tuple[str, ...] = (), **changes: object) -> NewFactors:
    return NewFactors(make_key(seed), make_factors(seed, **changes), ids)  # type: ignore[arg-type]
