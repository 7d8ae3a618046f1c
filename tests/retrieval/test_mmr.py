"""The terms of MMR against its equation, and what is said where they are not known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rag_explain.results.deferred import Deferred
from rag_explain.retrieval import Embedder, RetrievedDocument, Search
from rag_explain.retrieval.mmr import Diversity, diversified

RANDOM = np.random.default_rng(7)
VECTORS = {f"d{number}": vector for number, vector in enumerate(RANDOM.normal(size=(8, 5)))}
ASKED = RANDOM.normal(size=5)


class Kept:
    """What an engine is asked for."""

    def __init__(self, without: tuple[str, ...] = ()) -> None:
        self.without, self.asked = without, 0

    def vectors(self, names: Any) -> dict[str, Any]:
        self.asked += 1
        return {name: VECTORS[name] for name in names if name not in self.without}


def cosine(one: Any, other: Any) -> float:
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


def chosen(balance: float, k: int) -> list[tuple[str, float, str | None]]:
    """The paper's greedy choice, literally: name, score, and what it is most alike among those before."""
    found: list[tuple[str, float, str | None]] = []
    while len(found) < k:
        names = [name for name, *_ in found]
        options = []
        for name in sorted(set(VECTORS) - set(names)):
            near = {other: cosine(VECTORS[name], VECTORS[other]) for other in names}
            most = max(near, key=lambda other: near[other]) if near else None
            options.append((name, balance * cosine(VECTORS[name], ASKED) - (1 - balance) * near.get(most, 0.0), most))
        found.append(max(options, key=lambda one: one[1]))
    return found


def search(balance: float, engine: Any = None, **changes: Any) -> Search:
    options: dict[str, Any] = {"engine": engine or Kept(), "query_vector": ASKED} | changes
    return Search(source=None, name="store", diversity=Diversity(balance), **options)


def stages(asked: Search, names: list[str], scores: Any = None) -> list[Any]:
    found = [RetrievedDocument(id=name, text=name, score=scores and scores[n]) for n, name in enumerate(names)]
    return [own for (own,) in diversified(asked, "q", found, [Deferred.skipped("no")] * len(found))]


@pytest.mark.parametrize("balance", [0.0, 0.3, 0.7, 1.0])
def test_terms_are_those_of_the_equation(balance):
    expected, engine = chosen(balance, 5), Kept()
    found = stages(search(balance, engine), [name for name, *_ in expected], [score for _, score, _ in expected])
    assert engine.asked == 0
    for stage, (_, score, other) in zip(found, expected, strict=True):
        assert sum(term.contribution for term in stage.terms) == pytest.approx(score, abs=1e-12)
        assert [term.document for term in stage.terms] == ([None] if other is None else [None, other])
    assert engine.asked == 1


def test_an_order_that_the_terms_do_not_make_is_not_split():
    names = [name for name, *_ in chosen(0.5, 5)]
    assert all(stage.terms for stage in stages(search(0.5), names))
    for asked, scores, said in (
        (search(0.5), None, "do not make the order"),
        (search(0.5), [9.0] * 5, "do not make the scores"),
        (search(0.5, Kept((names[0], names[3]))), None, "gives no vectors"),
        (search(0.5, query_vector=None), None, "is elsewhere"),
        (search(0.5, query_vector=None, embedder=Embedder(object(), {})), None, "is elsewhere"),
    ):
        for stage in stages(asked, names[::-1], scores):
            assert stage.terms == ()
            assert said in stage.split.reason


def test_one_document_and_vectors_of_no_length():
    (stage,) = stages(search(0.5), ["d0"])
    assert len(stage.terms) == 1
    (stage,) = stages(search(0.5, query_vector=np.zeros(5)), ["d0"])
    assert stage.terms[0].score == 0.0
