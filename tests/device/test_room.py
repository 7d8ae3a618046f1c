"""A device that fills up: less is computed at once, nothing is lost, and nothing stays allocated."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable

import numpy as np
import pytest
import torch

from rag_explain import Explainer, Factors
from rag_explain.devices import _say
from rag_explain.errors import DeviceFull
from rag_explain.pairing import pairs
from rag_explain.store.memory import Memory
from rag_explain.texts.tokens import Token
from tests.support import device
from tests.support.cross_encoders import cross
from tests.support.models import CORPUS, tiny

QUERY = "the dog and the moon"
DOCUMENTS = [f"{' '.join(CORPUS[number % 5 :])[: 200 + number * 7]} {number}" for number in range(30)]


@pytest.fixture(scope="module")
def expected() -> dict[str, list[np.ndarray]]:
    here = Explainer(tiny("bert", dtype=torch.float32))
    return {
        unit: [one.matrix for one in here.explain_many(QUERY, DOCUMENTS, unit=unit)] for unit in ("word", "sentence")
    }


@pytest.fixture
def there(toy: str) -> Explainer:
    explainer = Explainer(tiny("bert", dtype=torch.float32).to(toy))
    for query in ("one two", "three four", QUERY):
        explainer.explain(query, "a text", unit="sentence")  # what is recorded for queries of this length is kept
        explainer.explain(query, "a text", unit="word")
    explainer.store._memory.clear()
    return explainer


@pytest.mark.parametrize("room", [2**22, 2**20])
@pytest.mark.parametrize("unit", ["word", "sentence"])
def test_documents_are_explained_in_as_little_room_as_one_of_them_takes(
    there: Explainer, expected: dict[str, list[np.ndarray]], unit: str, room: int, caplog: pytest.LogCaptureFixture
) -> None:
    _say.cache_clear()
    before = device.allocated()
    device.reset_peak()
    with device.limited(room), caplog.at_level(logging.WARNING, "rag_explain.devices"):
        found = there.explain_many(QUERY, DOCUMENTS, unit=unit)
        assert device.peak() <= before + room
    for one, matrix in zip(found, expected[unit], strict=True):
        assert np.abs(one.matrix - matrix).max() < 1e-6
    if room <= 2**20:
        assert any("is out of memory: fewer texts are computed together" in message for message in caplog.messages)
    there.store._memory.clear()
    assert device.allocated() == before


def test_tangents_travel_in_smaller_parts(there: Explainer) -> None:
    encoder = there.scorer.encoder
    batch = encoder.read(DOCUMENTS[:3], "document")
    with encoder.computing():
        frozen, _ = there.method.freeze(batch)
        rows, rest = (value.cpu() for value in frozen.push_rows())
        cotangents = frozen.embedding[None].expand(9, -1, -1)
        pulled = frozen.relevance(cotangents)[0].cpu()
        before = device.allocated()
        device.reset_peak()
        frozen.relevance(cotangents)
        whole = device.peak() - before
        for part in (0.7, 0.4):
            with device.limited(int(part * whole)):
                again, rest_again = frozen.push_rows()
                assert torch.allclose(again.cpu(), rows, atol=1e-5)
                assert torch.allclose(rest_again.cpu(), rest, atol=1e-5)
                del again, rest_again
                assert torch.allclose(frozen.relevance(cotangents)[0].cpu(), pulled, atol=1e-5)
        assert device.allocated() == before
        with device.limited(2**15), pytest.raises(DeviceFull, match="no room for a single tangent"):
            frozen.push_rows()
    assert device.allocated() == before


def test_what_is_kept_goes_to_main_memory_and_comes_back(there: Explainer) -> None:
    there.precompute(DOCUMENTS, progress=False)
    info = there.store._memory.info()
    kept = info["toy:0"]["bytes"]
    encoder = there.scorer.encoder
    with device.limited(2**18), pytest.raises(DeviceFull, match=r"out of memory with one text.*use another device"):
        there.explain_many("something new", [" ".join(DOCUMENTS[:2])], unit="word")
    info = there.store._memory.info()
    assert (info["toy:0"]["documents"], info["cpu"]["documents"]) == (0, 30)  # nothing is lost
    found = there.explain_many(QUERY, DOCUMENTS, unit="sentence")
    assert {one.provenance["path"] for one in found} == {"memory"}
    assert there.store._memory.info()["toy:0"]["bytes"] == kept
    assert encoder.device.type == "toy"


def test_a_product_without_room_is_made_in_main_memory(there: Explainer, expected: dict[str, list[np.ndarray]]) -> None:
    there.precompute(DOCUMENTS, progress=False)
    there.explain_many(QUERY, DOCUMENTS, unit="sentence")
    before = device.allocated()
    with device.limited(100):
        found = there.explain_many(QUERY, DOCUMENTS, unit="sentence")
    assert device.allocated() == before
    for one, matrix in zip(found, expected["sentence"], strict=True):
        assert np.abs(one.matrix - matrix).max() < 1e-6


QUESTIONS: dict[str, Callable[[Explainer], object]] = {
    "evidence": lambda one: [[span.value for span in found.spans] for found in one.evidence_many(QUERY, DOCUMENTS)],
    "vectors": lambda one: one.scorer.embed(DOCUMENTS, "document"),
    "factors": lambda one: [factors.block for factors in one.factor(DOCUMENTS, unit="sentence")],
    "pairs": lambda one: [found.matrix for found in one.explain_many(QUERY, DOCUMENTS, unit="word")],
    "scores of pairs": lambda one: one.scorer.score(QUERY, DOCUMENTS),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_every_question_is_answered_in_a_third_of_the_room_that_it_took(toy: str, question: str) -> None:
    model = cross(dtype=torch.float32) if "pairs" in question else tiny("bert", dtype=torch.float32)
    explainer, ask = Explainer(model.to(toy)), QUESTIONS[question]
    ask(explainer)
    gc.collect()
    before = device.allocated()
    device.reset_peak()
    expected = ask(explainer)
    room = device.peak() - before
    with device.limited(room // 3):
        found = ask(explainer)
    assert device.allocated() == before
    for one, other in zip(expected, found, strict=True):
        assert np.abs(np.asarray(one) - other).max() < 1e-5


def test_what_another_explainer_keeps_makes_room_for_this_one(there: Explainer) -> None:
    empty = device.allocated()
    there.precompute(DOCUMENTS, unit="token", progress=False)
    held = device.allocated() - empty
    other = Explainer(tiny("bert", dtype=torch.float32), device="toy:0")
    expected = other.scorer.embed(DOCUMENTS[:1], "document")
    before = device.allocated()
    device.reset_peak()
    other.scorer.embed(DOCUMENTS[:1], "document")
    with device.limited(device.peak() - before - held // 2):
        found = other.scorer.embed(DOCUMENTS[:1], "document")
    assert np.abs(expected - found).max() < 1e-6
    info = there.store._memory.info()
    assert (info["toy:0"]["documents"], info["cpu"]["documents"]) == (0, 30)


def test_a_text_that_is_too_long_for_the_room_does_not_stop_the_others(there: Explainer) -> None:
    with device.limited(2**18):
        done = there.precompute([" ".join(CORPUS), "a cat", "a dog", "old bridges"], progress=False)
    assert (done.built, done.failed) == (3, 1)


def test_ten_thousand_documents_stay_within_the_budget(toy: str) -> None:
    gc.collect()  # of what other tests left
    random, budget = np.random.default_rng(0), 2**22
    memory, before = Memory({toy: budget, "cpu": 2**21}), device.allocated()
    tokens = tuple(Token(str(number), number, number + 1) for number in range(4))
    vectors = random.standard_normal((10_000, 64)).astype(np.float32)

    def factors(number: int, role: str = "document") -> Factors:
        rows = np.outer(np.arange(1, 5), vectors[number]).astype(np.float32)
        rest = vectors[number - 1]
        about = {"role": role, "method": "bilrp", "settings": {}, "fingerprint": "f"}
        return Factors(tokens=tokens, rows=rows, rest=rest, embedding=rows.sum(0) + rest, norm=1.0, **about)

    device.reset_peak()
    for first in range(0, 10_000, 100):
        new = {str(number).encode(): (factors(number), ()) for number in range(first, first + 100)}
        memory.put_many(new, device="toy:0")
        del new
        info = memory.info()["toy:0"]
        assert info["bytes"] <= budget
        blocks = info["documents"] * 5 * 64 * 4
        assert device.allocated() - before == blocks <= budget  # what it says, and nothing beside it
    assert device.peak() - before <= budget + 2 * 100 * 5 * 64 * 4  # those of a batch on their way
    assert info["documents"] > 1000
    kept = memory.get([str(number).encode() for number in range(9_900, 10_000)], "toy:0")
    assert len(kept) == 100  # those that were used last
    assert memory.get([b"0"], "toy:0") == {}
    matrices, _ = pairs(factors(7, "query"), list(kept.values()))
    (number, first) = 9_900, matrices[0]
    assert first == pytest.approx(factors(7, "query").block @ factors(number).block.T, rel=1e-4, abs=1e-4)
    memory.clear()
    del kept
    assert device.allocated() == before
