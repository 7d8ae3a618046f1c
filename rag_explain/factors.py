"""Factors: one text's half of every explanation it will ever be in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from rag_explain.errors import InvalidInput
from rag_explain.results.notices import Notice, cut_sides
from rag_explain.results.readonly import ReadOnly, readonly, readonly_mapping
from rag_explain.texts.passage import Passage
from rag_explain.texts.segments import Span
from rag_explain.texts.tokens import Role, Token, Unit
from rag_explain.texts.units import WHOLE, all_units

Array = NDArray[np.float32]


@dataclass(frozen=True, eq=False, kw_only=True)
class Factors(ReadOnly):
    """One text's half of every explanation: `embedding = rows.sum(0) + rest`, up to `error`.

    Attributes:
        tokens: the n tokens, words or sentences that the rows belong to. By word or sentence, all special and prompt
            tokens together are one of them (`part="special"`), and so is each line of metadata (`part="metadata"`).
            A query may be one row as a whole.
        rows: (n, h) float32, what each token contributes to the embedding.
        rest: (h,) float32, what no token owns.
        block: (n + 1, h) float32, the rows and then the rest: what `pairing` multiplies.
        embedding: (h,) float32, the encoder's own embedding, before it is divided by `norm`.
        norm: the number that the embedding is divided by in the score (1.0 for a dot product).
        notices: what the encoder could not read of the text.
        error: |rows.sum(0) + rest - embedding| / |embedding|, measured, not assumed.
    """

    tokens: tuple[Token, ...]
    rows: Array
    rest: Array
    embedding: Array
    norm: float
    role: Role
    method: str
    settings: Mapping[str, Any]
    fingerprint: str
    unit: Unit | Literal["whole"] = "token"
    notices: tuple[Notice, ...] = ()
    error: float = 0.0
    references: Mapping[str, Any] | None = None
    block: Array = field(init=False, repr=False)
    memory: Array = field(init=False, repr=False)  # the block, writeable: torch has no read-only tensors

    def __post_init__(self) -> None:
        rows, rest = np.asarray(self.rows), np.asarray(self.rest)
        if rows.ndim != 2 or rows.shape[0] != len(self.tokens):
            raise InvalidInput(f"rows must be ({len(self.tokens)}, h), one row per token, not {rows.shape}")
        embedding = readonly(self.embedding)
        for name, vector in (("rest", rest), ("embedding", embedding)):
            if vector.shape != (rows.shape[1],):
                raise InvalidInput(f"{name} must be ({rows.shape[1]},), not {vector.shape}")
        block = np.vstack([rows, rest], dtype=np.float32)
        view = block.view()
        view.flags.writeable = False
        parts = {"memory": block, "block": view, "rows": view[:-1], "rest": view[-1], "embedding": embedding}
        mappings = {name: readonly_mapping(getattr(self, name)) for name in ("settings", "references")}
        for name, value in {**parts, **mappings, "tokens": tuple(self.tokens)}.items():
            object.__setattr__(self, name, value)

    @property
    def truncated(self) -> bool:
        """Whether the encoder read only a part of the text."""
        return bool(cut_sides(self.notices))

    def grouped(self, unit: Unit, passage: Passage, spans: Sequence[Span] | None = None) -> Self:
        """The factors of the same text by words or sentences: rows of tokens are summed.

        `spans` are where the tokens stand in the passage's string: with them each line of metadata has its own row.
        """
        if unit == self.unit:
            return self
        if self.unit != "token":
            raise InvalidInput(f"factors by {self.unit}s cannot be grouped again: group those of tokens")
        units, index = all_units(self.tokens, passage, unit, truncated=self.truncated, spans=spans)
        rows = np.zeros((len(units), self.rows.shape[1]))
        np.add.at(rows, index, self.rows)
        return replace(self, tokens=units, rows=rows.astype(np.float32), unit=unit)

    def as_whole(self) -> Self:
        """The factors of the same text as one row, its embedding, with no rest."""
        rows, rest = self.embedding[None], np.zeros_like(self.embedding)
        return replace(self, tokens=(WHOLE,), rows=rows, rest=rest, unit="whole")

    def __repr__(self) -> str:
        n, h = self.rows.shape
        return f"Factors({self.role}, {n} {self.unit}s x {h}, method={self.method!r}, error={self.error:.1e})"
