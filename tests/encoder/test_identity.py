"""Two models that compute different things have different fingerprints; one model has one, whatever it did last."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense
from torch import nn

from rag_explain import Explainer
from rag_explain.encoder.identity import facts, plain
from rag_explain.encoder.model import Encoder
from rag_explain.errors import ModelChanged
from rag_explain.probes import Probes
from tests.support.models import TEXTS, tiny

LORA = {"r": 4, "target_modules": ["query", "value"]}


class Scaled(nn.Module):
    """A module that people might write: what it computes is in a plain attribute, a buffer or an object."""

    def __init__(self, factor: float = 1.0, shift: float = 0.0, power: float = 1.0, act=torch.tanh) -> None:
        super().__init__()
        self.factor = factor
        self.register_buffer("shift", torch.full((16,), shift, dtype=torch.float64), persistent=False)
        self.settings = type("Settings", (), {})()
        self.settings.power = power
        self.act = act
        self.calls = 0

    def forward(self, features):
        self.calls += 1
        x = features["sentence_embedding"] * self.factor * self.settings.power
        features["sentence_embedding"] = self.act(x) + self.shift
        return features


def _with_lora(alpha: int = 16, *, seed: int = 0) -> SentenceTransformer:
    model = tiny("bert")
    torch.manual_seed(seed)
    model.add_adapter(LoraConfig(lora_alpha=alpha, init_lora_weights=False, **LORA), "a")
    return model.to(torch.float64)


def _disabled() -> SentenceTransformer:
    model = _with_lora()
    model.disable_adapters()
    return model


def _two_adapters(active: str) -> SentenceTransformer:
    model = _with_lora()
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # peft's own, about a second adapter
        model.add_adapter(LoraConfig(init_lora_weights=False, **LORA), "b")
    model.set_adapter(active)
    return model.to(torch.float64)


def _dense(slope: float) -> SentenceTransformer:
    def dense():
        torch.manual_seed(3)
        return [Dense(16, 16, activation_function=nn.LeakyReLU(slope))]

    return tiny("bert", after=dense)


def _scaled(**settings) -> SentenceTransformer:
    return tiny("bert", after=lambda: [Scaled(**settings)])


def _power(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by


PAIRS = {
    "an adapter, enabled or not": (_with_lora, _disabled),
    "an adapter's alpha": (partial(_with_lora, 16), partial(_with_lora, 64)),
    "an adapter's weights": (partial(_with_lora, seed=0), partial(_with_lora, seed=1)),
    "which adapter is active": (partial(_two_adapters, "a"), partial(_two_adapters, "b")),
    "an activation's slope": (partial(_dense, 0.01), partial(_dense, 0.9)),
    "a plain attribute": (partial(_scaled, factor=1.0), partial(_scaled, factor=2.0)),
    "a buffer that is not saved": (partial(_scaled, shift=0.0), partial(_scaled, shift=0.5)),
    "an attribute of an object": (partial(_scaled, power=1.0), partial(_scaled, power=3.0)),
    "a function": (partial(_scaled, act=torch.tanh), partial(_scaled, act=torch.relu)),
    "what a function was given": (
        partial(_scaled, act=partial(_power, by=2.0)),
        partial(_scaled, act=partial(_power, by=3.0)),
    ),
    "a constant in a function": (partial(_scaled, act=lambda x: x * 2.0), partial(_scaled, act=lambda x: x * 3.0)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_models_that_compute_different_things_have_different_fingerprints(name):
    one, other = (Encoder(make()) for make in PAIRS[name])
    assert np.abs(one.embed(TEXTS, "document") - other.embed(TEXTS, "document")).max() > 1e-3
    assert one.fingerprint != other.fingerprint
    assert Encoder(PAIRS[name][0]()).fingerprint == one.fingerprint


@pytest.mark.parametrize("architecture", ["bert", "t5", "qwen3", "modernbert", "xlm-roberta"])
def test_a_model_has_one_fingerprint_fresh_used_and_saved(architecture, tmp_path):
    fresh = Encoder(tiny(architecture, dtype=torch.float32)).fingerprint
    used = tiny(architecture, dtype=torch.float32)
    used.encode_query([text * 40 for text in TEXTS])
    used.encode_document("short", prompt="a prompt: ")
    used.similarity(used.encode("a"), used.encode("b"))
    used.tokenizer("another text", truncation=True, max_length=3, padding="max_length")
    assert Encoder(used).fingerprint == fresh
    used.save(str(tmp_path))
    assert Encoder(SentenceTransformer(str(tmp_path), device="cpu")).fingerprint == fresh


def test_what_a_module_counts_decides_nothing():
    model = _scaled(factor=2.0)
    explainer = Explainer(model)
    before = explainer.scorer.fingerprint
    model.encode(TEXTS)
    assert explainer.scorer.fingerprint == before
    assert Encoder(model).fingerprint == before


class Keeping(nn.Module):
    """Keeps what it saw last, what it built first, and a tensor that decides, as people's modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.last = self.built = self.output = None
        self.scale = torch.full((16,), 2.0, dtype=torch.float64)

    def forward(self, features):
        self.last, self.output = features["sentence_embedding"].clone(), dict(features)
        if self.built is None:
            self.built = torch.arange(16, dtype=torch.float64)
        features["sentence_embedding"] = features["sentence_embedding"] * self.scale + self.built
        return features


def test_what_a_module_keeps_of_its_inputs_decides_nothing():
    fresh, used = (tiny("bert", after=lambda: [Keeping()]) for _ in range(2))
    used.encode(TEXTS)
    explainer = Explainer(fresh)
    before = explainer.explain(*TEXTS)
    assert Encoder(used).fingerprint == before.fingerprint
    for text in TEXTS:
        fresh.encode(text)
        assert explainer.explain(*TEXTS).fingerprint == before.fingerprint
    fresh[2].scale[:8] = 3.0
    after = explainer.explain(*TEXTS)
    own = fresh.similarity(fresh.encode_query(TEXTS[0]), fresh.encode_document(TEXTS[1]))
    assert after.score == pytest.approx(float(own), abs=1e-6)
    assert after.fingerprint != before.fingerprint
    fresh[2].scale = torch.ones(16, dtype=torch.float64)
    with pytest.raises(ModelChanged, match="scale"):
        explainer.explain(*TEXTS)


def test_another_process_with_another_number_of_threads_knows_the_model():
    code = (
        "import torch; torch.set_num_threads({threads})\n"
        "from rag_explain.encoder.model import Encoder\n"
        "from rag_explain.scorers import resolve\n"
        "import json\n"
        "scorer = resolve('all-MiniLM-L6-v2')\n"
        "print(json.dumps([scorer.fingerprint, scorer.probes.to_dict()]))"
    )
    found = []
    for threads in (1, 2):
        run = subprocess.run(
            [sys.executable, "-c", code.format(threads=threads)], capture_output=True, text=True, check=True
        )
        found.append(run.stdout)
    (one, probes), (other, others) = map(json.loads, found)
    assert one == other
    assert Probes.from_dict(probes).distance(Probes.from_dict(others)) < 1e-5


def test_facts_name_no_place_on_a_disk():
    described = str(facts(tiny("bert")))
    assert str(Path.home()) not in described
    assert "/tmp" not in described


def test_what_is_no_data_is_known_by_its_name():
    assert plain({"a": (1, None, torch.float32)}) == {"a": [1, None, "torch.float32"]}
    assert plain(torch.nn.functional.gelu) == plain(torch.nn.functional.gelu)
    assert plain(object()) == "builtins.object"
