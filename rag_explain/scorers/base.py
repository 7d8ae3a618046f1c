"""Scorer: something people rank by. It reads a query and a document and gives one number."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Self, get_args

import numpy as np
from numpy.typing import NDArray

from rag_explain.encoder.batch import Batch
from rag_explain.encoder.chunking import window_spans
from rag_explain.encoder.probing import Observed, tolerance
from rag_explain.errors import InvalidInput
from rag_explain.probes import TEXTS, Probes
from rag_explain.results.notices import Notice
from rag_explain.results.terms import Term
from rag_explain.texts.passage import Passage
from rag_explain.texts.segments import Span
from rag_explain.texts.tokens import Role

if TYPE_CHECKING:
    from torch import Tensor

    from rag_explain.encoder.cross_encoder import PairEncoder
    from rag_explain.encoder.model import Encoder
    from rag_explain.encoder.reading import Reader
    from rag_explain.encoder.shared_model import SharedModel
    from rag_explain.encoder.watch import Watch


class TermSplit(NamedTuple):
    """A score that is a sum over terms. `matrix` (n_q + 1, n_d + 1) is what pairs of tokens and the rest carry."""

    matrix: NDArray[np.float64]
    score: float
    terms: tuple[Term, ...]
    notices: tuple[Notice, ...] = ()


class Scorer(ABC):
    """One kind of model, bound to a model. What a kind does not offer is refused in words, by the kind itself.

    Attributes:
        measure: what the score is: "cosine", "dot", "MaxSim", "logit" and so on; all that a view needs to label it.
        methods: what can split this score, by name or as a subclass of `Method`; the first is the default.
        notices: what every explanation of this scorer must say.
        token_notices: what must be said where vectors of tokens are compared.
    """

    name: str
    measure: str
    methods: tuple[Any, ...]
    notices: tuple[Notice, ...] = ()
    token_notices: tuple[Notice, ...] = ()
    is_metered: bool = False  # whether every text that is embedded may cost money, or time on a machine elsewhere
    noise: float = 0.0  # how far two vectors of one text are apart, as a share of their length
    tolerance: float = 1e-4  # what may be rounding in `probes`, on another machine say, as a share of their size

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """The model's identity: factors and indexes of another fingerprint are not this model's."""

    @property
    def probes(self) -> Probes:
        """What the model computes for the probes: its identity by behaviour, where the fingerprint cannot tell."""
        return Probes.of([self.score(TEXTS[0], TEXTS)])

    @property
    def own_probes(self) -> Probes:
        """The same by the model's own public functions, as it was loaded."""
        return self.probes

    @property
    def watch(self) -> Watch | None:
        """What looks whether the user's model has changed; None where there is no torch model."""
        return None

    @abstractmethod
    def read(self, passages: Sequence[Passage], role: Role) -> Batch:
        """The texts in units with offsets into the caller's own text."""

    @abstractmethod
    def score(self, query: str, documents: Sequence[str | Passage]) -> NDArray[np.float64]:
        """(D,): the number that is split, by the model's own public way to it."""

    def scores(self, queries: Sequence[str], documents: Sequence[str | Passage]) -> NDArray[np.float64]:
        """(Q, D): the score of each query with each document."""
        return np.stack([self.score(query, documents) for query in queries])

    def returned(self, query: str, documents: Sequence[str | Passage]) -> NDArray[np.float64]:
        """(D,): what the user sees, where that is a function of the score, such as a sigmoid of a logit."""
        return self.score(query, documents)

    def read_pair(self, query: Passage, document: Passage) -> Batch:
        """Both texts, cut together: a batch of two, the query first."""
        raise InvalidInput(f"{self.name} reads each text by itself, and not in pairs")

    def embed(self, passages: Sequence[str | Passage], role: Role) -> NDArray[np.float32]:
        """(D, e): one vector per text, as an index holds them."""
        raise InvalidInput(f"{self.name} gives no vector per text: an index cannot be made of it")

    def at_hand(self, passages: Sequence[Passage], role: Role) -> list[NDArray[np.float32] | None]:
        """(e,) of each text that was embedded lately, where that is remembered: nothing is computed."""
        return [None] * len(passages)

    def take(self, passages: Sequence[Passage], vectors: Sequence[Any]) -> None:
        """Documents' vectors (e,) that an index keeps: where texts cost, these are not embedded."""

    @property
    def texts_left(self) -> int | None:
        """How many texts may still be embedded; None: there is no limit."""
        return None

    @property
    def encoder(self) -> Encoder:
        """The torch model whose embedding is taken apart."""
        raise InvalidInput(f"{self.name} has no embedding to be taken apart: use {self._own_methods}")

    @property
    def pair_encoder(self) -> PairEncoder:
        """The torch model that reads both texts at once, whose logit is taken apart."""
        raise InvalidInput(f"{self.name} reads each text by itself, and gives no logit: use {self._own_methods}")

    def labelled(self, label: int | str | None) -> Self:
        """The scorer of one label, for models that give a number for each of several."""
        if label is not None:
            raise InvalidInput(f"{self.name} gives one number, the {self.measure}: leave out the label")
        return self

    @property
    def reader(self) -> Reader:
        """What splits texts into tokens, and says how many are read."""
        raise InvalidInput(f"{self.name} has no tokens to count")

    def token_vectors(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(D, n, h) a vector of length one per position; (D, n), in main memory, which of them are compared."""
        raise InvalidInput(f"{self.name} has no vectors of tokens to be compared: use {self._own_methods}")

    def by_terms(self, query: Batch, documents: Batch) -> Iterator[TermSplit]:
        """The score of each document, split over the terms in which the texts meet."""
        raise InvalidInput(f"{self.name} is no sum over terms: use {self._own_methods}")

    def window_spans(self, text: str, sentences: Sequence[Span]) -> list[Span]:
        """Overlapping parts of a long text that are each read whole, cut between sentences."""
        return [(0, len(text))]

    def describe(self) -> dict[str, str]:
        """What the model is and how it reads texts, for people: a few facts by name."""
        return {"score": ", ".join([self.measure, *(notice.text for notice in self.notices)])}

    @property
    def device(self) -> str:
        """Where factors are multiplied."""
        return "cpu"

    def computing(self) -> AbstractContextManager[None]:
        """Entered around everything that computes, so that no state of the caller's reaches into it."""
        return nullcontext()

    @property
    def _own_methods(self) -> str:
        return ", ".join(method if isinstance(method, str) else method.name for method in self.methods)


class EncoderScorer(Scorer):
    """A scorer that reads texts and computes by a torch model."""

    def __init__(self, encoder: SharedModel) -> None:
        self._encoder = encoder
        self.name = encoder.name
        self.tolerance = tolerance(encoder.dtype)
        self._probes = lru_cache(maxsize=1)(self._probed)

    @property
    def fingerprint(self) -> str:
        return self._encoder.fingerprint

    @property
    def probes(self) -> Probes:
        return self._probes(self.fingerprint)

    @property
    def observed(self) -> Observed:
        """What the model's own functions gave for the probes."""
        return self._encoder.observed

    @property
    def own_probes(self) -> Probes:
        return self.observed.probes

    @property
    def watch(self) -> Watch:
        return self._encoder.watch

    def _probed(self, fingerprint: str) -> Probes:
        """In the order of `own_probes`. The fingerprint is there for the cache."""
        with self.computing():
            return Probes.of(one for role in get_args(Role) for one in self.probe_vectors(role))

    @abstractmethod
    def probe_vectors(self, role: Role) -> Iterable[NDArray[np.float32]]:
        """What is computed here for each probe in this role, in the form in which the model's own functions give it."""

    @property
    def device(self) -> str:
        return str(self._encoder.device)

    def describe(self) -> dict[str, str]:
        return {**super().describe(), **self._encoder.describe()}

    def computing(self) -> AbstractContextManager[None]:
        return self._encoder.computing()

    def read(self, passages: Sequence[Passage], role: Role) -> Batch:
        # Looked at once, before anything is computed: not again for each text whose factors are built.
        fingerprint = self.fingerprint
        return replace(self._encoder.read(passages, role), fingerprint=fingerprint)

    @property
    def reader(self) -> Reader:
        return self._encoder.reader

    def window_spans(self, text: str, sentences: Sequence[Span]) -> list[Span]:
        return window_spans(text, sentences, self.reader)
