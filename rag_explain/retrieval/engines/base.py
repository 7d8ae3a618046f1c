"""What a vector engine tells about its index: what its scores are, the vectors that it keeps, and its documents."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from rag_explain.results.metric import Metric

# How far the unit vectors of two equal texts, and so their scores, may be apart. Engines keep float32, sometimes
# float16 vectors: the latter are off by 5e-4. A short header in front of a text moves its vector by more than this.
TOLERANCE = 2e-3


class Engine(Protocol):
    """The handle of one index, as the checks of explanations need it. Only read, and asked anew for each query."""

    @property
    def metric(self) -> Metric:
        """What the engine's own scores are."""

    @property
    def tolerance(self) -> float:
        """How far a score may be from the similarity of the vectors that were given, where no coding tells it."""

    def vectors(self, ids: Sequence[str]) -> Mapping[str, Any]:
        """(e,) for each of these documents whose vector is kept, as given or coded, in one call; no others."""

    def documents(self) -> Iterable[tuple[str, str]] | None:
        """The id and the text of every document; None where the engine keeps no texts."""
