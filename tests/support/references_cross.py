"""A slow oracle for cross-encoders, written from the equations: autograd through a copy that follows the rules.

Every bias is a leaf of its own for each position and each call of its module; relevance is gradient x input of the
tokens and of these leaves. It shares nothing with the library but the model, and the rules of `references`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from sentence_transformers import CrossEncoder
from torch import Tensor, nn

from tests.support.references import _activation, _apply_rules, _detached_softmax, blocks


def relevance(
    model: CrossEncoder, features: dict[str, Any], cut: int, *, gated: bool, label: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(n,) what each token carries, the rest, (n, n) what position p read from token j at the cut, and the logit.

    Of one pair. R_j = <d logit / d x_j, x_j> + the biases at position j; M[p, j] = <g_p, d h_p / d x_j x_j> + the
    biases that enter at position j below the cut, with g_p = d logit / d h_p.
    """
    ruled = copy.deepcopy(model).eval()
    ruled[0].auto_model.set_attn_implementation("eager")
    _apply_rules(ruled, gated=gated)
    head = getattr(ruled[0].auto_model, "head", None)
    if head is not None:  # a head's activation is alone, also where those of the blocks are gates
        head.act.forward = _activation(type(head.act).forward.__get__(head.act))
    leaves: list[Tensor] = []
    caught: dict[int, Tensor] = {}

    def catch(number: int, hidden: Tensor) -> Tensor:
        caught[number] = hidden.detach().requires_grad_() if number == 0 else hidden.clone()
        return caught[number]

    _watch_blocks(ruled, catch)
    _biases_as_leaves(ruled, leaves)
    with _detached_softmax(), _ratios():
        out = dict(features)
        for module in ruled:
            out = module(out)
    logit = out["scores"][0, label]
    inputs = [caught[0], *leaves]
    tokens, rest = _split(torch.autograd.grad(logit, inputs, retain_graph=True, allow_unused=True), inputs)
    middle = caught[cut]
    (slopes,) = torch.autograd.grad(logit, middle, retain_graph=True)
    rows = []
    for place in range(middle.shape[1]):
        read = (middle[0, place] * slopes[0, place]).sum()
        rows.append(_split(torch.autograd.grad(read, inputs, retain_graph=True, allow_unused=True), inputs)[0])
    return tokens, rest, torch.stack(rows), logit.detach()


def matrix(tokens: Tensor, rest: Tensor, read: Tensor, query: Sequence[int], document: Sequence[int]) -> Tensor:
    """(n_q + 1, n_d + 1) from these, by the definition: pairs, what is left of each token, and the last cell."""
    pairs = read[query][:, document] + read[document][:, query].T
    left, below = tokens[query] - pairs.sum(dim=1), tokens[document] - pairs.sum(dim=0)
    last = (rest + pairs.sum()).reshape(1)
    return torch.cat([torch.cat([pairs, left[:, None]], dim=1), torch.cat([below, last])[None]])


def _split(slopes: Sequence[Tensor | None], values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Gradient x input by position, and of what has no position."""
    used = [(slope, value) for slope, value in zip(slopes, values, strict=True) if slope is not None]
    found = [(slope * value).sum(dim=-1).detach() for slope, value in used]
    length = values[0].shape[1]
    tokens = sum((one[0] for one in found if one.ndim == 2), torch.zeros(length, dtype=values[0].dtype))
    rest = sum((one[0] for one in found if one.ndim == 1), torch.zeros((), dtype=values[0].dtype))
    return tokens, rest


def _watch_blocks(model: CrossEncoder, catch: Callable[[int, Tensor], Tensor]) -> None:
    def watch(number: int) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            hidden = catch(number, args[0] if args else kwargs["hidden_states"])
            return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

        return hook

    core: Any = model[0].auto_model
    core = getattr(core, core.base_model_prefix, core)
    found = blocks([_Holder(core)])  # type: ignore[arg-type]  # of a model it reads the first module alone
    for number, block in enumerate(found):
        block.register_forward_pre_hook(watch(number), with_kwargs=True)


class _Holder:
    def __init__(self, model: nn.Module) -> None:
        self.auto_model = model


def _biases_as_leaves(model: nn.Module, leaves: list[Tensor]) -> None:
    def add(module: nn.Module, args: Any, out: Tensor, bias: Tensor) -> Tensor:
        leaves.append(bias.detach().expand(out.shape).clone().requires_grad_())
        return out + leaves[-1]

    for module in model.modules():
        if isinstance(module, nn.Linear | nn.LayerNorm) and module.bias is not None:
            bias, module.bias = module.bias, None
            module.register_forward_hook(lambda module, args, out, bias=bias: add(module, args, out, bias))


@contextmanager
def _ratios() -> Iterator[None]:
    """Activations that heads call as functions: y = x * [act(x) / x].detach()."""
    functional = nn.functional
    before = torch.tanh, functional.gelu
    torch.tanh = _activation(before[0])
    functional.gelu = lambda x, **kwargs: x * (before[1](x, **kwargs) / x).detach()
    try:
        yield
    finally:
        torch.tanh, functional.gelu = before
