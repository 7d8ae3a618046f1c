"""A working copy of a user's model: the same weights, but hooks, tokenizer and attention setting of its own.

What happens to the copy cannot be seen from the model's own `encode`, in this thread or another.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rag_explain._torch import uncompile
from rag_explain.errors import UnsupportedModel

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


def make_working_copy(model: SentenceTransformer, device: str | torch.device | None) -> SentenceTransformer:
    """A copy of the module tree that shares every weight (no memory, and updates in place are seen), on its device."""
    if model.get_backend() != "torch":
        raise UnsupportedModel(f"the model runs on {model.get_backend()}: load it with backend='torch' to explain it")
    wanted, here = device if device is None else torch.device(device), next(model.parameters()).device
    shared: dict[int, Any] = {}
    if wanted is None or (wanted.type == here.type and (wanted.type == "cpu" or wanted.index in (None, here.index))):
        shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    with torch.inference_mode(False):  # a caller's inference mode must not make inference parameters
        working = copy.deepcopy(model, shared)
        if not shared:
            working.to(device)
    working.eval()
    for module in working.modules():
        uncompile(module)
        # torch's own attention modules run as one fused operation in evaluation, whose parts cannot be recorded.
        if type(module) is nn.MultiheadAttention:
            module.training, module.dropout = True, 0.0
        elif type(module) is nn.TransformerEncoderLayer:
            module.training = True
        elif type(module) is nn.Dropout:
            module.__class__ = IdentityDropout
    return working


class IdentityDropout(nn.Dropout):
    """Dropout in evaluation returns its input; without a call into torch, recording is faster."""

    def forward(self, input: Tensor) -> Tensor:
        return input


def first_module(working: SentenceTransformer) -> Any:
    """The module that holds the transformer; refused by name when it is something else."""
    first: Any = working[0]
    if not hasattr(first, "auto_model"):
        raise UnsupportedModel(
            f"the model begins with {type(first).__name__}; only models that begin with a Transformer can be explained"
        )
    if not getattr(first.tokenizer, "is_fast", False):
        raise UnsupportedModel(
            "the model's tokenizer does not report character offsets: load it with a fast tokenizer (tokenizer.json)"
        )
    config = first.auto_model.config
    if getattr(config, "_attn_implementation", "sdpa") not in ("sdpa", "eager"):
        first.auto_model.set_attn_implementation("sdpa")
    return first


def find_blocks(transformer: Any) -> list[nn.Module]:
    """The modules that take the hidden state from one block to the next."""
    model = transformer.auto_model
    config = model.config
    if config.model_type == "albert":  # one layer, called again and again
        return [module for module in model.modules() if type(module).__name__ == "AlbertLayer"]
    names = ("num_hidden_layers", "num_layers", "n_layers")
    depth = next((getattr(config, name) for name in names if hasattr(config, name)), None)
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return list(module)
    raise UnsupportedModel(f"the encoder blocks of {type(model).__name__} could not be found")
