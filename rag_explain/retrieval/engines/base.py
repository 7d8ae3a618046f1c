"""What a vector engine tells about its index: what its scores are, the vectors that it keeps, and its documents."""

from __future__ import annotations

import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

from rag_explain.results.metric import UNKNOWN, Metric

logger = logging.getLogger("rag_explain.retrieval")

# How far the unit vectors of two equal texts, and so their scores, may be apart. Engines keep float32, sometimes
# float16 vectors: the latter are off by 5e-4. A short header in front of a text moves its vector by more than this.
TOLERANCE = 2e-3

Rows = Callable[[Collection[str]], Mapping[str, int]]


@dataclass(frozen=True)
class Place:
    """Where in its engine a store keeps its documents: what a handle by itself does not tell."""

    collection: str | None = None  # the name of the collection or table
    key: str = "id"  # the field of the documents' ids
    vector: str | None = None  # the field of the vectors; None: the only one there is
    text: str | None = None  # the field of the texts; None: what the engine itself calls so, if anything
    is_exponential: bool = False  # whether the store makes a distance d of the engine exp(-d)
    is_refined: bool = False  # whether searches compute scores again from the vectors that an index coded (LanceDB)
    rows: Rows | None = None  # gives the rows of documents, for an engine that knows them by number
    schema: str | None = None  # of the table; None: where the connection looks for it
    metric: Metric | None = None  # what the store asks for, of an engine that compares in any way it is asked to
    condition: tuple[str, Any] | None = None  # which rows of a table are documents: SQL, and the value of its %s


class Kept(NamedTuple):
    """A document as an engine keeps it."""

    id: str
    text: str | None
    fields: Mapping[str, Any]  # everything that is kept beside its vector


class Engine(ABC):
    """The handle of one index, as the checks of explanations need it. Only read, and never written to.

    An engine that must ask a server what its scores are asks once.
    """

    # The module and the name of the class of its handles; a handle cannot be there before its library is loaded.
    handles: ClassVar[tuple[str, str]] = ("", "")
    # Whether a handle by itself does not tell which collection is meant.
    is_client: ClassVar[bool] = False
    # Whether `vectors` gives what the engine was given even where its scores are estimates: it keeps both.
    gives_originals = False

    def __init__(self, handle: Any, place: Place | None = None) -> None:
        self.handle, self.place = handle, place or Place()

    @classmethod
    def of(cls, handle: object, place: Place) -> Self | None:
        """The engine with this handle; None where it is the handle of no such engine. Imports nothing."""
        module, name = cls.handles
        library = sys.modules.get(module)
        is_handle = library is not None and isinstance(handle, getattr(library, name))
        return cls(handle, place) if is_handle and (place.collection is not None or not cls.is_client) else None

    @property
    def metric(self) -> Metric:
        """What the engine's own scores are; unknown where it cannot be asked, of which no search may fail."""
        try:
            return self.told_metric()
        except Exception as error:
            logger.debug("%s does not tell its metric: %s: %s", type(self).__name__, type(error).__name__, error)
            return UNKNOWN

    @abstractmethod
    def told_metric(self) -> Metric:
        """What the engine says that its scores are."""

    @property
    def tolerance(self) -> float:
        """How far a score may be from the similarity of the vectors that were given, where no coding tells it."""
        return TOLERANCE

    @abstractmethod
    def vectors(self, ids: Sequence[str]) -> Mapping[str, Any]:
        """(e,) for each of these documents whose vector is kept, as given or coded, in one call; no others."""

    def documents(self) -> Iterable[Kept] | None:
        """Every document; None where the engine keeps no texts."""
        return None

    def coded(self, vectors: Any) -> Any:
        """(D, e): vectors as the engine compares them; None where it loses something of them, and does not say what."""
        return vectors if self.tolerance <= TOLERANCE else None
