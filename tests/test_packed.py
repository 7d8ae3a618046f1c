"""Ordered copies of weights: the same products, never of weights that are no more, never more memory than said."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from models import ARCHITECTURES, TEXTS, tiny
from references import lrp_rows
from torch import nn

from rag_explain.encoder import Encoder
from rag_explain.linear import LRP, packed
from rag_explain.methods.bilrp import freeze

pytestmark = pytest.mark.skipif(not packed._can_order(), reason="torch was built without oneDNN")


@pytest.fixture(autouse=True)
def no_copies():
    packed._copies.clear()
    yield
    packed._copies.clear()


def _weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape), requires_grad=False)


@pytest.mark.parametrize("rows", [1, 14, 182, packed.ROWS])
def test_the_product_is_the_usual_one(rows):
    weight, x = _weight(48, 32), torch.randn(rows, 32)
    expected = x.double() @ weight.double().T
    for given in (x, x.T.contiguous().T):  # the second lies in memory column by column
        found = packed.product(given, weight)
        assert found is not None
        assert found.is_contiguous()
        assert torch.allclose(found.double(), expected, atol=1e-4)


def test_many_rows_other_precisions_and_inference_weights_are_left_to_torch():
    weight = _weight(48, 32)
    assert packed.product(torch.randn(packed.ROWS + 1, 32), weight) is None
    assert packed.product(torch.randn(4, 32, dtype=torch.float64), weight) is None
    assert packed.product(torch.randn(4, 32), nn.Parameter(weight.double())) is None
    with torch.inference_mode():
        assert packed.product(torch.randn(4, 32), torch.randn(48, 32)) is None
    assert not len(packed._copies)


@torch.no_grad()
def test_a_weight_that_was_written_to_or_exchanged_is_copied_again():
    weight, x = _weight(48, 32), torch.randn(5, 32)
    assert torch.allclose(packed.product(x, weight), x @ weight.T, atol=1e-4)
    weight.mul_(2)
    assert torch.allclose(packed.product(x, weight), x @ weight.T, atol=1e-4)
    weight.data = torch.randn(48, 32)
    assert torch.allclose(packed.product(x, weight), x @ weight.T, atol=1e-4)
    assert len(packed._copies) == 1


def test_copies_take_no_more_memory_than_the_limit_and_go_with_their_weights(monkeypatch):
    first, second, x = _weight(48, 32), _weight(48, 32), torch.randn(5, 32)
    monkeypatch.setattr(packed, "LIMIT", first.numel() * 4)
    assert packed.product(x, first) is not None
    assert packed.product(x, second) is None
    del first
    gc.collect()
    assert packed.product(x, second) is None  # it was refused once, and is not asked for again
    assert packed.product(x, _weight(48, 32)) is not None


def test_a_torch_without_onednn_does_without(monkeypatch):
    monkeypatch.setattr(packed, "_can_order", lambda: False)
    assert packed.product(torch.randn(5, 32), _weight(48, 32)) is None


def test_threads_at_once_get_the_same():
    weight, x = _weight(384, 128), torch.randn(40, 128)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: packed.product(x, weight), range(64)))
    assert all(torch.allclose(one, x @ weight.T, atol=1e-4) for one in found)
    assert len(packed._copies) == 1


@torch.no_grad()
@pytest.mark.parametrize("name", ["bert", "qwen3"])
@pytest.mark.parametrize("layer", [0, 1])
def test_rows_with_copies_equal_the_oracle(name, layer, monkeypatch):
    """The oracle in double precision; the usual product, in single precision too, is no nearer to it."""
    exact, encoder = tiny(name), Encoder(tiny(name, dtype=torch.float32))
    batch = encoder.tokenize(TEXTS[:1], "query")
    frozen = freeze(encoder, batch, layer, LRP)
    assert frozen.hidden.dtype == torch.float32
    rows, rest = frozen.push_rows()
    assert any(copy.ordered is not None for copy in packed._copies.values())
    with torch.enable_grad():
        oracle = lrp_rows(exact, batch.features, layer, gated=ARCHITECTURES[name].gated)
    packed._copies.clear()
    monkeypatch.setattr(packed, "LIMIT", 0)
    usual, usual_rest = frozen.push_rows()
    assert all(copy.ordered is None for copy in packed._copies.values())
    for found, found_rest in ((rows, rest), (usual, usual_rest)):
        assert ((found - oracle).norm() / oracle.norm()) < 1e-5
        assert torch.allclose(found.sum(dim=1) + found_rest, frozen.embedding, atol=1e-5)
