"""What the score loses without a part of a text, by the model's own embeddings of edited texts and nothing else.

    rows[i] = e(x) - e(x without part i)          rest = e(x) - sum of rows          e: as the score compares them

    pair(i, j) = <rows_q[i], rows_d[j]> = s(q, d) - s(q without i, d) - s(q, d without j) + s(q without i, d without j)

e is of length one where the score is a cosine. So a row of a document, multiplied with the whole query, is by
definition what the score loses without that part; anybody can check it with two calls of the model. The sum is the
score by definition of the rest, which checks nothing. A text in which no word is left is no text: its embedding is
zero, and it scores nothing.

It takes one embedding for each part and one for the whole, of any model that gives vectors for texts.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from typing import Any, ClassVar

import numpy as np
import torch

from rag_explain.encoder.batch import Batch
from rag_explain.errors import BudgetSpent, InvalidInput, whole_number
from rag_explain.factors import Array, Factors
from rag_explain.methods.base import ExplainedPair, Method, explained
from rag_explain.methods.parts import Parts, Vectors
from rag_explain.results.notices import LEFT_OUT, METHOD, NARROWED, PARTIAL, Notice
from rag_explain.results.spans import ValuedSpan
from rag_explain.results.spans import best as best_of
from rag_explain.scorers.base import Scorer
from rag_explain.scorers.checks import PROBE
from rag_explain.texts.passage import Passage
from rag_explain.texts.tokens import Role, Token, Unit
from rag_explain.texts.units import WHOLE

_ROUNDING = 1e-6  # less than this is no noise that anybody sees in a score
_UNKNOWN = "max_calls is spent before all texts were embedded: raise it to go on with what is known"
_TOLD = Notice(
    LEFT_OUT,
    "Each value is what the score loses without that part. The losses of words do not add up to that of their "
    "sentence, and what is left over belongs to no part, so that the sum checks nothing.",
    "note",
)


class Occluded(Parts):
    """A text without each of its parts."""

    def __init__(self, batch: Batch, index: int, unit: Unit) -> None:
        super().__init__(batch, index, unit)
        less = [self.without([number]) for number in range(len(self.parts))]
        self._is_left = [string is not None for string in less]
        self.strings += [string for string in less if string is not None]

    def rows(self, vectors: Vectors) -> tuple[Vectors, None]:
        whole, *less = vectors
        embedded = iter(less)
        rows = [whole - next(embedded) if is_left else whole for is_left in self._is_left]
        return np.array(rows).reshape(len(self.parts), len(whole)), None


class Occlusion(Method):
    """`occlusion`: leave out each word, or each sentence, and see what the score loses.

    `best=k`: by words, in two steps: each sentence first, and then the words of the k best ones alone.
    """

    name = "occlusion"
    edits = True
    default_unit = "sentence"
    options: ClassVar[tuple[str, ...]] = ("best",)

    def __init__(self, scorer: Scorer, layer: int | None = None, *, best: int | None = None) -> None:
        super().__init__(scorer, layer)
        if best is not None and (best := whole_number(best, "best")) < 1:
            raise InvalidInput(f"best must be a number of sentences, not {best}")
        self.best = best

    @property
    def settings(self) -> dict[str, Any]:
        return {name: value for name, value in super().settings.items() if (name, value) != ("best", None)}

    @property
    def kept_settings(self) -> dict[str, Any]:
        return {name: value for name, value in super().settings.items() if name != "best"}

    def narrows(self, unit: Unit) -> bool:
        return self.best is not None and unit == "word"

    def narrowed(self, passage: Passage, sentences: Sequence[ValuedSpan]) -> Passage:
        chosen = best_of(sentences, self.best or 0)
        return replace(passage, within=tuple(sorted((one.start, one.end) for one in chosen)))

    @property
    def notices(self) -> tuple[Notice, ...]:
        return (*super().notices, _TOLD)

    def grain(self, unit: Unit | None, default: Unit | None = None) -> Unit:
        """Words are the smallest parts: a text without half a word is no text that people write."""
        asked = super().grain(unit, default)
        return "word" if asked == "token" else asked

    def check(self) -> None:
        """Refuse a scorer that gives no vector per text."""
        self.scorer.embed([PROBE], "document")

    def edits_of(self, batch: Batch, index: int, unit: Unit) -> Parts:
        """The texts to embed for one text of a batch, and how its rows are made from them."""
        return Occluded(batch, index, unit)

    def whole(self, query: Batch) -> Factors:
        (vector,) = self._compared([query.passages[0]], query.role)
        return self._factors(query, 0, vector[None], vector, (WHOLE,), unit="whole")

    def factor(self, batch: Batch, unit: Unit) -> list[Factors]:
        unit = self.grain(unit)
        texts = [self.edits_of(batch, index, unit) for index in range(len(batch))]
        vectors = self._compared([string for text in texts for string in text.strings], batch.role)
        found, first = [], 0
        for index, text in enumerate(texts):
            own = vectors[first : (first := first + len(text.strings))]
            rows, references = text.rows(own)
            more = {"notices": self._told(batch, index), "references": references}
            found.append(self._factors(batch, index, rows, own[0], text.parts, unit=unit, **more))
        return found

    def embedded(self, batch: Batch, unit: Unit) -> list[Passage]:
        texts = [self.edits_of(batch, index, self.grain(unit)) for index in range(len(batch))]
        return [string for text in texts for string in text.strings]

    def partial(self, batch: Batch, unit: Unit) -> Factors:
        text = self.edits_of(batch, 0, unit := self.grain(unit))
        found = self.scorer.at_hand(text.strings, batch.role)
        if found[0] is None:
            raise BudgetSpent(_UNKNOWN)
        unknown = np.full_like(found[0], np.nan)
        vectors = self._directed(np.stack([unknown if one is None else one for one in found]).astype(np.float64))
        rows, references = text.rows(vectors)
        is_known = [bool(np.isfinite(row).all()) for row in rows]
        if not any(is_known):
            raise BudgetSpent(_UNKNOWN)
        parts = tuple(compress(text.parts, is_known))
        told = (
            f"Only {len(parts)} of {len(text.parts)} {unit}s were left out, since max_calls is spent: what the others "
            "carry is with what belongs to no part."
        )
        missing = () if all(is_known) else (Notice(PARTIAL, told, side=batch.role),)
        more = {"notices": (*self._told(batch, 0), *missing), "references": references}
        return self._factors(batch, 0, rows[is_known], vectors[0], parts, unit=unit, **more)

    def finish(self, query: Factors, document: Factors, matrix: Array, score: float) -> ExplainedPair:
        sides = (("query", query, document), ("document", document, query))
        errors = {
            f"{side} {name}": value * float(np.linalg.norm(other.embedding))
            for side, own, other in sides
            for name, value in (own.references or {}).items()
        }
        notices = self._drowned(query, document, matrix)
        return explained(query, document, matrix, score, notices=notices, references=errors or None)

    def _told(self, batch: Batch, index: int) -> tuple[Notice, ...]:
        """What a reader must know of how a text was read, and of which of its words were left out."""
        within = batch.passages[index].within
        if within is None:
            return batch.notices[index]
        text = (
            f"Only the words of the {len(within)} best sentences were left out, each by itself: what the others carry "
            "is with what belongs to no part."
        )
        return (*batch.notices[index], Notice(NARROWED, text, "note", batch.role))

    def _drowned(self, query: Factors, document: Factors, matrix: Array) -> tuple[Notice, ...]:
        """How many values are smaller than what the embedder alone makes of one text, asked twice."""
        noise = self.scorer.noise
        if noise < _ROUNDING:
            return ()
        limit = 2 * noise * float(np.linalg.norm(query.embedding)) * float(np.linalg.norm(document.embedding))
        carried = np.abs(matrix[:, :-1].sum(axis=0))
        lost = int((carried < limit).sum())
        told = (
            f"The embedder gives a text another vector each time, off by {noise:.1e} of its length: values below "
            f"{limit:.1e} are noise, as {lost} of {len(carried)} of the document are."
        )
        return (Notice(METHOD, told, "warning" if lost else "note"),)

    def _compared(self, texts: Sequence[Passage], role: Role) -> Vectors:
        """(D, e): the embeddings as the score compares them."""
        return self._directed(self.scorer.embed(texts, role).astype(np.float64))

    def _directed(self, vectors: Vectors) -> Vectors:
        if self.scorer.measure != "cosine":
            return vectors
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        unit: Vectors = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
        return unit

    def _factors(
        self, batch: Batch, index: int, rows: Vectors, whole: Vectors, parts: tuple[Token, ...], **more: Any
    ) -> Factors:
        numbers = {"rows": rows, "rest": whole - rows.sum(axis=0), "embedding": whole, "norm": np.ones(())}
        given = {name: torch.as_tensor(values) for name, values in numbers.items()}
        return self.build(batch, index, **given, tokens=parts, **more)
