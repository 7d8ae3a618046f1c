"""Whose factors are these? A store knows models by their fingerprint and by what they compute."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from rag_explain import Explainer
from rag_explain.probes import Probes
from rag_explain.store import Store
from tests.support.models import TEXTS, tiny
from tests.support.processes import environment

PROBES = Probes.of(np.random.default_rng(0).normal(size=(8, 16)))


def _moved(by: float) -> Probes:
    return Probes.of(value + by * np.linalg.norm(value) / 4 for value in PROBES.values)  # 4: the root of 16 dimensions


def test_rounding_is_the_same_model_and_anything_more_is_another() -> None:
    with Store() as store:
        name = store.identify("f", PROBES, 1e-4)
        assert name == f"f:{PROBES.id}"
        assert store.identify("f", _moved(5e-5), 1e-4) == name
        other = store.identify("f", _moved(2e-3), 1e-4)
        assert other != name
        assert store.identify("f", _moved(2e-3 + 2e-5), 1e-4) == other
        assert store.identify("g", PROBES, 1e-4) == f"g:{PROBES.id}"
        assert store.identify("f", Probes.of(PROBES.values[:4]), 1e-4) not in (name, other)


@pytest.mark.parametrize("place", ["disk", "remote"])
def test_sets_are_kept_and_found_by_another_store(place: str, tmp_path: Path) -> None:
    def store(**more) -> Store:
        return Store(tmp_path, **more) if place == "disk" else Store(remote=tmp_path.as_uri(), **more)

    with store() as first:
        name, other = first.identify("f", PROBES, 1e-4), first.identify("f", _moved(1e-2), 1e-4)
    with store() as second:
        assert second.identify("f", _moved(5e-5), 1e-4) == name
        assert second.identify("f", _moved(1e-2 + 5e-5), 1e-4) == other
    with store(readonly=True) as reader:
        assert reader.identify("f", _moved(5e-5), 1e-4) == name
        unknown = reader.identify("f", _moved(0.5), 1e-4)
    with store() as third:
        assert third.identify("f", _moved(0.5 + 1e-6), 1e-4) != unknown  # what only reads has kept nothing


def test_a_set_that_goes_to_the_remote_first_is_on_disk_too(tmp_path: Path) -> None:
    remote = (tmp_path / "remote").as_uri()
    with Store(tmp_path / "one", remote=remote) as store:
        name = store.identify("f", PROBES, 1e-4)
    with Store(tmp_path / "two", remote=remote) as store:
        assert store.identify("f", _moved(5e-5), 1e-4) == name
    with Store(tmp_path / "two") as store:
        assert store.identify("f", _moved(-5e-5), 1e-4) == name


def test_a_damaged_set_matches_no_model(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store._tiers[0].add_probes("f", "aa", b"not json")
        store._tiers[0].add_probes("f", "bb", b'{"shapes": [[2]], "values": "AAAA"}')
        assert store.identify("f", PROBES, 1e-4) == f"f:{PROBES.id}"


def test_a_model_of_the_same_fingerprint_that_computes_something_else_is_a_miss(tmp_path: Path, monkeypatch) -> None:
    """A digest cannot know everything: here it is made blind altogether, and the probes still tell the models apart."""
    monkeypatch.setattr("rag_explain.encoder.shared_model.digest", lambda facts, tensors: "0" * 32)
    one, other = tiny("bert", dtype=torch.float32), tiny("bert", dtype=torch.float32)
    with torch.no_grad():
        next(other.parameters()).mul_(1.5)
    with Explainer(one, store=tmp_path) as explainer:
        explainer.precompute([TEXTS[1]], unit="token", progress=False)
    for model, path in ((one, "disk"), (other, "cold")):
        with Explainer(model, store=tmp_path) as explainer:
            explanation = explainer.explain(*TEXTS)
            own = model.similarity(model.encode_query(TEXTS[0]), model.encode_document(TEXTS[1]))
            assert explanation.score == pytest.approx(float(own), abs=1e-3)
            assert explanation.provenance["path"] == path


_SERVE = """
import sys, torch
torch.set_num_threads(int(sys.argv[2]))
from rag_explain import Explainer
with Explainer("all-MiniLM-L6-v2", store=sys.argv[1]) as explainer:
    found = explainer.explain("how do bees find home", "A forager steers by the sun.")
    explainer.precompute(["A forager steers by the sun."], unit="token", progress=False)
print(found.provenance["path"], found.fingerprint)
"""


@pytest.mark.slow
def test_processes_with_other_numbers_of_threads_share_factors(tmp_path: Path) -> None:
    seen = []
    for threads in ("1", "2"):
        command = [sys.executable, "-c", _SERVE, str(tmp_path), threads]
        run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment())
        seen.append(run.stdout.split())
    assert [path for path, _ in seen] == ["cold", "disk"]
    assert seen[0][1] == seen[1][1]
