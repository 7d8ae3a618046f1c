"""Calibration: what an encoder gives for texts of one corpus that have nothing to do with each other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np

from rag_explain.errors import FormatError, InvalidInput
from rag_explain.probes import Probes
from rag_explain.results import serialization as plain
from rag_explain.results.display import Paged
from rag_explain.results.metric import Metric

LINE = 0.99
"""The share of unrelated pairs below the line: what is not above it is no better than chance."""

FORMAT, VERSION = "rag_explain.calibration", 1
_WHAT = "a calibration"
# The shares at which the distribution is kept: closer where hits are.
LEVELS = (*np.round(np.arange(0, 0.95, 0.01), 4), *np.round(np.arange(0.95, 0.99, 0.005), 4))
LEVELS = tuple(float(one) for one in (*LEVELS, *np.round(np.arange(0.99, 0.999, 0.001), 4), 0.999, 0.9995, 0.9999, 1.0))


@dataclass(frozen=True, kw_only=True)
class Calibration(Paged):
    """The distribution of the similarities of unrelated pairs, for one encoder and one corpus.

    Attributes:
        levels, scores: shares of the pairs, and the similarity below which so many of them are.
        errors: the standard error of each share, from how queries differ.
        queries, documents, pairs: how many of each were looked at.
        source: "queries", where the caller gave them; "sentences" of other documents, where not.
        metric: the unit of the index, by the name of a `rag_explain.results.metric.Metric`.
        model, fingerprint, probes: whose similarities these are.
    """

    _title: ClassVar[str] = "How sure?"

    levels: tuple[float, ...]
    scores: tuple[float, ...]
    errors: tuple[float, ...]
    queries: int
    documents: int
    pairs: int
    source: Literal["queries", "sentences"]
    metric: str = "cosine"
    model: str = ""
    fingerprint: str = ""
    probes: Probes | None = field(default=None, compare=False, repr=False)

    def standing(self, similarity: float) -> float:
        """The share of unrelated pairs that are below this similarity."""
        return float(np.interp(similarity, self.scores, self.levels, left=0.0, right=1.0))

    def line(self, share: float = LINE) -> float:
        """The similarity below which this share of unrelated pairs is."""
        if not isinstance(share, (int, float)) or not 0 <= share <= 1:
            raise InvalidInput(f"share must be between 0 and 1, not {share!r}")
        return float(np.interp(share, self.levels, self.scores))

    def error(self, share: float = LINE) -> float:
        """The standard error of a share: how far another sample of queries would move it."""
        return float(np.interp(share, self.levels, self.errors))

    def threshold(self, share: float = LINE) -> float:
        """The same line as a score of the index, in its own unit: for `min_score`, or a store's own threshold."""
        found = Metric.named(self.metric).score(self.line(share))
        if found is None:
            raise InvalidInput(f"a score of this index ({self.metric}) does not tell a similarity: use line()")
        return found

    def fits(self, fingerprint: str, probes: Probes, tolerance: float) -> bool:
        """Whether these are the similarities of an encoder of this identity."""
        return self.fingerprint == fingerprint and (self.probes is None or self.probes.distance(probes) <= tolerance)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: everything that `from_dict` needs, and the format's version."""
        return {"format": FORMAT, "version": VERSION, **plain.fields_to_dict(self, _FIELDS)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`; refuses data of another format or of another version."""
        found = plain.made(cls, plain.fields_from_dict(data, _FIELDS, FORMAT, VERSION, _WHAT), _WHAT)
        if not len(found.levels) == len(found.scores) == len(found.errors) > 1:
            raise FormatError(f"{_WHAT} is damaged: it has not as many scores as shares")
        return found

    def save(self, path: str | Path) -> None:
        """Write it as JSON, for a store that has no folder of its own here."""
        Path(path).write_text(plain.to_json(self.to_dict()), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """What `save` wrote."""
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except OSError as error:
            raise InvalidInput(f"there is no calibration at {path}: {error.strerror}") from error
        except ValueError as error:
            raise FormatError(f"{_WHAT} at {path} is damaged: {error}") from error

    def __repr__(self) -> str:
        return f"Calibration({self.pairs:,} unrelated pairs, {LINE:.0%} below {self.line():.4f}, {self.model!r})"


def _floats(values: Any, data: Mapping[str, Any]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


_FIELDS = plain.table(
    Calibration,
    levels=(list, _floats),
    scores=(list, _floats),
    errors=(list, _floats),
    probes=(Probes.to_dict, lambda value, data: Probes.from_dict(value)),
)
