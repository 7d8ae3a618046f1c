"""AttnLRP's rules (Achtibat et al. 2024), product by product and on whole encoders.

Relevance of a value x is x * c, where c is its cotangent: R_out = out * c. A rule conserves when the relevance that
goes in, with what goes to the rest, is what came out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rag_explain import Explainer
from rag_explain.encoder.model import Encoder
from rag_explain.linear import ATTN_LRP, AffineMap, Recorder
from rag_explain.methods.bilrp import BiLRP
from rag_explain.methods.frozen import freeze
from rag_explain.scorers.bi_encoder import BiEncoder
from tests.support import references
from tests.support.models import ARCHITECTURES, TEXTS, tiny

SIZE = (1, 4, 6)


def record(function: Callable[[Tensor], Tensor]) -> tuple[AffineMap, Tensor]:
    """A map from a hidden state (1, 4, 6) to whatever `function` makes of it, flattened; and a cotangent for it."""
    torch.manual_seed(0)
    with torch.no_grad(), Recorder(ATTN_LRP) as recorder:
        hidden = torch.randn(SIZE, dtype=torch.float64)
        recorder.mark(hidden)
        out = function(hidden).flatten(1)
    return recorder.freeze(out), torch.randn_like(out)


def test_a_product_of_matrices_gives_half_to_each() -> None:
    frozen, cotangent = record(lambda hidden: torch.bmm(hidden[..., :3], hidden[..., 3:].transpose(1, 2)))
    a, b = frozen.hidden[0, :, :3], frozen.hidden[0, :, 3:]
    c = cotangent.view(4, 4)
    (source,), rest = frozen.pull(cotangent[None]), frozen.rest(cotangent[None])
    relevance = (source * frozen.hidden)[0]
    # R_a[i, k] = sum_j a_ik b_jk c_ij / 2: the uniform rule of equation 15.
    assert torch.allclose(relevance[:, :3], a * (c @ b) / 2)
    assert torch.allclose(relevance[:, 3:], b * (c.T @ a) / 2)
    assert float(relevance.sum()) == pytest.approx(float((frozen.embedding * cotangent).sum()))
    assert not rest.any()


def test_softmax_is_its_taylor_expansion_and_its_constant_is_rest() -> None:
    frozen, cotangent = record(lambda hidden: torch.softmax(hidden, dim=-1))
    x, s = frozen.hidden[0], frozen.embedding.view(4, 6)
    out = s * cotangent.view(4, 6)  # the relevance that comes in from above
    (source,), rest = frozen.pull(cotangent[None]), frozen.rest(cotangent[None])
    relevance = (source * frozen.hidden)[0]
    # R_i = x_i (R_i - s_i sum_j R_j): proposition 3.1.
    assert torch.allclose(relevance, x * (out - s * out.sum(dim=-1, keepdim=True)))
    # It does not conserve by itself: what is missing is the expansion's constant, and that is in the rest.
    assert abs(float(relevance.sum()) - float(out.sum())) > 0.1
    assert float(relevance.sum() + rest.sum()) == pytest.approx(float(out.sum()))


def test_a_masked_softmax_gives_nothing_to_what_is_masked() -> None:
    mask = torch.tensor([True, True, False, True, False, True])
    frozen, cotangent = record(lambda hidden: torch.softmax(hidden.masked_fill(~mask, float("-inf")), dim=-1))
    (source,), rest = frozen.pull(cotangent[None]), frozen.rest(cotangent[None])
    relevance = (source * frozen.hidden)[0]
    assert torch.isfinite(relevance).all()
    assert not relevance[:, ~mask].any()
    assert float(relevance.sum() + rest.sum()) == pytest.approx(float((frozen.embedding * cotangent).sum()))


def test_a_gate_and_its_signal_get_half_each() -> None:
    frozen, cotangent = record(lambda hidden: torch.nn.functional.silu(hidden[..., :3]) * hidden[..., 3:])
    out = (frozen.embedding * cotangent).view(4, 3)
    (source,), rest = frozen.pull(cotangent[None]), frozen.rest(cotangent[None])
    relevance = (source * frozen.hidden)[0]
    assert torch.allclose(relevance[:, :3], out / 2)
    assert torch.allclose(relevance[:, 3:], out / 2)
    assert not rest.any()


def test_an_activation_passes_its_relevance_on() -> None:
    frozen, cotangent = record(torch.nn.functional.gelu)
    (source,) = frozen.pull(cotangent[None])
    assert torch.allclose(source * frozen.hidden, (frozen.embedding * cotangent).view(SIZE))


def test_a_norm_keeps_its_denominator_and_its_bias_is_rest() -> None:
    norm = torch.nn.LayerNorm(6, dtype=torch.float64)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    frozen, cotangent = record(norm.requires_grad_(False))
    (source,), rest = frozen.pull(cotangent[None]), frozen.rest(cotangent[None])
    out = (frozen.embedding * cotangent).sum()
    assert float((source * frozen.hidden).sum() + rest.sum()) == pytest.approx(float(out))
    assert float(rest.sum()) == pytest.approx(float((norm.bias * cotangent.view(4, 6)).sum()))


class HalfProducts(TorchFunctionMode):
    """A product of two matrices that both depend on the input keeps its value and half of each gradient."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.matmul, Tensor.matmul, Tensor.__matmul__) and all(arg.requires_grad for arg in args):
            a, b = args
            return (func(a, b.detach()) + func(a.detach(), b)) / 2
        return func(*args, **kwargs)


@pytest.mark.parametrize("architecture", ["bert", "roberta", "mpnet", "xlm-roberta"])
@pytest.mark.parametrize("layer", [0, 2])
def test_whole_encoders_follow_the_rules(architecture: str, layer: int) -> None:
    """Gradient times input of the model with every rule written into it, one backward pass per dimension."""
    model = tiny(architecture)
    encoder = Encoder(model)
    batch = encoder.read(TEXTS[:1], "document")
    with torch.no_grad():
        frozen = freeze(encoder, batch, layer, ATTN_LRP)[0]
        rows, rest = frozen.rows()
    ruled = copy.deepcopy(model).requires_grad_(False)
    references._apply_rules(ruled, gated=False)
    with HalfProducts():
        wanted = references._gradient_times_input(ruled, batch.features, layer)
    assert float((rows - wanted).norm() / wanted.norm()) < 1e-9
    assert torch.allclose(rows.sum(dim=1) + rest, frozen.embedding)


def test_the_option_is_named_in_the_settings_and_differs() -> None:
    scorer = BiEncoder(Encoder(tiny("bert")))
    batch = scorer.encoder.read(TEXTS, "document")
    with torch.no_grad():
        plain, other = (BiLRP(scorer, rules=rules).factor(batch, "token")[0] for rules in ("lrp", "attnlrp"))
    assert plain.settings["rules"] == "lrp"
    assert other.settings["rules"] == "attnlrp"
    assert abs(plain.rows - other.rows).max() > 1e-3
    assert other.error < 1e-6


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_masks_of_padded_batches_leave_no_infinity_behind(name: str) -> None:
    explainer = Explainer(tiny(name, dtype=torch.float32), rules="attnlrp")
    for explanation in explainer.explain_many(TEXTS[0], [TEXTS[1], TEXTS[0], "moon"]):
        assert np.isfinite(explanation.matrix).all()
        assert explanation.gap == pytest.approx(0, abs=1e-4)
