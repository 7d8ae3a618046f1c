"""A structure kept from one text freezes the encoder at another as recording does, or it is not kept at all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from sentence_transformers.sentence_transformer.modules import Dense

from rag_explain import Explainer, _torch
from rag_explain.encoder.model import Encoder
from rag_explain.linear import ATTN_LRP, JACOBIAN, LRP, Structures
from rag_explain.linear.structure import Structure
from rag_explain.methods.frozen import freeze
from tests.support.models import ARCHITECTURES, tiny

QUERIES = ("the cat looked at the moon", "the moon looked at the cat", "moon the at cat the looked")
POOLINGS = ("cls", "max", "lasttoken", "weightedmean", ("mean", "cls"))
CASES = [*((name, "mean") for name in ARCHITECTURES), *(("bert", pooling) for pooling in POOLINGS)]


def _tokens(encoder, query):
    return encoder.read([query], "query").features["input_ids"]


def _recorded(encoder, query, rules=LRP):
    return freeze(encoder, encoder.read([query], "query"), 0, rules, biases_by_position=True)


def _others(encoder):
    """Queries of as many tokens as the first one: not every tokenizer makes as many of all."""
    size = _tokens(encoder, QUERIES[0]).shape
    found = [query for query in QUERIES[1:] if _tokens(encoder, query).shape == size]
    assert found
    return found


def _structure(encoder, rules=LRP):
    """Captured as queries are: the tokens that the batch holds are those that are followed."""
    batch = encoder.read(QUERIES[:1], "query")
    record = partial(freeze, encoder, batch, 0, rules, biases_by_position=True)
    return Structure.capture(batch.features["input_ids"], record)[1]


@torch.no_grad()
@pytest.mark.parametrize("rules", [LRP, ATTN_LRP, JACOBIAN], ids=lambda rules: rules.name)
@pytest.mark.parametrize(("name", "pooling"), CASES)
def test_a_kept_structure_gives_what_recording_gives(name, pooling, rules):
    encoder = Encoder(tiny(name, pooling))
    structure = _structure(encoder, rules)
    if pooling == "max":  # which position is the largest is another question for each text
        assert structure is None
        return
    assert structure is not None
    for query in _others(encoder):
        recorded, found = _recorded(encoder, query, rules), structure.at(_tokens(encoder, query))
        assert structure.agrees(recorded[0], _tokens(encoder, query))
        torch.testing.assert_close(found[1], recorded[1], rtol=0, atol=0)
        for one, other in zip(found[0].rows(), recorded[0].rows(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


class Looking(Dense):
    """A dense layer that looks at what its input holds before it decides what to do."""

    def __init__(self, look) -> None:
        super().__init__(16, 16)
        self.look = look

    def forward(self, features):
        turned = -1.0 if self.look(features["sentence_embedding"]) else 1.0
        return super().forward({**features, "sentence_embedding": turned * features["sentence_embedding"]})


LOOKS = {
    "item": lambda x: x[0, 0].item() > 0,
    "a branch": lambda x: bool(x[0, 0] > 0),
    "tolist": lambda x: x.tolist()[0][0] > 0,
    "numpy": lambda x: x.numpy()[0, 0] > 0,
    "an array": lambda x: np.asarray(x)[0, 0] > 0,
    "nonzero": lambda x: len((x > 0).nonzero()) > 8,
    "equal": lambda x: torch.equal(x, x.abs()),
    "any": lambda x: (x > 3).any(),
    "a draw": lambda x: torch.bernoulli(x.sigmoid()).sum() > 8,
}


@torch.no_grad()
@pytest.mark.parametrize("look", LOOKS)
def test_a_model_that_looks_at_its_values_is_recorded_each_time(look):
    model = tiny(after=lambda: [Looking(LOOKS[look])])
    assert _structure(Encoder(model)) is None


@torch.no_grad()
def test_a_structure_that_disagrees_at_its_second_text_is_never_used():
    model, kept = tiny(), Structures()
    encoder, changed = Encoder(tiny()), Encoder(model)
    for weight in model.parameters():
        weight.mul_(1.1)
    batch = encoder.read(QUERIES[:1], "query")
    kept.freeze("a length", batch.features["input_ids"], lambda: freeze(encoder, batch, 0, LRP))
    assert next(iter(kept._kept.values())) is not None
    for query in _others(encoder):
        recorded = _recorded(changed, query)
        assert kept.freeze("a length", _tokens(encoder, query), lambda recorded=recorded: recorded) is recorded
        assert list(kept._kept.values()) == [None]


def test_queries_are_recorded_twice_and_then_run_again(monkeypatch):
    explainer = Explainer(tiny())
    expected = [Explainer(tiny()).explain(query, "a dog at the moon").matrix for query in QUERIES]
    recorded = []
    monkeypatch.setattr(
        "rag_explain.methods.frozen.freeze", lambda *args, **kw: recorded.append(args[1].role) or freeze(*args, **kw)
    )
    queries = (QUERIES[0], *_others(explainer.scorer.encoder))
    for query, matrix in zip(QUERIES, expected, strict=True):
        np.testing.assert_allclose(explainer.explain(query, "a dog at the moon").matrix, matrix, atol=1e-6)
    assert recorded.count("query") == min(2, len(queries))


def test_changed_weights_are_another_structure():
    model = tiny()
    explainer = Explainer(model)
    for query in QUERIES:
        explainer.explain(query, "a dog at the moon")
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.1)
    for query in QUERIES:
        found = explainer.explain(query, "a dog at the moon")
        assert found.gap == pytest.approx(0.0, abs=1e-5)
        np.testing.assert_allclose(found.matrix, Explainer(model).explain(query, "a dog at the moon").matrix, atol=1e-6)


def test_threads_may_share_structures():
    explainer, alone = Explainer(tiny()), Explainer(tiny())
    queries = [" ".join(QUERIES[turn % 3].split()[turn % 5 :]) for turn in range(40)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda query: explainer.factor([query], "query")[0].rows, queries))
    for query, rows in zip(queries, together, strict=True):
        np.testing.assert_allclose(rows, alone.factor([query], "query")[0].rows, atol=1e-6)


def test_nothing_of_a_failed_capture_stays():
    with pytest.raises(ZeroDivisionError):
        Structure.capture(torch.zeros(1, 2, dtype=torch.long), lambda: 1 / 0)
    assert _torch.current_dispatch_mode() is None
    assert torch.overrides._get_current_function_mode() is None
