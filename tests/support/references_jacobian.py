"""Integrated Jacobians from their equation: one backward pass per dimension at each of very many nodes.

Shares nothing with the library but the model: references are spelled out, positions are overheard from the text's pass.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn


@dataclass(frozen=True)
class Attribution:
    """rows (n, e), and e(a), e(r), both (e,)."""

    rows: Tensor
    embedding: Tensor
    reference: Tensor


def integrated_jacobian(
    model: SentenceTransformer,
    text: str,
    layer: int,
    *,
    normalise: bool,
    nodes: int = 200,
    rule: str = "gauss",
    task: str = "document",
) -> Attribution:
    """rows[t] = sum over nodes of weight * (de/dx at r + alpha (a - r)) restricted to token t, times (a - r)[t]."""
    model = copy.deepcopy(model).eval()
    model[0].auto_model.set_attn_implementation("eager")
    features: dict[str, Any] = dict(model.preprocess([text], prompt=None, task=task))
    tokenizer = model.tokenizer
    frame = {tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id}
    empty = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    ids = [token if token in frame else empty for token in features["input_ids"][0].tolist()]
    told = {**features, "input_ids": torch.tensor([ids])}

    heard: list[Tensor] = []
    places = [m for n, m in model.named_modules() if n.endswith("position_embeddings") and isinstance(m, nn.Embedding)]
    handles = [place.register_forward_pre_hook(lambda _m, args: heard.append(args[0])) for place in places]
    text_hidden, embedding = _pass(model, features, layer, None)
    for handle in handles:
        handle.remove()
    handles = [place.register_forward_pre_hook(lambda _m, _args: (heard[0],)) for place in places]
    start, reference = _pass(model, told, layer, None)
    for handle in handles:
        handle.remove()

    change = text_hidden - start
    if rule == "gauss":
        points, weights = np.polynomial.legendre.leggauss(nodes)
        points, weights = (points + 1) / 2, weights / 2
    else:  # the papers' right Riemann sum
        points, weights = np.arange(1, nodes + 1) / nodes, np.full(nodes, 1 / nodes)
    unit: Callable[[Tensor], Tensor] = (lambda e: e / e.norm()) if normalise else (lambda e: e)
    rows = torch.zeros(text_hidden.shape[1], len(embedding), dtype=text_hidden.dtype)
    for alpha, weight in zip(points, weights, strict=True):
        at = (start + alpha * change).detach().requires_grad_()
        with torch.enable_grad():
            _, out = _pass(model, features, layer, at)
            out = unit(out)
            for dimension in range(len(out)):
                (gradient,) = torch.autograd.grad(out[dimension], at, retain_graph=True)
                rows[:, dimension] += weight * (gradient * change)[0].sum(dim=-1)
    return Attribution(rows.detach(), unit(embedding).detach(), unit(reference).detach())


def similarity_saliency(
    model: SentenceTransformer, text: str, other: Tensor, layer: int, *, task: str = "document", scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(n, h) the gradient of the cosine with `other` (e,) by `scale` times the input of block `layer`, and it."""
    model = copy.deepcopy(model).eval()
    features: dict[str, Any] = dict(model.preprocess([text], prompt=None, task=task))
    hidden, _ = _pass(model, features, layer, None)
    at = (scale * hidden.detach()).requires_grad_()
    with torch.enable_grad():
        _, out = _pass(model, features, layer, at)
        cosine = torch.nn.functional.cosine_similarity(out, other, dim=0)
        (gradient,) = torch.autograd.grad(cosine, at)
    return gradient[0], hidden[0].detach()


def _pass(
    model: SentenceTransformer, features: dict[str, Any], layer: int, replacement: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The input of block `layer` (1, n, h), and the embedding (e,), with that input replaced where one is given."""
    caught: list[Tensor] = []
    calls = [0]

    def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        calls[0] += 1
        if calls[0] - 1 != layer:
            return None
        hidden = args[0] if args else kwargs["hidden_states"]
        caught.append(hidden)
        if replacement is None:
            return None
        return ((replacement, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": replacement})

    handles = [block.register_forward_pre_hook(enter, with_kwargs=True) for block in _blocks(model)]
    try:
        out = dict(features)
        for module in model:
            if type(module).__name__ != "Normalize":
                out = module(out)
    finally:
        for handle in handles:
            handle.remove()
    return caught[0], out["sentence_embedding"][0]


def _blocks(model: SentenceTransformer) -> list[nn.Module]:
    core = model[0].auto_model
    for path in ("encoder.layer", "transformer.layer", "encoder.block", "layers", "h"):
        try:
            return list(core.get_submodule(path))
        except AttributeError:
            continue
    raise AssertionError("no blocks found")
