"""The frozen encoder against the slow oracle, and against itself."""

from __future__ import annotations

import pytest
import torch

from rag_explain import _torch
from rag_explain.encoder.model import Encoder
from rag_explain.linear import ATTN_LRP, JACOBIAN, LRP
from rag_explain.methods.frozen import freeze
from tests.support.models import ARCHITECTURES, TEXTS, tiny
from tests.support.references import gradient_rows, lrp_rows

LAYERS = (0, 1, 2)


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def encoder(request: pytest.FixtureRequest):
    model = tiny(request.param)
    encoder = Encoder(model)
    encoder.architecture = ARCHITECTURES[request.param]
    encoder.model, encoder.kind = model, request.param
    return encoder


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@torch.no_grad()
@pytest.mark.parametrize("rules", [LRP, ATTN_LRP, JACOBIAN], ids=lambda rules: rules.name)
@pytest.mark.parametrize("layer", LAYERS)
def test_recording_changes_no_bit_of_the_forward_pass(encoder, layer, rules):
    for texts in (TEXTS, TEXTS[:1]):
        batch = encoder.read(texts, "document")
        assert torch.equal(freeze(encoder, batch, layer, rules)[0].embedding, encoder.run(batch))


@torch.no_grad()
@pytest.mark.parametrize("layer", LAYERS)
def test_rows_equal_one_backward_pass_per_dimension_under_the_rules(encoder, layer):
    batch = encoder.read(TEXTS, "document")
    frozen = freeze(encoder, batch, layer, LRP)[0]
    pushed, pulled = frozen.push_rows()[0], frozen.pull_rows()[0]
    for index in range(len(TEXTS)):  # the oracle reads one text at a time, without padding
        alone = batch.select([index]).features
        with torch.enable_grad():
            oracle = lrp_rows(encoder.model, alone, layer, gated=encoder.architecture.gated)
        for rows in (pushed, pulled):
            assert _relative(rows[index, batch.positions(index)], oracle[0]) < encoder.architecture.tolerance


@torch.no_grad()
@pytest.mark.parametrize("enabled", [True, False], ids=["oneDNN", "torch"])
def test_rows_in_single_precision_are_those_of_the_oracle_in_double(encoder, monkeypatch, enabled):
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", enabled)
    multiply, made = _torch.onednn_product, []
    monkeypatch.setattr(_torch, "onednn_product", lambda *args: made.append(multiply(*args)) or made[-1])
    single = Encoder(tiny(encoder.kind, dtype=torch.float32))
    batch = encoder.read(TEXTS, "document")
    frozen = freeze(single, single.read(TEXTS, "document"), 0, LRP)[0]
    for index in range(len(TEXTS)):
        with torch.enable_grad():
            oracle = lrp_rows(encoder.model, batch.select([index]).features, 0, gated=encoder.architecture.gated)
        for rows in (frozen.push_rows()[0], frozen.pull_rows()[0]):
            assert _relative(rows[index, batch.positions(index)].double(), oracle[0]) < 1e-5
    assert bool(made) == (enabled and torch.backends.mkldnn.is_available())


@torch.no_grad()
@pytest.mark.parametrize("layer", LAYERS)
def test_rows_without_rules_equal_gradient_times_input(encoder, layer):
    batch = encoder.read(TEXTS, "document")
    frozen = freeze(encoder, batch, layer, JACOBIAN)[0]
    pushed, pulled = frozen.push_rows()[0], frozen.pull_rows()[0]
    for index in range(len(TEXTS)):
        with torch.enable_grad():
            oracle = gradient_rows(encoder.model, batch.select([index]).features, layer)
        # Where the model casts to float32, it is this oracle that is rounded: it differentiates the model as it is.
        allowed = encoder.architecture.tolerance * (5 if encoder.architecture.tolerance > 1e-9 else 1)
        for rows in (pushed, pulled):
            assert _relative(rows[index, batch.positions(index)], oracle[0]) < allowed


@torch.no_grad()
@pytest.mark.parametrize("rules", [LRP, ATTN_LRP], ids=lambda rules: rules.name)
@pytest.mark.parametrize("layer", LAYERS)
def test_rows_and_rest_sum_to_the_embedding(encoder, layer, rules):
    batch = encoder.read(TEXTS, "document")
    frozen = freeze(encoder, batch, layer, rules)[0]
    for rows, rest in (frozen.push_rows(), frozen.pull_rows()):
        assert _relative(rows.sum(dim=1) + rest, frozen.embedding) < encoder.architecture.tolerance


@torch.no_grad()
@pytest.mark.parametrize("rules", [LRP, ATTN_LRP, JACOBIAN], ids=lambda rules: rules.name)
def test_pull_is_the_transpose_of_push(encoder, rules):
    batch = encoder.read(TEXTS, "document")
    frozen = freeze(encoder, batch, 0, rules)[0]
    rows, rest = frozen.push_rows()
    cotangents = torch.randn(3, len(TEXTS), frozen.embedding.shape[1], dtype=rows.dtype)
    tokens, biases = frozen.relevance(cotangents)
    assert torch.allclose(tokens, torch.einsum("cde,dne->cdn", cotangents, rows), atol=1e-10)
    assert torch.allclose(biases, torch.einsum("cde,de->cd", cotangents, rest), atol=1e-10)


@torch.no_grad()
def test_without_biases_the_rows_alone_sum_to_the_embedding(encoder):
    model = tiny(encoder.kind)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
    unbiased = Encoder(model)
    frozen = freeze(unbiased, unbiased.read(TEXTS, "document"), 0, LRP)[0]
    rows, rest = frozen.push_rows()
    assert rest.abs().max() < 1e-12
    assert _relative(rows.sum(dim=1), frozen.embedding) < encoder.architecture.tolerance


@torch.no_grad()
def test_chunks_of_tangents_change_nothing(encoder, monkeypatch):
    frozen = freeze(encoder, encoder.read(TEXTS, "document"), 0, LRP)[0]
    rows, rest = frozen.push_rows()
    assert frozen.chunk(1, 7) == 1
    assert frozen.chunk(2**40, 7) == 7
    for size in (1, 2, 5, frozen.hidden.shape[1]):  # the last leaves a chunk to the biases alone, as does the first
        monkeypatch.setattr(frozen, "chunk", lambda max_bytes, count, size=size: size)
        for chunked, chunked_rest in (frozen.push_rows(), frozen.pull_rows()):
            assert torch.allclose(rows, chunked, atol=1e-10)
            assert torch.allclose(rest, chunked_rest, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("rules", [LRP, JACOBIAN], ids=lambda rules: rules.name)
def test_other_values_than_the_hidden_state_go_both_ways_alike(encoder, rules):
    frozen = freeze(encoder, encoder.read(TEXTS, "document"), 1, rules)[0]
    weights = torch.randn_like(frozen.hidden)
    (pushed, rest), (pulled, other_rest) = frozen.push_rows(weights=weights), frozen.pull_rows(weights=weights)
    assert _relative(pushed, pulled) < encoder.architecture.tolerance
    assert torch.allclose(rest, other_rest, atol=1e-10)


@torch.no_grad()
def test_the_shorter_way_is_taken(encoder, monkeypatch):
    for text, way in (("a", "push_rows"), (" ".join(TEXTS), "pull_rows")):
        frozen = freeze(encoder, encoder.read([text], "document"), 0, LRP)[0]
        monkeypatch.setattr(frozen, way, lambda *_, way=way: way)
        assert frozen.rows() == way
