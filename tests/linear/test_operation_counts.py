"""Speed, by counting floating-point operations: no clock, and so the same on every machine."""

from __future__ import annotations

import pytest
import torch

from rag_explain import _torch
from rag_explain.encoder.model import Encoder
from rag_explain.linear import LRP
from rag_explain.methods.frozen import freeze
from tests.support.models import TEXTS, tiny
from tests.support.operation_count import operations, operations_of_the_papers, products


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(tiny("bert", dtype=torch.float32))


def test_torchs_formulas_are_applied_to_every_product() -> None:
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5)
    assert operations(lambda: a @ b) == 2 * 3 * 4 * 5
    assert operations(lambda: torch.autograd.grad((a @ b).sum(), a)) == 2 * 2 * 3 * 4 * 5
    assert operations(lambda: torch.nn.functional.linear(a, b.T, b[0])) == 2 * 3 * 4 * 5
    if _torch.has_onednn(a):
        assert operations(lambda: _torch.onednn_product(a, b)) == 2 * 3 * 4 * 5


def test_products_are_kept_to_be_done_again() -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    ((again, (_, shapes)),) = products(lambda: (a @ b).relu() + 1)
    assert shapes == ((3, 4), (4, 5))
    assert torch.equal(again(), a @ b)


@torch.no_grad()
def test_rows_take_fewer_operations_than_one_backward_pass_per_dimension() -> None:
    model = tiny("bert", dtype=torch.float32)
    encoder = Encoder(model)
    batch = encoder.read(["a cat"], "query")
    papers = operations_of_the_papers(model, batch.features, model.get_embedding_dimension())
    assert papers > 2.9 * operations(lambda: freeze(encoder, batch, 0, LRP)[0].rows())


@torch.no_grad()
def test_a_group_costs_no_more_than_a_token(encoder: Encoder) -> None:
    frozen = freeze(encoder, encoder.read(TEXTS, "document"), 0, LRP)[0]
    length = frozen.hidden.shape[1]
    half = torch.arange(length).expand(2, -1) // 2
    every, grouped = operations(frozen.push_rows), operations(lambda: frozen.push_rows(groups=half))
    assert grouped < 0.7 * every
