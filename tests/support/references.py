"""Slow oracles, written from the equations and sharing nothing with the library but the model.

Sections are those of Vasileiou & Eberle (2024), whose equations have no numbers; AH, LN and GA are their rules.
LRP by the rules of Ali et al. (2022) is gradient x input of a network in which attention probabilities, norm
denominators and activation ratios are detached. Here that network is a copy of the model whose modules are rewritten
one by one, and the gradient is taken by one ordinary backward pass per embedding dimension: the papers' own way.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn


def lrp_rows(model: SentenceTransformer, features: dict[str, Any], layer: int, *, gated: bool) -> Tensor:
    """(D, n, e): LRP relevance of every token for every embedding dimension, at the input of block `layer`."""
    return rows_by_dimension(ruled_copy(model, gated=gated), features, layer)


def ruled_copy(model: SentenceTransformer, *, gated: bool) -> SentenceTransformer:
    """A copy of the model in which every module follows the rules."""
    ruled = copy.deepcopy(model)
    _apply_rules(ruled, gated=gated)
    return ruled


def rows_by_dimension(
    ruled: SentenceTransformer, features: dict[str, Any], layer: int, dimensions: int | None = None
) -> Tensor:
    """(D, n, e): the papers' way, one backward pass per dimension through a ruled copy, which is used up.

    `dimensions` stops after that many, for measuring.
    """
    with _detached_softmax():
        return _gradient_times_input(ruled, features, layer, dimensions)


def lrp_rows_with_biases(
    model: SentenceTransformer, features: dict[str, Any], layer: int, *, gated: bool
) -> tuple[Tensor, Tensor]:
    """(D, n, e) and (D, e): `lrp_rows` with every bias counted where it enters, and what enters after pooling.

    Every bias is a leaf of its own, one for each position and each call of its module: an input like any other, whose
    relevance is gradient x input.
    """
    ruled = ruled_copy(model, gated=gated)
    leaves: list[Tensor] = []

    def add(module: nn.Module, args: Any, out: Tensor, bias: Tensor) -> Tensor:
        leaves.append(bias.detach().expand(out.shape).clone().requires_grad_())
        return out + leaves[-1]

    for module in ruled.modules():
        if isinstance(module, nn.Linear | nn.LayerNorm) and module.bias is not None:
            bias, module.bias = module.bias, None
            module.register_forward_hook(lambda module, args, out, bias=bias: add(module, args, out, bias))
    with _detached_softmax():
        rows = _gradient_times_input(ruled, features, layer, leaves=leaves)
    return rows[:, :-1], rows[:, -1]


def gradient_rows(model: SentenceTransformer, features: dict[str, Any], layer: int) -> Tensor:
    """(D, n, e): gradient x input without any rule, a half of section 3.1's R_ii' = x_i x_i' [Hessian y]_ii'."""
    return _gradient_times_input(copy.deepcopy(model), features, layer)


def _gradient_times_input(
    model: SentenceTransformer,
    features: dict[str, Any],
    layer: int,
    dimensions: int | None = None,
    leaves: list[Tensor] | None = None,
) -> Tensor:
    """(D, n, e); with `leaves`, which the pass makes, (D, n + 1, e): theirs by position, the others' in a last row."""
    model.eval()
    model[0].auto_model.set_attn_implementation("eager")
    caught: list[Tensor] = []
    calls = [0]

    def catch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        calls[0] += 1
        if calls[0] - 1 != layer:
            return None
        hidden = (args[0] if args else kwargs["hidden_states"]).detach().requires_grad_()
        caught.append(hidden)
        return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

    for block in blocks(model):
        block.register_forward_pre_hook(catch, with_kwargs=True)
    out = dict(features)
    for module in model:
        if type(module).__name__ != "Normalize":
            out = module(out)
    embedding = out["sentence_embedding"]
    (hidden,) = caught
    columns = []
    for dimension in range(dimensions or embedding.shape[1]):  # section 3.1: one backward pass for each m = 1 ... h
        inputs = [hidden, *(leaves or ())]
        found = torch.autograd.grad(embedding[:, dimension].sum(), inputs, retain_graph=True, allow_unused=True)
        used = [(value, slope) for value, slope in zip(inputs, found, strict=True) if slope is not None]
        relevance = [(slope * value).sum(dim=-1) for value, slope in used]
        tokens = sum(one for one in relevance if one.ndim == 2)
        after = sum((one for one in relevance if one.ndim == 1), torch.zeros(len(hidden), dtype=hidden.dtype))
        # section 3.1: LRP([phi]_m, x)_i = x_i d[phi]_m / dx_i of the ruled copy, summed over the features of a token
        columns.append(tokens if leaves is None else torch.cat([tokens, after[:, None]], dim=1))
    return torch.stack(columns, dim=-1).detach()


def blocks(model: SentenceTransformer) -> list[nn.Module]:
    """The encoder blocks, by the name each architecture gives them."""
    core = model[0].auto_model
    for path in ("encoder.layer", "bert.encoder.layer", "transformer.layer", "encoder.block", "layers", "h"):
        try:
            found = core.get_submodule(path)
        except AttributeError:
            continue
        return list(found)
    return [module for module in core.modules() if type(module).__name__ == "AlbertLayer"]


def _apply_rules(model: SentenceTransformer, *, gated: bool) -> None:
    for module in model.modules():
        name = type(module).__name__
        if isinstance(module, nn.LayerNorm):
            module.forward = _layer_norm(module)
        elif name.endswith("RMSNorm") or name == "T5LayerNorm":
            module.forward = _rms_norm(module)
        elif name == "Tanh" or type(module).__module__.endswith(("activations", "activation")):
            alone = name == "Tanh" or not gated
            module.forward = _activation(module.forward) if alone else _gate(module.forward)


def _layer_norm(module: nn.LayerNorm) -> Callable[[Tensor], Tensor]:
    """LN, section 3.2: y = (x - E[x]) / [sqrt(eps + Var[x])].detach(), and its weight and bias."""

    def forward(x: Tensor) -> Tensor:
        deviation = (x.var(dim=-1, unbiased=False, keepdim=True) + module.eps).sqrt().detach()
        y = (x - x.mean(dim=-1, keepdim=True)) / deviation
        y = y if module.weight is None else y * module.weight
        return y if module.bias is None else y + module.bias

    return forward


def _rms_norm(module: Any) -> Callable[[Tensor], Tensor]:
    """LN of encoders without a mean: y = x / [sqrt(E[x^2] + eps)].detach() * weight"""
    eps = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
    weight = 1.0 + module.weight if type(module).__name__.startswith("Gemma3") else module.weight

    def forward(x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(dim=-1, keepdim=True) + eps).sqrt().detach() * weight

    return forward


def _activation(act: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """GA, section 3.2, "in proportion to the computed activations": y = x * [act(x) / x].detach()"""
    return lambda x: x * (act(x) / x).detach()


def _gate(act: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Signal takes all: the gate is a coefficient."""
    return lambda x: act(x).detach()


@contextmanager
def _detached_softmax() -> Iterator[None]:
    """AH, section 3.2: y_j = sum_i h_i [p_ij].detach(), in the copy's eager attention.

    For one test at a time: it patches functions.
    """
    functional, plain = nn.functional.softmax, torch.softmax
    nn.functional.softmax = lambda *args, **kwargs: functional(*args, **kwargs).detach()
    torch.softmax = lambda *args, **kwargs: plain(*args, **kwargs).detach()
    try:
        yield
    finally:
        nn.functional.softmax, torch.softmax = functional, plain
