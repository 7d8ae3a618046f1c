"""A working copy of a user's model: the same weights, but hooks, tokenizer and attention setting of its own.

What happens to the copy cannot be seen from the model's own `encode`, in this thread or another.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rag_explain._torch import forward_hooks, uncompile
from rag_explain.encoder.identity import tensors
from rag_explain.errors import UnsupportedModel, in_words

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


def share(model: SentenceTransformer, device: str | torch.device | None = None) -> tuple[SentenceTransformer, bool]:
    """A copy of the module tree, and whether it shares every weight (no memory, and updates in place are seen).

    It is still the user's model, hooks and all: `make_working_copy` makes it ours. On another device it has weights of
    its own.
    """
    if model.get_backend() != "torch":
        raise UnsupportedModel(f"the model runs on {model.get_backend()}: load it with backend='torch' to explain it")
    wanted, here = device if device is None else torch.device(device), next(model.parameters()).device
    # The caller's hooks may hold anything: they are not copied.
    memo = {id(hook): hook for one in model.modules() for hooks in forward_hooks(one) for hook in hooks.values()}
    is_shared = wanted is None or (
        wanted.type == here.type and (wanted.type == "cpu" or wanted.index in (None, here.index))
    )
    if is_shared:
        memo |= {id(tensor): tensor for tensor in tensors(model)}
    with torch.inference_mode(False), in_words(UnsupportedModel, "the model cannot be copied"):
        copied = copy.deepcopy(model, memo)  # not in inference mode: that would make inference parameters
        if not is_shared:
            copied.to(device)
    for module in copied.modules():
        uncompile(module)
    return copied, is_shared


def make_working_copy(copied: SentenceTransformer) -> SentenceTransformer:
    """Prepare what `share` gave for recording: in evaluation, with no hook of the caller's."""
    copied.eval()
    drop_hooks(copied)
    for module in copied.modules():
        # torch's own attention modules run as one fused operation in evaluation, whose parts cannot be recorded.
        if type(module) is nn.MultiheadAttention:
            module.training, module.dropout = True, 0.0
        elif type(module) is nn.TransformerEncoderLayer:
            module.training = True
        elif type(module) is nn.Dropout:
            module.__class__ = IdentityDropout
    return copied


def drop_hooks(copied: nn.Module) -> None:
    """The caller's hooks are for the caller's own calls. One that changes what is computed is found by the checks."""
    for module in copied.modules():
        for hooks in forward_hooks(module):
            hooks.clear()


class IdentityDropout(nn.Dropout):
    """Dropout in evaluation returns its input; without a call into torch, recording is faster."""

    def forward(self, input: Tensor) -> Tensor:
        return input


def check_first(first: Any, what: str) -> None:
    """Refuse a module that reads texts unless it holds a transformer that can be explained; `what` begins with it."""
    if not hasattr(first, "auto_model"):
        raise UnsupportedModel(
            f"{what} begins with {type(first).__name__}; only models that begin with a Transformer can be explained"
        )
    if not getattr(first.tokenizer, "is_fast", False):
        raise UnsupportedModel(
            "the model's tokenizer does not report character offsets: load it with a fast tokenizer (tokenizer.json)"
        )
    config = first.auto_model.config
    if getattr(config, "attention_type", None) == "block_sparse":
        raise UnsupportedModel(
            "the model's attention is sparse for long texts and full for all that come after a short one, so that a "
            "text has no embedding of its own: load it with config_kwargs={'attention_type': 'original_full'}"
        )
    if getattr(config, "_attn_implementation", "sdpa") not in ("sdpa", "eager"):
        first.auto_model.set_attn_implementation("sdpa")


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
