"""A sentence-transformers model, seen as blocks and one embedding per text.

The user's model is never changed: the encoder works on a copy that shares its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rag_explain.encoder.batch import Batch
from rag_explain.encoder.identity import Identity
from rag_explain.encoder.reading import Reader
from rag_explain.encoder.reference import in_reference, reference_features
from rag_explain.encoder.working_copy import find_blocks, first_module, make_working_copy
from rag_explain.errors import UnsupportedModel
from rag_explain.texts.passage import Passage, as_passages
from rag_explain.texts.tokens import Role

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

Visitor = Callable[[int, Tensor], Tensor]
# Texts that are tokenized together, and positions that are embedded together: they bound what is in memory at once.
_EMBEDDED_AT_ONCE, _EMBEDDED_TOKENS = 512, 4096


class Encoder:
    """A torch model whose embedding can be taken as a function of any block's input.

    Attributes:
        name: what the model is called, for people.
        similarity: the model's own name of how it compares embeddings: "cosine", "dot", "euclidean", "maxsim" ...
        reader: how it reads texts.
        n_blocks: the number of encoder blocks.
    """

    def __init__(self, model: SentenceTransformer, *, name: str = "", device: str | torch.device | None = None) -> None:
        self.name = name or model.model_card_data.base_model or type(model).__name__
        self._copy = make_working_copy(model, device)
        self._transformer = first_module(self._copy)
        self._modules = list(self._copy.named_children())
        # The final normalisation is left to the score, unless the embedding is truncated after it.
        self._truncate_dim: int | None = getattr(self._copy, "truncate_dim", None)
        self._normalizes = type(self._modules[-1][1]).__name__ == "Normalize" and self._truncate_dim is None
        if self._normalizes:
            self._modules.pop()
        self._visitor: ContextVar[_Visit | None] = ContextVar("rag_explain_visitor", default=None)
        for block in find_blocks(self._transformer):
            block.register_forward_pre_hook(self._enter_block, with_kwargs=True)
        self.similarity = str(self._copy.similarity_fn_name)  # asking sets a default: not on the caller's model
        self.reader = Reader(self._copy, model)
        # The module tree of the copy does not change any more.
        self._parameters, self._buffers = list(self._copy.parameters()), list(self._copy.buffers())
        decisive = {
            "prompts": [self.reader.prompt("query"), self.reader.prompt("document")],
            "lengths": [self._copy.max_seq_length, self._truncate_dim],
            "metric": "dot" if self.similarity == "dot" else "cosine",
        }
        self._identity = Identity(self._copy, self._parameters, decisive)
        self.n_blocks = self._count_blocks()
        if not self.n_blocks:
            raise UnsupportedModel(f"no block of {type(self.transformer).__name__} was seen at work")

    def read(self, texts: Sequence[str | Passage], role: Role) -> Batch:
        """The texts as `encode_query` or `encode_document` reads them."""
        return self.reader.read(as_passages(texts), role, self.device)

    def reference(self, batch: Batch) -> Batch:
        """The same batch with nothing said: special tokens kept, padding between, positions and mask as they were."""
        return replace(batch, features=reference_features(batch.features, self._transformer))

    def run(self, batch: Batch, visit: Visitor | None = None, enter: Callable[[str], None] | None = None) -> Tensor:
        """(D, e): the embeddings of a batch, before the final normalisation.

        `visit(k, hidden)` sees the input (D, n, h) of every block and returns what the block is to work on instead;
        k = `n_blocks` is the output of the last block. `enter(name)` is told which module runs.
        """
        self.follow_device()
        features = dict(batch.features)
        # As `encode` runs it: what a module keeps from one pass is then fit for the next, recorded or not.
        mode = torch.inference_mode(not torch.is_grad_enabled())
        with mode, self._visiting(visit) as visit_state:
            for name, module in self._modules:
                if enter is not None:
                    enter(f"{type(module).__name__} (module {name})")
                features = module(features)
                if module is self._transformer and visit is not None:
                    features["token_embeddings"] = visit(visit_state.calls, features["token_embeddings"])
        embedding: Tensor = features["sentence_embedding"]
        if self._truncate_dim is not None:
            embedding = embedding[:, : self._truncate_dim]
        return embedding

    def hidden(self, batch: Batch, block: int) -> tuple[Tensor, Tensor]:
        """(D, n, h) the input of a block, and (D, e) the embeddings; block `n_blocks` is the last one's output."""
        caught: list[Tensor] = []

        def visit(at: int, hidden: Tensor) -> Tensor:
            if at == block:
                caught.append(hidden.clone())
            return hidden

        embeddings = self.run(batch, visit)
        if not caught or caught[0].shape[:2] != batch.features["input_ids"].shape:
            raise UnsupportedModel(
                "the blocks of this encoder do not take hidden states of (texts, tokens, dimensions)"
            )
        return caught[0], embeddings

    def norms(self, embeddings: Tensor) -> Tensor:
        """(D,): what each embedding is divided by in the score."""
        if self.is_cosine:
            lengths: Tensor = torch.linalg.vector_norm(embeddings, dim=-1)
            return lengths.clamp_min(torch.finfo(embeddings.dtype).tiny)
        return torch.ones_like(embeddings[:, 0])

    def embed(self, texts: Sequence[str | Passage], role: Role) -> NDArray[np.float32]:
        """(D, e): what `encode_query` or `encode_document` gives."""
        if not texts:
            return np.zeros((0, 0), np.float32)
        found: dict[int, Tensor] = {}
        with torch.inference_mode():
            for first in range(0, len(texts), _EMBEDDED_AT_ONCE):
                batch = self.read(texts[first : first + _EMBEDDED_AT_ONCE], role)
                for bucket in batch.buckets(_EMBEDDED_TOKENS):
                    places = [first + index for index in bucket]
                    found.update(zip(places, self.run(batch.select(bucket)), strict=True))
            return self.vectors(torch.stack([found[index] for index in range(len(texts))]))

    def vectors(self, embeddings: Tensor) -> NDArray[np.float32]:
        """(D, e): embeddings as `encode_query` and `encode_document` return them."""
        if self._normalizes:
            embeddings = embeddings / self.norms(embeddings)[:, None]
        result: NDArray[np.float32] = embeddings.to("cpu", torch.float32).numpy()
        return result

    @property
    def fingerprint(self) -> str:
        return self._identity.fingerprint

    @property
    def is_cosine(self) -> bool:
        """Whether the score compares directions: embeddings are divided by their length."""
        return self.similarity != "dot" or self._normalizes

    @property
    def is_shifted(self) -> bool:
        """Whether the model subtracts its reference's embedding (`ShiftedEncoder`): its own is then zero."""
        return bool(getattr(self._transformer, "is_shifted", False))

    @property
    def whole(self) -> Any:
        """The working copy itself, for models whose output is not one embedding per text."""
        return self._copy

    @property
    def transformer(self) -> nn.Module:
        model: nn.Module = self._transformer.auto_model
        return model

    def describe(self) -> dict[str, str]:
        """What it is and how it reads texts, for people."""
        following = []
        for module in list(self._copy.children())[1:]:
            mode = getattr(module, "pooling_mode", None)
            following.append(type(module).__name__ + (f" ({mode})" if mode else ""))
        modules = " + ".join(following) or "no further module"
        return {
            "architecture": f"{type(self.transformer).__name__}, {self.n_blocks} blocks, {modules}",
            "prompts": f"query {self.reader.prompt('query')!r}, document {self.reader.prompt('document')!r}",
            "computes on": f"{self.device}, {str(self.dtype).removeprefix('torch.')}",
        }

    @property
    def device(self) -> torch.device:
        return self._parameters[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self._parameters[0].dtype

    def follow_device(self) -> None:
        """Weights moved by `model.to(...)` are shared; the copy's own buffers must go along."""
        device = self.device
        for buffer in self._buffers:
            if buffer.device != device:
                buffer.data = buffer.data.to(device)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """No autograd, inference mode or autocast of the caller's reaches into what runs here. All thread-local."""
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            yield

    def _enter_block(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        visit = self._visitor.get()
        if visit is None or in_reference():
            return None
        if args:
            return (visit(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": visit(kwargs["hidden_states"])}

    @contextmanager
    def _visiting(self, visit: Visitor | None) -> Iterator[_Visit]:
        state = _Visit(visit)
        token = self._visitor.set(state)
        try:
            yield state
        finally:
            self._visitor.reset(token)

    def _count_blocks(self) -> int:
        with torch.no_grad(), self._visiting(None) as state:
            batch = self.read(["a"], "query")
            try:
                self._transformer(dict(batch.features))
            except Exception as error:
                raise UnsupportedModel(f"the model failed on a one-letter text: {error}") from error
        return state.calls


class _Visit:
    """Counts the blocks of one forward pass: some encoders call one module again and again."""

    def __init__(self, visit: Visitor | None) -> None:
        self.visit = visit
        self.calls = 0

    def __call__(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        return hidden if self.visit is None else self.visit(self.calls - 1, hidden)
