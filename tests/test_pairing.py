from __future__ import annotations

import numpy as np
import pytest
import torch

from rag_explain import pairing as product
from rag_explain.factors import Factors
from rag_explain.pairing import Placed, multiply, pairs
from rag_explain.store.memory import Memory
from tests.support.synthetic import make_factors


def placed(lengths: list[int], h: int = 16) -> tuple[list[Factors], list[Placed]]:
    factors = [make_factors(seed, n=n, h=h, norm=1.0 + seed) for seed, n in enumerate(lengths)]
    memory = Memory()
    return factors, [memory.put(bytes([seed]), half) for seed, half in enumerate(factors)]


@pytest.mark.parametrize("lengths", [[1], [5, 0, 9], [3] * 40, [2100, 1], [1, 2100, 1]])
def test_every_document_gets_the_product_of_its_own_factors(lengths: list[int]) -> None:
    query = make_factors(99, n=4, norm=3.0)
    factors, documents = placed(lengths)
    matrices, scores = pairs(query, documents)
    left = np.vstack([query.rows, query.rest]).astype(np.float64)
    for half, matrix, score in zip(factors, matrices, scores, strict=True):
        right = np.vstack([half.rows, half.rest]).astype(np.float64)
        np.testing.assert_allclose(matrix, left @ right.T / (half.norm * 3.0), rtol=1e-4, atol=1e-6)
        expected = query.embedding.astype(np.float64) @ half.embedding.astype(np.float64) / (half.norm * 3.0)
        assert score == pytest.approx(expected)
        assert matrix.flags.owndata
        assert not matrix.flags.writeable


def test_ten_documents_are_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    products: list[tuple[int, ...]] = []
    mm = torch.mm

    def counted(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        products.append(tuple(right.shape))
        return mm(left, right)

    monkeypatch.setattr(torch, "mm", counted)
    _, documents = placed([105] * 10)
    pairs(make_factors(99, n=4), documents)
    assert products == [(16, 1060)]


def test_panels_are_bounded_and_keep_the_order() -> None:
    _, documents = placed([700] * 10)
    panels = [(panel, result.shape) for panel, result in multiply(np.ones((3, 16), np.float32), documents)]
    assert [document for panel, _ in panels for document in panel] == documents
    assert all(shape == (3, 701 * len(panel)) for panel, shape in panels)
    assert max(len(panel) for panel, _ in panels) == product._CPU_ROWS // 701


def test_documents_on_another_device_are_multiplied_there() -> None:
    memory = Memory()
    here = memory.put(b"1", make_factors(1))
    there = memory.put(b"2", make_factors(2), device="meta")
    panels = list(product._panels([here, there, there, here]))
    assert [[document.block.device.type for document in panel] for panel in panels] == [["cpu"], ["meta"] * 2, ["cpu"]]
