"""What a method is: one way to split a scorer's score over pairs of tokens."""

from abc import ABC
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from rag_explain import pairing
from rag_explain.devices import to_host
from rag_explain.encoder.batch import Batch, Side
from rag_explain.encoder.model import Encoder
from rag_explain.errors import InvalidInput
from rag_explain.factors import Array, Factors
from rag_explain.pairing import Placed
from rag_explain.results.explanation import summed
from rag_explain.results.notices import Notice, cut_sides
from rag_explain.results.spans import ValuedSpan
from rag_explain.results.terms import Term
from rag_explain.scorers.base import Scorer
from rag_explain.scorers.checks import PROBE
from rag_explain.texts.passage import Passage
from rag_explain.texts.tokens import Token, Unit, known_unit
from rag_explain.texts.units import Index, text_units

_QUERY = "short text"


@dataclass(frozen=True, eq=False, kw_only=True)
class ExplainedPair:
    """A query and a document explained: what a method gives for an `Explanation`, whose fields of the same names say
    more. `unit` is what the document's tokens are; `provenance` is not the method's to say.
    """

    query_tokens: tuple[Token, ...]
    document_tokens: tuple[Token, ...]
    matrix: Array
    score: float
    unit: Unit = "token"
    references: Mapping[str, Any] | None = None
    similarities: Array | None = None
    terms: tuple[Term, ...] = ()
    returned: float | None = None
    error: float | None = None
    notices: tuple[Notice, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)


def explained(
    query: Factors | Side, document: Factors | Side, matrix: Array, score: float, **more: Any
) -> ExplainedPair:
    """The pair of two texts that were read, with what could not be read of them."""
    fields = {"query_tokens": query.tokens, "document_tokens": document.tokens, "unit": document.unit, **more}
    fields["notices"] = (*query.notices, *document.notices, *more.get("notices", ()))
    return ExplainedPair(matrix=matrix, score=float(score), **fields)


def by_unit(pair: ExplainedPair, passage: Passage, unit: Unit) -> ExplainedPair:
    """A pair whose query is grouped by words, without rows and columns of its own for special tokens and metadata."""
    if unit == "token":
        return pair
    query, rows = _text_only(pair.query_tokens)
    if pair.unit == unit:
        document, columns = _text_only(pair.document_tokens)
    else:  # finer, since the store had that
        cut = "document" in cut_sides(pair.notices)
        document, columns = text_units(pair.document_tokens, passage.text, unit, truncated=cut)
    matrix = summed(pair.matrix, rows, columns, (len(query) + 1, len(document) + 1))
    return replace(pair, query_tokens=query, document_tokens=document, matrix=matrix, unit=unit)


def _text_only(units: tuple[Token, ...]) -> tuple[tuple[Token, ...], Index]:
    """The units of the caller's text, and for each unit its index among them; -1 for special tokens and metadata."""
    is_text = np.array([token.part == "text" for token in units], dtype=bool)
    index: Index = np.where(is_text, np.cumsum(is_text) - 1, -1)
    return tuple(token for token in units if token.part == "text"), index


