"""What a model computes for a few fixed texts: its identity by behaviour, kept wherever its numbers are kept.

A digest of weights and settings tells models apart that differ in something it reads. What it does not read shows in
what the model computes. Numbers differ in the last digits between machines and numbers of threads, so they are kept and
compared with a tolerance: a hash of rounded numbers would flip at the boundary.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rag_explain.errors import FormatError

TEXTS = (
    "Why was this short text found?",
    "How do bees find their way home: by the sun, or by landmarks?",
    "Der Vertrag endet am 31.12.2024; 第3条 gilt weiter. ✓",
    "not refundable",
)


@dataclass(frozen=True, eq=False)
class Probes:
    """One array of any shape per probe: what a model gave for it."""

    values: tuple[NDArray[np.float32], ...]

    @classmethod
    def of(cls, values: Iterable[Any]) -> Probes:
        return cls(tuple(np.ascontiguousarray(value, dtype=np.float32) for value in values))

    def distance(self, other: Probes) -> float:
        """The largest difference of a probe, as a share of its length; infinite where shapes or numbers differ."""
        if [one.shape for one in self.values] != [one.shape for one in other.values]:
            return np.inf
        pairs = zip(self.values, other.values, strict=True)
        shares = [float(np.linalg.norm(a - b) / max(float(np.linalg.norm(a)), 1e-30)) for a, b in pairs]
        worst = max(shares, default=0.0)
        return worst if np.isfinite(worst) else np.inf

    def directions(self) -> Probes:
        """The same, each of length one."""
        return Probes.of(value / max(float(np.linalg.norm(value)), 1e-30) for value in self.values)

    @cached_property
    def id(self) -> str:
        """Of these very numbers: a model that matches them within the tolerance goes by this id too."""
        digest = blake2b(digest_size=8)
        for value in self.values:
            digest.update(f"{value.shape}".encode() + value.tobytes())
        return digest.hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        raw = b"".join(value.astype("<f4").tobytes() for value in self.values)
        return {"shapes": [list(value.shape) for value in self.values], "values": base64.b64encode(raw).decode("ascii")}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Probes:
        """The inverse of `to_dict`."""
        try:
            shapes = [tuple(map(int, shape)) for shape in data["shapes"]]
            numbers = np.frombuffer(base64.b64decode(data["values"]), dtype="<f4")
            parts = np.split(numbers, np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]) if shapes else []
            return cls.of(part.reshape(shape) for part, shape in zip(parts, shapes, strict=True))
        except (ValueError, TypeError, LookupError) as error:
            raise FormatError(f"the probes that were kept of a model are damaged: {error!r}") from error
