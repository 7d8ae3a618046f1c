"""Maximal marginal relevance: how near each document is to the query, and to one that was chosen before it.

The vectors are the engine's own; they are asked for when the terms are looked at, never in the search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from rag_explain.errors import InvalidInput
from rag_explain.results.deferred import Deferred
from rag_explain.results.explanation import Explanation
from rag_explain.results.stages import Stage
from rag_explain.retrieval.usage import has_model

if TYPE_CHECKING:
    from rag_explain.retrieval.search import RetrievedDocument, Search

_TOLERANCE = 1e-5  # stores may keep vectors in single precision
_METRIC, _KIND = "mmr", "InvalidInput: "


@dataclass(frozen=True)
class Diversity:
    """How a search weighs relevance against redundancy.

    Attributes:
        balance: lambda: what the similarity to the query counts, of 1.
        among: what a document may repeat: all that were "chosen" before it (the paper, LangChain), or the "last" one
            of them (LlamaIndex).
    """

    balance: float = 0.5
    among: Literal["chosen", "last"] = "chosen"


def diversified(
    search: Search, query: str, found: Sequence[RetrievedDocument], handles: Sequence[Deferred[Explanation]]
) -> list[tuple[Stage, ...]]:
    """The one stage of each document of a search that diversified, with its terms when they are looked at."""
    terms: Deferred[list[tuple[Stage, ...]]] = Deferred(partial(_terms, search, query, tuple(found)))

    def split(index: int) -> tuple[Stage, ...]:
        values = terms.get()
        if values is None:
            raise InvalidInput((terms.reason or "the terms are not known").removeprefix(_KIND))
        return values[index]

    return [
        (
            Stage(
                search.name, "mmr", rank, None, one.score, _METRIC, handle=handle, split=Deferred(partial(split, index))
            ),
        )
        for index, (rank, one, handle) in enumerate(zip(range(1, len(found) + 1), found, handles, strict=True))
    ]


def _terms(search: Search, query: str, found: Sequence[RetrievedDocument]) -> list[tuple[Stage, ...]]:
    assert search.diversity is not None
    names = [one.vector_id or one.id or "" for one in found]
    query_vector, vectors = _query_vector(search, query), _vectors(search, names)
    relevance, near = _cosine(vectors, query_vector[None])[:, 0], _cosine(vectors, vectors)
    own = [_own(search.diversity, index, relevance, near) for index in range(len(found))]
    scores = [sum(value for _, value, _ in parts) for parts in own]
    _check(search.diversity, found, scores, relevance, near)
    return [tuple(_term(*part, search.diversity, names) for part in parts) for parts in own]


def _own(
    diversity: Diversity, index: int, relevance: NDArray[np.float64], near: NDArray[np.float64]
) -> list[tuple[float, float, int | None]]:
    """Similarity, what it adds, and with which document it is: to the query, and to one that came before."""
    balance = diversity.balance
    parts: list[tuple[float, float, int | None]] = [(relevance[index], balance * relevance[index], None)]
    if index:
        first = 0 if diversity.among == "chosen" else index - 1
        other = first + int(np.argmax(near[index, first:index]))
        parts.append((near[index, other], -(1 - balance) * near[index, other], other))
    return parts


def _term(value: float, share: float, other: int | None, diversity: Diversity, names: Sequence[str]) -> Stage:
    if other is None:
        return Stage("relevance", "term", None, None, float(value), "cosine", diversity.balance, float(share))
    weight = -(1 - diversity.balance)
    return Stage("redundancy", "term", None, None, float(value), "cosine", weight, float(share), document=names[other])


def _check(
    diversity: Diversity,
    found: Sequence[RetrievedDocument],
    scores: Sequence[float],
    relevance: NDArray[np.float64],
    near: NDArray[np.float64],
) -> None:
    """Whether these terms made this ranking: by its scores, or where it tells none, by what was chosen first."""
    told = [(one.score, score) for one, score in zip(found, scores, strict=True) if one.score is not None]
    if any(abs(score - own) > _TOLERANCE for score, own in told):
        raise InvalidInput("relevance and redundancy of the kept vectors do not make the scores that were returned")
    for index in () if told else range(len(found)):
        later = [
            diversity.balance * relevance[other]
            - (1 - diversity.balance) * (near[other, :index].max() if index else 0.0)
            for other in range(index + 1, len(found))
        ]
        if any(one > scores[index] + _TOLERANCE for one in later):
            raise InvalidInput("relevance and redundancy of the kept vectors do not make the order that was returned")


def _query_vector(search: Search, query: str) -> NDArray[np.float64]:
    if search.query_vector is not None:
        return np.asarray(search.query_vector, np.float64)
    if search.embedder is None or not has_model(search.embedder):
        raise InvalidInput("what embedded the query is elsewhere: it is not asked again")
    return search.embedder.vector(query)


def _vectors(search: Search, names: Sequence[str]) -> NDArray[np.float64]:
    known = {} if search.engine is None else search.engine.vectors(names)
    missing = [name for name in names if name not in known]
    if missing:
        raise InvalidInput("the store gives no vectors of its documents: relevance and redundancy are not known")
    return np.array([known[name] for name in names], np.float64)


def _cosine(one: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.float64]:
    lengths = np.linalg.norm(one, axis=1)[:, None] * np.linalg.norm(other, axis=1)[None]
    cosines: NDArray[np.float64] = one @ other.T / np.where(lengths == 0, 1.0, lengths)
    return cosines
