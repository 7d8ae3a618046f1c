"""What every model of this process reads, counted so low that no way of encoding leads around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from sentence_transformers.base.modules.transformer import Transformer
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from rag_explain.scorers.base import EncoderScorer
from rag_explain.scorers.bi_encoder import BiEncoder


@dataclass
class Encodes:
    """What was read, once for each time that it was."""

    documents: list[str] = field(default_factory=list)  # what a scorer read or embedded in the role of a document
    texts: list[str] = field(default_factory=list)  # what was tokenized for any model, the user's own among them
    # The tokens of each text that went through a model's modules. A pass that is repeated from its kept structure calls
    # none of them: `texts` has what such a pass reads.
    passes: list[tuple[int, ...]] = field(default_factory=list)


@contextmanager
def encodes() -> Iterator[Encodes]:
    """Counts as long as the block lasts, in all threads. No model, nor what is watched of one, is touched for it."""
    seen = Encodes()

    def in_role(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, passages: Any, role: str) -> Any:
            seen.documents.extend(getattr(one, "string", one) for one in passages if role == "document")
            return call(self, passages, role)

        return run

    def tokenized(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, inputs: Any, *rest: Any, **options: Any) -> Any:
            seen.texts.extend(inputs)
            return call(self, inputs, *rest, **options)

        return run

    def passed(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if isinstance(module, Transformer):
            ids, mask = (arguments[0][name].tolist() for name in ("input_ids", "attention_mask"))
            pairs = (zip(*one, strict=True) for one in zip(ids, mask, strict=True))
            seen.passes.extend(tuple(token for token, is_read in pair if is_read) for pair in pairs)

    hook = register_module_forward_pre_hook(passed)  # of all modules: the copies that explain have no hook of ours
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, counted in (
            (EncoderScorer, "read", in_role),
            (BiEncoder, "embed", in_role),
            (Transformer, "preprocess", tokenized),
        ):
            patch.setattr(owner, name, counted(getattr(owner, name)))
        try:
            yield seen
        finally:
            hook.remove()