class Method(ABC):
    """One way to split a score, bound to a scorer.

    Options are keyword arguments of the constructor; `settings` is what decides the numbers, and is part of the key of
    everything that is kept.
    """

    name: ClassVar[str]
    # Whether the cells are meant to sum to the score.
    additive: ClassVar[bool] = True
    # Whether a text's half can be computed without the other text, and is therefore worth keeping.
    has_factors: ClassVar[bool] = True
    # Whether the matrix is the product of the two texts' factors and nothing is chosen from it afterwards: such factors
    # can be grouped by words and sentences, and sliced by dimensions.
    linear: ClassVar[bool] = True
    # Whether a row is what an edit of the text changes. Such rows do not sum to those of a coarser unit, so that each
    # unit is computed for itself; and they are kept as soon as they are known, since nothing cheaper is.
    edits: ClassVar[bool] = False
    # What the cells of an explanation are of unless a caller says so.
    default_unit: ClassVar[Unit] = "token"
    # Whether the embedding in the factors is the encoder's own to the last bit, good enough to search with.
    embeds: ClassVar[bool] = False
    # Whether each row of a text's factors takes a pass of its own.
    pushes_rows: ClassVar[bool] = False
    # The method's own options, by the names of its attributes: they decide the numbers.
    options: ClassVar[tuple[str, ...]] = ()
    # Bytes that tangents on their way may take: an option of every method, which changes no number. None: what suits
    # the device.
    max_bytes: int | None = None

    def __init__(self, scorer: Scorer, layer: int | None = None) -> None:
        self.scorer = scorer
        layers = self.layers
        if layer is not None and not layers:
            raise InvalidInput(f"{self.name} has no layer to choose")
        if layer is not None and layer not in layers:
            raise InvalidInput(f"layer must be between {layers[0]} and {layers[-1]} for this encoder, not {layer}")
        self.layer = self.default_layer if layer is None else layer

    @property
    def layers(self) -> range:
        """The encoder blocks whose input the method can attribute to; none where there is nothing to choose."""
        return range(0)

    @property
    def default_layer(self) -> int:
        return 0

    @property
    def settings(self) -> dict[str, Any]:
        """What decides this method's numbers, besides the scorer."""
        layer = {"layer": self.layer} if self.layers else {}
        return {**layer, **{option: getattr(self, option) for option in self.options}}

    @property
    def measure(self) -> str:
        """What the score is that this method splits."""
        return self.scorer.measure

    @property
    def notices(self) -> tuple[Notice, ...]:
        """What every explanation by this method must say, the scorer's own notices among it."""
        return self.scorer.notices

    @property
    def kept_settings(self) -> dict[str, Any]:
        """What decides the factors of a text in the store: the settings, but for those that only choose texts."""
        return self.settings

    def narrows(self, unit: Unit) -> bool:
        """Whether the words of a document are only those of its best sentences, which are found out first."""
        return False

    def narrowed(self, passage: Passage, sentences: Sequence[ValuedSpan]) -> Passage:
        """The document with its best sentences marked, for a method that narrows."""
        return passage

    def grain(self, unit: Unit | None, default: Unit | None = None) -> Unit:
        """The unit to explain in when this one is asked for; when none is, `default`, else the method's own."""
        return (default or self.default_unit) if unit is None else known_unit(unit)

    def check(self) -> None:
        """Refuse the scorer when the method would be wrong on it, or cannot explain a short pair.

        Called once, when an Explainer is made.
        """
        query = self.prepare(self.scorer.read([Passage(_QUERY)], "query"))
        self.cold(query, self.scorer.read([Passage(PROBE)], "document"))

    @property
    def asks_whole(self) -> bool:
        """Whether what a document carries over the whole query takes less than pairs: highlights are asked that way."""
        return self.linear

    def prepare(self, query: Batch, unit: Unit = "token") -> Any:
        """What `cold` and `warm` need of the query: its factors, or the batch itself for methods without."""
        return self.factor(query, unit)[0] if self.has_factors else query

    def whole(self, query: Batch) -> Any:
        """The query as one row, for what a document carries over all of it; a method that knows a cheaper way takes it.

        Where `asks_whole`: what is chosen among tokens is not chosen among their sum.
        """
        return self.factor(query, "token")[0].as_whole()

    def cold(self, query: Any, documents: Batch) -> list[ExplainedPair]:
        """Each document of a batch, explained; a method that knows a cheaper way builds no factors."""
        return [self.pair(query, factors) for factors in self.factor(documents, "token")]

    def factor(self, batch: Batch, unit: Unit) -> list[Factors]:
        """The factors of each text of a batch; a method that knows a cheaper way builds no more rows than units."""
        if unit != "token" and self.has_factors and not self.linear:
            raise InvalidInput(f"{self.name} chooses among tokens: its factors cannot be grouped by {unit}s")
        return [
            factors.grouped(unit, batch.passages[index], batch.spans[index] if batch.spans else None)
            for index, factors in enumerate(self.token_factors(batch))
        ]

    def embedded(self, batch: Batch, unit: Unit) -> list[Passage]:
        """The texts that are embedded for the factors of a batch."""
        raise InvalidInput(f"{self.name} sends no texts to be embedded: there is nothing to plan")

    def partial(self, batch: Batch, unit: Unit) -> Factors:
        """The factors of a single text as far as they can be told from what was computed: a notice says where not."""
        raise InvalidInput(f"{self.name} has no factors of a part of a text")

    def passes(self, batch: Batch, unit: Unit) -> list[int] | None:
        """How many tangents run through each text for its factors; None where one pass makes all rows.

        One text of many rows fills the machine, and rows that another text does not have would be computed for nothing.
        """
        return batch.rows(unit) if self.pushes_rows else None

    def token_factors(self, batch: Batch) -> list[Factors]:
        """The factors of each text of a batch, with one row per token."""
        raise InvalidInput(f"{self.name} explains pairs of texts: it has no factors to compute or to keep")

    def pair(self, query: Factors, document: Factors) -> ExplainedPair:
        """A pair whose factors were both just computed: one product of (n_q + 1, h) and (h, n_d + 1)."""
        return self.finish(query, document, *pairing.pair(query, document))

    def warm(self, query: Factors, documents: Sequence[Placed]) -> list[ExplainedPair]:
        """Explain documents whose factors are kept: one product (n_q + 1, h) @ (h, sum of n_d + 1) for all."""
        matrices, scores = pairing.pairs(query, documents)
        return [
            self.finish(query, document.factors, matrix, float(score))
            for document, matrix, score in zip(documents, matrices, scores, strict=True)
        ]

    def finish(self, query: Factors, document: Factors, matrix: Array, score: float) -> ExplainedPair:
        """From the product of two texts' factors, (n_q + 1, n_d + 1) in score units, to what the method says of it."""
        return explained(query, document, matrix, score)

    def build(
        self, batch: Batch, index: int, *, rows: Tensor, rest: Tensor, embedding: Tensor, norm: Tensor, **more: Any
    ) -> Factors:
        """Factors of text `index` of a batch from (n, e) rows, (e,) rest and embedding; the error is measured here.

        `more` are other fields of the factors: `unit` and its `tokens`, `references`.
        """
        error = (rows.sum(dim=0) + rest - embedding).norm() / embedding.norm().clamp_min(1e-30)
        fields = {"tokens": batch.tokens[index], "notices": batch.notices[index], **more}
        return Factors(
            rows=to_numpy(rows),
            rest=to_numpy(rest),
            embedding=to_numpy(embedding),
            norm=float(norm),
            role=batch.role,
            method=self.name,
            settings=self.settings,
            fingerprint=batch.fingerprint or self.scorer.fingerprint,
            error=float(error),
            **fields,
        )


