"""Recording, on what modules do that no encoder in the table does: writes in place, masks, indices, fused operations.

Each function stands between a small BERT and its pooling, and is held to torch's own reverse mode.
"""

from __future__ import annotations

import pytest
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from rag_explain import Explainer
from rag_explain.encoder.model import Encoder
from rag_explain.errors import UnsupportedOperation
from rag_explain.linear import JACOBIAN, LRP
from rag_explain.methods.frozen import freeze
from tests.support.models import TEXTS, tiny
from tests.support.references import gradient_rows


class Between(nn.Module):
    """Applies a function to token vectors."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function
        torch.manual_seed(1)
        self.dense = nn.Linear(16, 16)

    def forward(self, features):
        features["token_embeddings"] = self.function(self, features["token_embeddings"])
        return features


def between(function, dtype=torch.float64) -> SentenceTransformer:
    model = tiny("bert", dtype=dtype)
    return SentenceTransformer(modules=[model[0], Between(function), model[1]], device="cpu").to(dtype)


def mask_from_the_tokens(module, x: Tensor) -> Tensor:
    return x + F.scaled_dot_product_attention(x, x, x, attn_mask=x @ x.transpose(-1, -2) * 0.3)


def mask_overwritten_later(module, x: Tensor) -> Tensor:
    mask = torch.zeros(x.shape[1], x.shape[1], dtype=x.dtype)
    mask[:, 0] = 3.0
    mixed = F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
    mask.zero_()
    return x + mixed


def mask_that_blinds_a_position(module, x: Tensor) -> Tensor:
    mask = torch.zeros(x.shape[1], x.shape[1], dtype=x.dtype)
    mask[-1] = float("-inf")
    return x + F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], attn_mask=mask)[:, 0]


def grouped_and_causal(module, x: Tensor) -> Tensor:
    query = x.view(*x.shape[:2], 4, 4).transpose(1, 2)
    key = query[:, :2]
    mixed = F.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)
    return x + mixed.transpose(1, 2).flatten(2)


def added_to_itself(module, x: Tensor) -> Tensor:
    y = module.dense(x)
    y.add_(y)
    return x + y


def chain_in_place(module, x: Tensor) -> Tensor:
    y = module.dense(x)
    y.unsqueeze_(1)
    y.squeeze_(1)
    y.mul_(2).relu_()
    return x + y


def index_made_on_the_way(module, x: Tensor) -> Tensor:
    backwards = torch.arange(x.shape[1]).flip(0)
    return x + x[:, backwards] + x.index_select(1, backwards)


def bias_by_position(module, x: Tensor) -> Tensor:
    flat = x.flatten(0, 1)
    bias = torch.arange(len(flat), dtype=x.dtype)[:, None].expand(-1, 16)
    return torch.addmm(bias, flat, module.dense.weight.t()).view_as(x)


def root_mean_square(module, x: Tensor) -> Tensor:
    return F.rms_norm(x, (16,), eps=1e-6)


FOLLOWED = [
    mask_from_the_tokens, mask_overwritten_later, mask_that_blinds_a_position, grouped_and_causal, added_to_itself,
    chain_in_place, index_made_on_the_way, bias_by_position, root_mean_square,
]  # fmt: skip


@pytest.mark.parametrize("function", FOLLOWED, ids=lambda function: function.__name__)
def test_followed_exactly(function):
    model = between(function)
    encoder = Encoder(model)
    with encoder.computing():
        batch = encoder.read(TEXTS, "document")
        frozen = freeze(encoder, batch, 0, LRP)[0]
        rows, rest = frozen.push_rows()
        assert torch.equal(frozen.embedding, encoder.run(batch))
        assert (rows.sum(dim=1) + rest - frozen.embedding).norm() < 1e-12 * frozen.embedding.norm()
        with torch.enable_grad():
            expected = gradient_rows(model, batch.features, 0)
        frozen = freeze(encoder, batch, 0, JACOBIAN)[0]
        for found, _ in (frozen.push_rows(), frozen.pull_rows()):
            assert (found - expected).norm() < 1e-12 * expected.norm()


def a_product_with_itself_in_place(module, x: Tensor) -> Tensor:
    y = module.dense(x)
    y.mul_(y)
    return x + y


def a_factor_that_is_overwritten_later(module, x: Tensor) -> Tensor:
    factor = torch.full((16,), 2.0, dtype=x.dtype)
    y = x * factor
    factor.zero_()
    return x + y


@pytest.mark.parametrize(
    "function", [a_product_with_itself_in_place, a_factor_that_is_overwritten_later], ids=lambda one: one.__name__
)
def test_what_autograd_itself_refuses_still_sums_to_the_embedding(function):
    encoder = Encoder(between(function))
    with encoder.computing():
        frozen = freeze(encoder, encoder.read(TEXTS, "document"), 0, LRP)[0]
        rows, rest = frozen.push_rows()
        assert (rows.sum(dim=1) + rest - frozen.embedding).norm() < 1e-12 * frozen.embedding.norm()


def written_to_a_buffer(module, x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    torch.cat([x[:, :1], x[:, 1:]], 1, out=out)
    return out


def lists_in_place(module, x: Tensor) -> Tensor:
    y = module.dense(x)
    torch._foreach_add_([y], 1.0)
    return y


def transposed_in_place(module, x: Tensor) -> Tensor:
    y = module.dense(x)
    y.transpose_(0, 1)
    return y.transpose(0, 1)


def chance(module, x: Tensor) -> Tensor:
    return F.dropout(x, 0.5, training=True)


def a_dense_layer_of_one_output(module, x: Tensor) -> Tensor:
    return x + F.linear(x, module.dense.weight[0])[..., None]


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (written_to_a_buffer, "aten.cat"),
        (lists_in_place, "aten._foreach_add_"),
        (transposed_in_place, "aten.transpose_"),
        (chance, "aten.dropout"),
        (a_dense_layer_of_one_output, "aten.linear"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_refused_by_name_and_nothing_is_left_behind(function, named):
    encoder = Encoder(between(function))
    with encoder.computing(), pytest.raises(UnsupportedOperation, match=named):
        freeze(encoder, encoder.read(TEXTS, "document"), 0, LRP)
    assert not torch.is_inference_mode_enabled()
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_a_module_that_keeps_a_tensor_between_passes():
    def cached(module, x: Tensor) -> Tensor:
        if getattr(module, "kept", None) is None:
            module.kept = torch.ones(128)
        module.kept[: x.shape[1]] = 2.0
        return x * module.kept[: x.shape[1], None]

    assert Explainer(between(cached, torch.float32)).explain(*TEXTS).gap == pytest.approx(0, abs=1e-5)


def test_an_explainer_made_in_inference_mode():
    model = tiny("bert", dtype=torch.float32)
    with torch.inference_mode():
        explainer = Explainer(model, device="cpu:0")
        first = explainer.explain(*TEXTS)
    assert explainer.explain(*TEXTS).score == pytest.approx(first.score)
    assert next(explainer.scorer.encoder.whole[0].auto_model.parameters()) is next(model.parameters())
