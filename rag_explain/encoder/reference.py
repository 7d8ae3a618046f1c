"""What a text is compared with when nothing is said: the reference input of integrated Jacobians.

Special tokens are kept and every other token is emptied, in as many places, at the same positions and under the same
attention mask as in the text: it is the padding token, the mask token, or a token whose word vector is zero or the mean
of the vocabulary. Ids come from the tokenizer.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor, nn

from rag_explain.errors import UnsupportedModel

T = TypeVar("T")
Reference = Literal["padding", "mask", "zero", "mean"]
REFERENCES: tuple[Reference, ...] = get_args(Reference)
# Whether the forward pass that runs now is a shifted encoder's own look at its reference: its blocks are not the
# text's, and visitors of blocks do not see them.
IN_REFERENCE: ContextVar[bool] = ContextVar("rag_explain_in_reference", default=False)


@contextmanager
def setting(variable: ContextVar[T], value: T) -> Iterator[None]:
    """The variable has this value in here, for this thread."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


class WordVectors(NamedTuple):
    """Where (D, n) tokens have another word vector (h,) than their own."""

    places: Tensor
    vector: Tensor


# The word vectors of the forward pass that runs now, where they are not those of its ids.
WORD_VECTORS: ContextVar[WordVectors | None] = ContextVar("rag_explain_word_vectors", default=None)


def put_word_vectors(_module: nn.Module, _args: Any, output: Tensor) -> Tensor | None:
    """A forward hook of the table of word vectors: changes nothing but in passes of a reference without ids."""
    put = WORD_VECTORS.get()
    return None if put is None else torch.where(put.places[..., None].to(output.device), put.vector.to(output), output)


def reference_features(features: dict[str, Any], transformer: Any, reference: Reference = "padding") -> dict[str, Any]:
    """The features (D, n) of a batch, as the modules take them, with every token of the texts replaced by the filler.

    `transformer` is the sentence-transformers module that holds the model and its tokenizer.
    """
    ids: Tensor = features["input_ids"]
    result = dict(features)
    result["input_ids"] = torch.where(emptied(features, transformer), _filler(transformer.tokenizer, reference), ids)
    positions = _positions_from_padding(ids, transformer.auto_model)
    if positions is not None:
        result["position_ids"] = features.get("position_ids", positions)
    return result


def emptied(features: dict[str, Any], transformer: Any) -> Tensor:
    """(D, n) where a reference says nothing and the text says something."""
    ids: Tensor = features["input_ids"]
    return ~torch.isin(ids, torch.tensor(_special_ids(transformer.tokenizer), device=ids.device))


def _filler(tokenizer: Any, reference: Reference) -> int:
    """The id that stands for nothing; a word vector that is put in its place needs some id, too."""
    if reference == "mask":
        if tokenizer.mask_token_id is None:
            raise UnsupportedModel('the tokenizer has no mask token: use reference="padding" or "zero"')
        return int(tokenizer.mask_token_id)
    filler = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if filler is None:
        raise UnsupportedModel(
            "the tokenizer has neither a padding nor an end token, so there is no reference text: "
            "set tokenizer.pad_token, or use bilrp"
        )
    return int(filler)


def _special_ids(tokenizer: Any) -> list[int]:
    """Tokens that frame a text. The unknown token and the mask are not among them: they stand for words."""
    names = ("cls_token_id", "sep_token_id", "bos_token_id", "eos_token_id", "pad_token_id")
    return sorted({value for name in names if (value := getattr(tokenizer, name, None)) is not None})


def _positions_from_padding(ids: Tensor, model: nn.Module) -> Tensor | None:
    """(D, n) the position ids of encoders that count the tokens that are not padding; None where ids play no part.

    RoBERTa, XLM-R, MPNet and their kin number positions so, and a reference made of padding would have none. Their
    position embeddings are the ones that reserve a row for padding.
    """
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            used = (ids != module.padding_idx).int()
            return (used.cumsum(dim=1) * used).long() + module.padding_idx
    return None
