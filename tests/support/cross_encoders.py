"""Tiny cross-encoders with random weights, one per architecture, saved and loaded as real ones."""

from __future__ import annotations

import functools
import importlib
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from sentence_transformers import CrossEncoder
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from tests.support.models import ARCHITECTURES, tokenizer

with warnings.catch_warnings():
    # transformers marks functions of DeBERTa by what torch will not have any more.
    warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated", category=DeprecationWarning)
    importlib.import_module("transformers.models.deberta_v2.modeling_deberta_v2")

# The head of each architecture, and how its tokenizer frames a pair.
_BERT = "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"
_ROBERTA = "[CLS] $A [SEP]", "[CLS] $A [SEP] [SEP] $B [SEP]"
HEADS: dict[str, tuple[str, tuple[str, str] | None]] = {
    "bert": ("BertForSequenceClassification", _BERT),
    "roberta": ("RobertaForSequenceClassification", _ROBERTA),
    "xlm-roberta": ("XLMRobertaForSequenceClassification", _ROBERTA),
    "electra": ("ElectraForSequenceClassification", _BERT),
    "distilbert": ("DistilBertForSequenceClassification", _BERT),
    "deberta-v2": ("DebertaV2ForSequenceClassification", _BERT),
    "modernbert": ("ModernBertForSequenceClassification", _BERT),
    "qwen3": ("Qwen3ForSequenceClassification", None),
    "qwen3-chat": ("Qwen3ForCausalLM", None),
}
_DEBERTA = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 128,
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 8,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "type_vocab_size": 0,
}
CHAT = (
    "the judge looked at this: "
    "{% for message in messages %}{% if message.role == 'system' %}{{ message.content }} {% endif %}{% endfor %}"
    "query {{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}\n"
    "document {{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first | trim }}\n"
    "found: "
)


def pair_tokenizer(kind: str, frames: tuple[str, str] | None, **settings: Any) -> PreTrainedTokenizerFast:
    """One of the tiny tokenizers, with special tokens around a pair."""
    backend = Tokenizer.from_str(tokenizer(kind).backend_tokenizer.to_str())
    if frames is not None:
        special = [(name, backend.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
        backend.post_processor = processors.TemplateProcessing(single=frames[0], pair=frames[1], special_tokens=special)
    names = {name: f"[{name[:3].upper()}]" for name in ("unk_token", "pad_token", "cls_token", "sep_token")}
    names["mask_token"] = "[MASK]"
    inputs = (
        ["input_ids", "token_type_ids", "attention_mask"] if kind == "wordpiece" else ["input_ids", "attention_mask"]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, model_input_names=inputs, **names, **{"model_max_length": 64, **settings}
    )


@functools.cache
def cross_folder(name: str, labels: int = 1) -> Path:
    """Where a tiny cross-encoder of this architecture is saved, with random weights and biases that matter."""
    head, frames = HEADS[name]
    base = ARCHITECTURES.get(name.removesuffix("-chat"))
    kind = "DebertaV2Config" if base is None else base.config
    words = pair_tokenizer("wordpiece" if base is None else base.tokenizer, frames)
    settings: dict[str, Any] = dict(_DEBERTA if base is None else base.sizes)
    if name.endswith("-chat"):
        words.add_tokens(["yes", "no"])
        words.chat_template = CHAT
    else:
        settings["num_labels"] = labels
    ids = {"pad_token_id": words.pad_token_id, "bos_token_id": 2, "eos_token_id": 3}
    ids |= {"cls_token_id": 2, "sep_token_id": 3} if name == "modernbert" else {}
    torch.manual_seed(7)
    model = getattr(transformers, head)(getattr(transformers, kind)(vocab_size=len(words), **ids, **settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(mean=1.0 if parameter.ndim == 1 and (parameter == 1).all() else 0.0, std=0.3)
    if labels > 1:
        model.config.id2label = {number: f"label {number}" for number in range(labels)}
    where = Path(tempfile.mkdtemp(prefix=f"tiny-cross-{name}-"))
    model.save_pretrained(where)
    words.save_pretrained(where)
    return where


def cross(name: str = "bert", labels: int = 1, *, dtype: torch.dtype = torch.float64, **settings: Any) -> CrossEncoder:
    """A CrossEncoder of this architecture."""
    return CrossEncoder(str(cross_folder(name, labels)), device="cpu", **settings).to(dtype)