class EncoderMethod(Method):
    """A method that looks inside an encoder: its rows belong to the input of one of the encoder's blocks."""

    # Whether a caller may choose which block that is.
    chooses_layer: ClassVar[bool] = True

    def __init__(self, scorer: Scorer, layer: int | None = None) -> None:
        self.encoder: Encoder = scorer.encoder  # refused in words by a scorer that has none
        super().__init__(scorer, layer)

    @property
    def layers(self) -> range:
        return range(self.encoder.n_blocks if self.chooses_layer else 0)


class PairMethod(EncoderMethod):
    """A method that needs both texts at once and ranks pairs: nothing of it is kept for another pair."""

    additive = False
    has_factors = False
    linear = False
    # Whether vectors of the query's tokens are compared with those of the document's.
    compares_tokens: ClassVar[bool] = False

    @property
    def notices(self) -> tuple[Notice, ...]:
        return (*super().notices, *(self.scorer.token_notices if self.compares_tokens else ()))

    def check(self) -> None:
        if self.compares_tokens:
            self.encoder.check_comparable()
        super().check()

    def ranked(self, query: Batch, documents: Batch, tables: Iterable[Tensor], scores: Tensor) -> list[ExplainedPair]:
        """What the method says of the query and each document: values (n_q, n_d) of each, and no rest."""
        return [
            explained(query.side(0), documents.side(index), np.pad(to_numpy(table), ((0, 1), (0, 1))), float(score))
            for index, (table, score) in enumerate(zip(to_host(*tables), *to_host(scores), strict=True))
        ]


def to_numpy(tensor: Tensor) -> Array:
    """A float32 copy in main memory."""
    return np.ascontiguousarray(tensor.detach().to("cpu", torch.float32).numpy())
