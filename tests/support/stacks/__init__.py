"""The stores that people run under LangChain and LlamaIndex, each started and filled for real, and what must be true of
every one of them when its retriever is wrapped.

Tests hold that on a tiny model and a few texts; `benchmarks/stores.py` on real ones, and makes the table of the docs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid5

HEADER = "Acme Corp, internal: "  # put in front of every text where an index is filled with other vectors
TOP = 5


@dataclass(frozen=True)
class Corpus:
    """What a store is filled with. Ids are UUIDs, the only ones that all stores take."""

    texts: Sequence[str]
    model: str  # a folder
    folder: Path  # for what a store writes
    header: str = ""
    ids: Sequence[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", [str(uuid5(NAMESPACE_URL, str(one))) for one in range(len(self.texts))])


@dataclass(frozen=True)
class Stack:
    """A store under a framework, compared in one of the ways that it knows."""

    store: str
    setting: str  # what the store calls the way in which it compares
    package: str  # what must be installed
    made: Callable[[Corpus, str], AbstractContextManager[Any]]  # the framework's own retriever over the filled store
    metric: str  # what its scores are, by the name of a `Metric`
    is_exact: bool = True  # whether scores are those of the vectors that it was given
    has_vectors: bool = True  # whether it gives the vectors of documents by their ids

    @property
    def name(self) -> str:
        return f"{self.store}, {self.setting}"

    @property
    def is_installed(self) -> bool:
        try:
            return importlib.util.find_spec(self.package) is not None
        except ModuleNotFoundError:
            return False


@dataclass(frozen=True)
class Seen:
    """What wrapping the retriever of a stack showed."""

    found: Sequence[Sequence[tuple[str, float | None]]]  # for each query: text and score, as the framework returns them
    wrapped: Sequence[Sequence[tuple[str, float | None]]]  # the same with explanations
    metrics: frozenset[str]
    gaps: Sequence[float | None]
    stand_ins: Sequence[int]  # for each query, of how many hits it is said that they are a stand-in
    reasons: frozenset[str]
    notes: frozenset[str]
    built: Mapping[str, int]  # what `precompute()` without arguments did
    wrapper: Any = None  # as long as it lives, other wrappers of the same embedding object share its Explainer


def summed_up(found: Sequence[Any], hits: Sequence[Sequence[Any]], built: Any, wrapper: Any) -> Seen:
    """What a person would want to know of the hits of all queries."""
    looked = [[(hit, hit.brief()) for hit in one] for one in hits]  # by sentences, which `precompute` has built
    every = [pair for one in looked for pair in one]
    assert all(explanation is not None for _, explanation in every), every[0][0].reason
    return Seen(
        found=found,
        wrapped=[[(hit.text, hit.score) for hit, _ in one] for one in looked],
        metrics=frozenset(hit.metric for hit, _ in every),
        gaps=[hit.gap for hit, _ in every],
        stand_ins=[sum(explanation.surrogate is not None for _, explanation in one) for one in looked],
        reasons=frozenset(explanation.surrogate for _, explanation in every if explanation.surrogate is not None),
        notes=frozenset(notice.code for _, explanation in every for notice in explanation.notices),
        built={"built": built.built, "kept": built.kept, "failed": built.failed},
        wrapper=wrapper,
    )
