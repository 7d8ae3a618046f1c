"""Integrated Jacobians from their equations: one backward pass per dimension at each of very many nodes.

Numbers of equations and sections are those of Moeller et al. 2024. Shares nothing with the library but the model:
references are spelled out, positions are overheard from the text's pass.
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
    """One text's half: rows (n, e), and e(a), e(r), rest (e,), where rows and rest sum to e(a)."""

    rows: Tensor
    embedding: Tensor
    reference: Tensor
    rest: Tensor


def equation_2(a: Attribution, b: Attribution) -> tuple[Tensor, Tensor]:
    """Both sides of equation 2: its left, and the matrix whose sum is its right, reduced to tokens (figure 1)."""
    left = a.embedding @ b.embedding - a.embedding @ b.reference - b.embedding @ a.reference + a.reference @ b.reference
    # (a - r_a)_i (J_a^T J_b)_ij (b - r_b)_j, summed over the features i of one token and j of another
    return left, a.rows @ b.rows.T


def integrated_jacobian(
    model: SentenceTransformer,
    text: str,
    layer: int,
    *,
    normalise: bool,
    nodes: int = 200,
    rule: str = "gauss",
    task: str = "document",
    filler: str = "padding",
    across: bool = False,
) -> Attribution:
    """The rows of one text: (J_a)_ki (a - r_a)_i, summed over the features i of each token.

    With `across` of e'(x) = e(x) - <e(x), u> u, u = e(r) / |e(r)|, for which f'(r, .) = 0 as section 3.1 requires; what
    e' is not of e is rest.
    """
    model = copy.deepcopy(model).eval()
    model[0].auto_model.set_attn_implementation("eager")
    features: dict[str, Any] = dict(model.preprocess([text], prompt=None, task=task))
    a, embedding, r, reference = _ends(model, features, layer, filler)
    if rule == "gauss":
        points, weights = np.polynomial.legendre.leggauss(nodes)
        points, weights = (points + 1) / 2, weights / 2
    else:  # equation 3: alpha_n = n / N, each with the weight 1 / N
        points, weights = np.arange(1, nodes + 1) / nodes, np.full(nodes, 1 / nodes)
    # Section 3.2, cosine similarity: the encoder's output divided by its length
    unit: Callable[[Tensor], Tensor] = (lambda e: e / e.norm()) if normalise else (lambda e: e)
    embedding, reference = unit(embedding).detach(), unit(reference).detach()
    u = reference / reference.norm()
    without: Callable[[Tensor], Tensor] = (lambda e: e - (e @ u) * u) if across else (lambda e: e)
    rows = torch.zeros(a.shape[1], len(embedding), dtype=a.dtype)
    for alpha, weight in zip(points, weights, strict=True):
        x = (r + alpha * (a - r)).detach().requires_grad_()  # x(alpha) = r_a + alpha (a - r_a), below equation 3
        with torch.enable_grad():
            e = without(unit(_pass(model, features, layer, x)[1]))
            for k in range(len(e)):
                (gradient,) = torch.autograd.grad(e[k], x, retain_graph=True)  # d e_k(x(alpha_n)) / d x_i, equation 3
                rows[:, k] += weight * (gradient * (a - r))[0].sum(dim=-1)
    rest = embedding - without(embedding) if across else reference
    return Attribution(rows.detach(), embedding, reference, rest)


def _ends(
    model: SentenceTransformer, features: dict[str, Any], layer: int, filler: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """a and r (1, n, h), the inputs of the block, each with its embedding.

    r: "sequences of padding tokens with the same length as the respective input" (section 3.2), between the tokens that
    frame a text; or mask tokens, or word vectors of zeros, or the mean word vector.
    """
    tokenizer = model.tokenizer
    frame = {tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id}
    empty = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    empty = tokenizer.mask_token_id if filler == "mask" else empty
    ids = torch.tensor([[token if token in frame else empty for token in features["input_ids"][0].tolist()]])

    heard: list[Tensor] = []
    places = [m for n, m in model.named_modules() if n.endswith("position_embeddings") and isinstance(m, nn.Embedding)]
    handles = [place.register_forward_pre_hook(lambda _m, args: heard.append(args[0])) for place in places]
    a, embedding = _pass(model, features, layer, None)
    for handle in handles:
        handle.remove()
    handles = [place.register_forward_pre_hook(lambda _m, _args: (heard[0],)) for place in places]
    table = model[0].auto_model.get_input_embeddings()
    vectors = {"zero": torch.zeros_like(table.weight[0]), "mean": table.weight.mean(dim=0)}
    if filler in vectors:
        said = (ids != features["input_ids"])[..., None]
        handles.append(table.register_forward_hook(lambda _m, _args, out: torch.where(said, vectors[filler], out)))
    r, reference = _pass(model, {**features, "input_ids": ids}, layer, None)
    for handle in handles:
        handle.remove()
    return a, embedding, r, reference


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
