"""Biases counted where they enter, held to an oracle in which every bias is a leaf of its own, one per position."""

from __future__ import annotations

import pytest
import torch
from sentence_transformers.sentence_transformer.modules import Dense
from tokenizers.processors import ByteLevel

from rag_explain.encoder.model import Encoder
from rag_explain.linear import ATTN_LRP, LRP
from rag_explain.methods.frozen import freeze
from tests.support.models import ARCHITECTURES, TEXTS, tiny
from tests.support.references import lrp_rows_with_biases

POOLINGS = ("cls", "max", "lasttoken", "weightedmean", "mean_sqrt_len_tokens", ("mean", "cls"))
CASES = [*((name, "mean") for name in ARCHITECTURES), *(("bert", pooling) for pooling in POOLINGS)]
RULES = pytest.mark.parametrize("rules", [LRP, ATTN_LRP], ids=lambda rules: rules.name)


def dense(activation: torch.nn.Module | None = None, residual: bool = False) -> list[torch.nn.Module]:
    module = Dense(16, 16, bias=True, activation_function=activation or torch.nn.Identity(), use_residual=residual)
    torch.nn.init.normal_(module.linear.bias)
    return [module]


def made(name, pooling="mean", **settings):
    model = tiny(name, pooling, **settings)
    encoder = Encoder(model)
    encoder.model = model
    return encoder


def _frozen(encoder, texts=TEXTS, layer=0, rules=LRP, **options):
    batch = encoder.read(texts, "document")
    return batch, freeze(encoder, batch, layer, rules, biases_by_position=True, **options)[0]


def _relative(one, other):
    return float((one - other).norm() / other.norm())


@torch.no_grad()
@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize(("name", "pooling"), CASES)
def test_rows_equal_the_relevance_of_every_bias_as_an_input_of_its_own(name, pooling, layer):
    encoder, architecture = made(name, pooling), ARCHITECTURES[name]
    batch, frozen = _frozen(encoder, layer=layer)
    ways = frozen.push_rows(), frozen.pull_rows()
    for index in range(len(TEXTS)):
        with torch.enable_grad():
            features = batch.select([index]).features
            oracle, after = lrp_rows_with_biases(encoder.model, features, layer, gated=architecture.gated)
        assert not after.any()
        for found, _ in ways:
            assert _relative(found[index, batch.positions(index)], oracle[0]) < architecture.tolerance


@torch.no_grad()
@RULES
@pytest.mark.parametrize(("name", "pooling"), CASES)
def test_nothing_is_left_over_but_what_enters_after_pooling(name, pooling, rules):
    encoder = made(name, pooling)
    _, frozen = _frozen(encoder, rules=rules)
    tolerance = ARCHITECTURES[name].tolerance
    for rows, rest in (frozen.push_rows(), frozen.pull_rows()):
        assert not rest.any()
        assert _relative(rows.sum(dim=1), frozen.embedding) < tolerance
    # Without early pooling constants are added at every position; with it they are pooled, and told apart again.
    _, late = _frozen(encoder, rules=rules, early_pooling=False)
    assert torch.allclose(late.push_rows()[0], rows, atol=1e-10)
    assert torch.allclose(late.pull_rows()[0], rows, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken", "max"])
def test_a_bias_after_pooling_belongs_to_no_token(pooling, residual):
    encoder = made("bert", pooling, after=lambda: dense(residual=residual))
    batch, frozen = _frozen(encoder)
    bias = encoder.model[2].linear.bias
    for rows, rest in (frozen.push_rows(), frozen.pull_rows()):
        assert torch.allclose(rest, bias.expand_as(rest), atol=1e-12)
        assert _relative(rows.sum(dim=1) + rest, frozen.embedding) < 1e-9
        with torch.enable_grad():
            oracle, after = lrp_rows_with_biases(encoder.model, batch.select([0]).features, 0, gated=False)
        assert _relative(rows[0, batch.positions(0)], oracle[0]) < 1e-9
        assert torch.allclose(after, rest[:1], atol=1e-12)


@torch.no_grad()
def test_a_text_of_one_token_alone_is_as_beside_a_longer_one():
    for pooling in ("mean", "cls", "lasttoken"):
        model = tiny("gpt_neo", pooling, after=dense)
        model[0].tokenizer.backend_tokenizer.post_processor = ByteLevel()  # adds no special tokens
        encoder = Encoder(model)
        both, frozen = _frozen(encoder, ["the", "a dog in paris"])
        alone_batch, alone = _frozen(encoder, ["the"])
        assert alone.hidden.shape[1] == 1
        for (rows, rest), (own, own_rest) in (
            (frozen.push_rows(), alone.push_rows()),
            (frozen.pull_rows(), alone.pull_rows()),
        ):
            assert torch.allclose(rows[0, both.positions(0)], own[0, alone_batch.positions(0)], atol=1e-6)
            assert torch.allclose(rest[0], own_rest[0], atol=1e-6)
            assert rest[0].any()


@torch.no_grad()
@RULES
@pytest.mark.parametrize(("name", "pooling"), [("bert", "mean"), ("bert", "max"), ("qwen3", "lasttoken")])
def test_groups_and_chunks_change_nothing(name, pooling, rules, monkeypatch):
    encoder = made(name, pooling, after=dense)
    _, frozen = _frozen(encoder, rules=rules)
    rows, rest = frozen.push_rows()
    groups = torch.full(frozen.hidden.shape[:2], -1)
    groups[0, 1:4], groups[0, 5:9], groups[1, ::2] = 0, 1, 1
    summed = torch.stack([(rows * (groups == group).unsqueeze(-1)).sum(dim=1) for group in range(2)], dim=1)
    for size in (None, 1, 2, 3):
        if size is not None:
            monkeypatch.setattr(frozen, "chunk", lambda max_bytes, count, size=size: size)
        for way in (frozen.push_rows, frozen.pull_rows):
            assert torch.allclose(way()[0], rows, atol=1e-9)
            found, same = way(groups=groups)
            assert torch.allclose(found, summed, atol=1e-9)
            assert torch.allclose(same, rest, atol=1e-9)


@torch.no_grad()
def test_pull_is_the_transpose_of_push_with_biases_too():
    encoder = made("electra", after=dense)
    _, frozen = _frozen(encoder)
    rows, rest = frozen.push_rows()
    cotangents = torch.randn(3, len(TEXTS), 16, dtype=rows.dtype)
    tokens, biases = frozen.relevance(cotangents)
    assert torch.allclose(tokens, torch.einsum("cde,dne->cdn", cotangents, rows), atol=1e-10)
    assert torch.allclose(biases, torch.einsum("cde,de->cd", cotangents, rest), atol=1e-10)
