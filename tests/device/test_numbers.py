"""The same numbers as on the CPU, to 1e-6, wherever and however the model came to the device."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from rag_explain import Explainer, Explanation
from rag_explain.cli import main
from rag_explain.errors import CheckFailed, InvalidInput
from rag_explain.scorers.static import Static
from tests.support.models import ARCHITECTURES, CORPUS, TEXTS, colbert, folder, static, tiny

QUERY = "Where did the cat look?"
METHODS = ("bilrp", "hxp", "ij", "pooled", "occlusion", "alignment", "bti", "embeddings", "gradient")


def same(here: Sequence[Explanation], there: Sequence[Explanation], tolerance: float = 1e-6) -> None:
    assert len(here) == len(there)
    for one, other in zip(here, there, strict=True):
        assert one.document_tokens == other.document_tokens
        scale = max(1.0, float(np.abs(one.matrix).max()))
        assert np.abs(one.matrix - other.matrix).max() <= tolerance * scale
        assert one.score == pytest.approx(other.score, abs=tolerance * max(1.0, abs(one.score)))


def both(make: Callable[[], SentenceTransformer], toy: str, *arguments: str, **options: object) -> list[Explainer]:
    model = make()
    return [Explainer(one, *arguments, **options) for one in (model, copy.deepcopy(model).to(toy))]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture(toy: str, name: str) -> None:
    here, there = both(lambda: tiny(name), toy)
    assert there.scorer.device == "toy:0"
    for unit in ("token", "word", "sentence"):
        for _ in range(3):  # cold, built, warm
            same(here.explain_many(QUERY, CORPUS, unit=unit), there.explain_many(QUERY, CORPUS, unit=unit))


@pytest.mark.parametrize("method", METHODS)
def test_every_method(toy: str, method: str) -> None:
    here, there = both(lambda: tiny("bert"), toy, method)
    unit = "word" if here.method.edits else None
    same(here.explain_many(QUERY, TEXTS, unit=unit), there.explain_many(QUERY, TEXTS, unit=unit))


def test_late_interaction_and_static_vectors(toy: str) -> None:
    for make in (colbert, static):
        here, there = both(make, toy)
        same(here.explain_many("cat moon", TEXTS), there.explain_many("cat moon", TEXTS))
        if not isinstance(here.scorer, Static):
            one, other = (explainer.evidence("cat moon", CORPUS[2]) for explainer in (here, there))
            assert [span.value for span in one.spans] == pytest.approx([span.value for span in other.spans], abs=1e-6)


def test_embeddings_highlights_evidence_and_factors(toy: str) -> None:
    here, there = both(lambda: tiny("bert"), toy)
    assert np.abs(here.scorer.embed(CORPUS, "document") - there.scorer.embed(CORPUS, "document")).max() <= 1e-6
    for one, other in zip(here.highlight_many(QUERY, CORPUS), there.highlight_many(QUERY, CORPUS), strict=True):
        assert [span.value for span in one.spans] == pytest.approx([span.value for span in other.spans], abs=1e-6)
    for one, other in zip(here.evidence_many(QUERY, CORPUS), there.evidence_many(QUERY, CORPUS), strict=True):
        assert [span.value for span in one.spans] == pytest.approx([span.value for span in other.spans], abs=1e-5)
    for unit in ("token", "word", "sentence"):
        for one, other in zip(here.factor(CORPUS, unit=unit), there.factor(CORPUS, unit=unit), strict=True):
            assert np.abs(one.block - other.block).max() <= 1e-6 * np.abs(one.block).max()
            assert other.error <= 1e-6


def test_a_model_that_is_moved_before_and_after_the_explainer_was_made(toy: str) -> None:
    model = tiny("bert")
    explainer, here = Explainer(model), Explainer(tiny("bert"))
    expected = [here.explain_many(QUERY, CORPUS, unit=unit) for unit in ("word", "sentence")]
    for place in ("cpu", toy, "cpu", "toy:1"):
        model.to(place)
        for _ in range(3):
            for unit, wanted in zip(("word", "sentence"), expected, strict=True):
                same(wanted, explainer.explain_many(QUERY, CORPUS, unit=unit))
        assert explainer.scorer.device.startswith(place)


def test_an_explainer_on_another_device_than_its_model(toy: str) -> None:
    model = tiny("bert")
    with Explainer(model, device="toy:1") as there:
        same(Explainer(model).explain_many(QUERY, CORPUS), there.explain_many(QUERY, CORPUS))
        assert {weight.device.type for weight in model.parameters()} == {"cpu"}


def test_two_devices_and_the_cpu_share_one_store(toy: str) -> None:
    store = Explainer(tiny("bert")).store
    every = [Explainer(tiny("bert"), device=name, store=store) for name in ("cpu", "toy:0", "toy:1")]
    expected = Explainer(tiny("bert")).explain_many(QUERY, CORPUS, unit="sentence")
    every[1].precompute(CORPUS, progress=False)
    for explainer in (*every, *every[::-1]):
        found = explainer.explain_many(QUERY, CORPUS, unit="sentence")
        assert {one.provenance["path"] for one in found} == {"memory"}  # built once, for all of them
        same(expected, found)


def test_a_callers_autocast_changes_nothing(toy: str) -> None:
    explainer = Explainer(tiny("bert", dtype=torch.float32).to(toy))
    query = torch.randn(2, 2, device=toy)
    plain = [explainer.explain_many(QUERY, CORPUS, unit=unit) for unit in ("token", "sentence") for _ in range(2)]
    with torch.autocast(toy, dtype=torch.float16), torch.autocast("cpu", dtype=torch.bfloat16):
        assert (query @ query).dtype == torch.float16  # it is in force
        other = Explainer(tiny("bert", dtype=torch.float32).to(toy))
        cast = [other.explain_many(QUERY, CORPUS, unit=unit) for unit in ("token", "sentence") for _ in range(2)]
    for one, two in zip(plain, cast, strict=True):
        same(one, two)


def test_several_threads_at_once(toy: str) -> None:
    explainer = Explainer(tiny("bert").to(toy))
    queries = [QUERY, "the capital of france", "why bees", "old bridges"]
    expected = [Explainer(tiny("bert")).explain_many(query, CORPUS, unit="word") for query in queries]
    failures: list[BaseException] = []

    def explain(first: int) -> None:
        try:
            for number in range(first, first + 8):
                found = explainer.explain_many(queries[number % 4], CORPUS, unit="word")
                same(expected[number % 4], found)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=explain, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_forgotten_move_to_the_device_is_caught(toy: str) -> None:
    query, document = torch.randn(3, 4), torch.randn(2, 4).to(toy)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.mm(query, document.T)
    with pytest.raises(TypeError, match="can't convert toy"):
        document.numpy()


@pytest.mark.parametrize("where", ["cpu", "toy"])
def test_tangents_in_half_precision_are_measured_and_kept(where: str) -> None:
    model = tiny("bert", dtype=torch.float32).to(where)
    plain, half = Explainer(model), Explainer(model, precision="fp16")
    assert half.method.settings["precision"] == "fp16"
    assert "precision" not in plain.method.settings  # what is kept already stays under its key
    for unit in ("token", "sentence"):
        for one, factors in zip(plain.factor(CORPUS, unit=unit), half.factor(CORPUS, unit=unit), strict=True):
            assert 1e-6 < factors.error < 0.02
            assert 0 < np.abs(factors.block - one.block).max() < 0.02 * np.linalg.norm(one.embedding)
        same(plain.explain_many(QUERY, CORPUS, unit=unit), half.explain_many(QUERY, CORPUS, unit=unit), 0.01)
    cold = half.explain("bees", CORPUS[0])
    assert cold.error is not None
    assert 1e-6 < cold.error < 0.02


def test_an_error_above_two_percent_is_refused(toy: str) -> None:
    model = tiny("bert", dtype=torch.float32).to(toy)
    with pytest.raises(CheckFailed, match=r"bfloat16 misses the embedding of a text by .*leave out precision"):
        Explainer(model, precision="bf16").factor(CORPUS)  # random weights, far from what eight bits can carry
    with pytest.raises(InvalidInput, match="'fp16' or 'bf16'"):
        Explainer(model, precision="int8")


def test_the_doctor_examines_a_model_on_the_device(toy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(folder("bert")), "--device", toy]) == 0
    seen = " ".join(capsys.readouterr().out.split())
    assert "toy, " in seen
    assert "GB free" in seen
    assert "push = pull" in seen
    assert main(["doctor", str(folder("bert")), "--device", "toy:2"]) == 1
    assert "this machine has 2 of them, counted from 0" in " ".join(capsys.readouterr().out.split())
