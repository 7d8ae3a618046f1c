"""Ordered copies of weights: the same products, never of weights that are no more, never more memory than said."""

from __future__ import annotations

import gc
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from rag_explain.encoder.model import Encoder
from rag_explain.linear import JACOBIAN, LRP, packed
from rag_explain.methods.frozen import freeze
from tests.support.models import ARCHITECTURES, TEXTS, tiny
from tests.support.references import lrp_rows

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


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


def test_what_does_not_pay_or_cannot_be_is_left_to_torch(monkeypatch):
    weight = _weight(48, 32)
    assert packed.product(torch.randn(packed.ROWS + 1, 32), weight) is None
    assert packed.product(torch.randn(4, 32, dtype=torch.float64), weight) is None
    assert packed.product(torch.randn(4, 32), nn.Parameter(weight.double())) is None
    assert packed.product(torch.randn(4, 32), _weight(32, 32)) is None
    assert packed.product(torch.randn(4, 2), _weight(packed.ELEMENTS, 2)) is None
    with torch.inference_mode():
        assert packed.product(torch.randn(4, 32), torch.randn(48, 32)) is None
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert packed.product(torch.randn(4, 32), weight) is None
    assert not len(packed._copies)


class Wrapped(nn.Parameter):
    """Looks like a weight, and is something else inside."""


@torch.no_grad()
def test_parameters_of_other_kinds_are_left_to_torch():
    model = tiny("bert", dtype=torch.float32)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = Wrapped(module.weight.data)
    encoder = Encoder(model)
    freeze(encoder, encoder.read(TEXTS[:1], "query"), 0, LRP).push_rows()
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


@pytest.mark.parametrize("shape", [(48, 32), (384, 128), (384, 1536), (7, 5)])
def test_writes_that_torch_does_not_count_are_seen(shape):
    """Adapters are merged into weights with `weight.data += ...`."""
    weight, x = _weight(*shape), torch.randn(5, shape[1])
    packed.product(x, weight)
    for write in (
        lambda: weight.data.add_(torch.randn(*shape), alpha=1e-3),
        lambda: weight.data.copy_(torch.randn(*shape)),
        lambda: weight.detach().numpy().__imul__(2),
    ):
        write()
        assert torch.allclose(packed.product(x, weight), x @ weight.T, atol=1e-3)


@torch.no_grad()
def test_one_element_that_was_changed_unseen_is_found_because_the_rows_do_not_add_up():
    encoder = Encoder(tiny("bert", dtype=torch.float32))
    batch = encoder.read(TEXTS[:1], "query")
    freeze(encoder, batch, 0, LRP).push_rows()
    (weight, *_) = [weight for weight, copy in packed._copies.items() if weight.shape == (32, 16)]
    looked_at = torch.zeros_like(weight)
    packed._sample(looked_at).fill_(1)
    (unseen, *_) = (looked_at == 0).nonzero().tolist()
    weight.data[tuple(unseen)] += 5
    assert torch.equal(packed._copies[weight].sample, packed._sample(weight))
    for _ in range(2):  # the first time without copies, then with new ones
        frozen = freeze(encoder, batch, 0, LRP)[0]
        rows, rest = frozen.push_rows()
        assert torch.allclose(rows.sum(dim=1) + rest, frozen.embedding, atol=1e-5)
    assert any(copy.ordered is not None for copy in packed._copies.values())


@torch.no_grad()
def test_derivatives_which_nothing_could_check_are_computed_without_copies():
    encoder = Encoder(tiny("bert", dtype=torch.float32))
    frozen = freeze(encoder, encoder.read(TEXTS[:1], "query"), 0, JACOBIAN)[0]
    frozen.push_rows()
    frozen = freeze(encoder, encoder.read(TEXTS[:1], "query"), 0, LRP)[0]
    frozen.push_rows(weights=frozen.hidden * 2)
    frozen.rest(torch.ones(1, 1, 16))
    assert not len(packed._copies)


def test_copies_take_no_more_memory_than_the_limit_and_go_with_their_weights(monkeypatch):
    first, second, x = _weight(48, 32), _weight(48, 32), torch.randn(5, 32)
    monkeypatch.setattr(packed, "LIMIT", 64 * 64 * 4)
    assert packed.product(x, first) is not None
    assert packed.product(x, second) is None
    del first
    gc.collect()
    assert packed.product(x, second) is None  # it was refused once, and is not asked for again
    assert packed.product(x, _weight(48, 32)) is not None


def test_what_onednn_cannot_do_is_left_to_torch(monkeypatch):
    assert packed.product(torch.randn(5, 384), _weight(0, 384)) is None

    def refuse(x, ordered):
        raise RuntimeError("could not create a primitive")

    monkeypatch.setattr(packed, "_multiply", refuse)
    assert packed.product(torch.randn(5, 32), _weight(48, 32)) is None


def test_narrow_weights_count_as_much_as_their_copies_take(monkeypatch):
    monkeypatch.setattr(packed, "LIMIT", 10 * 64 * 384 * 4)
    weights = [_weight(3, 384) for _ in range(20)]
    found = [packed.product(torch.randn(5, 384), weight) for weight in weights]
    assert sum(one is not None for one in found) == 10


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_that_is_born_while_a_copy_is_made_can_make_its_own():
    with packed._copying:
        child = os.fork()
        if not child:
            packed.forget([])  # takes the lock
            os._exit(0)
    for _ in range(100):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.1)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pytest.fail("the child hangs")
    assert status == 0


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
    batch = encoder.read(TEXTS[:1], "query")
    frozen = freeze(encoder, batch, layer, LRP)[0]
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
