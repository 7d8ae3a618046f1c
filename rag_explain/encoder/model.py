"""A sentence-transformers model, seen as blocks and one embedding per text: a copy that shares the user's weights."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rag_explain._torch import parts
from rag_explain.devices import BatchSize, Device
from rag_explain.encoder.batch import Batch
from rag_explain.encoder.identity import digest, tensors
from rag_explain.encoder.probing import Observed, observe
from rag_explain.encoder.reading import Reader
from rag_explain.encoder.reference import (
    IN_REFERENCE,
    Reference,
    WordVectors,
    emptied,
    put_word_vectors,
    reference_features,
    setting,
)
from rag_explain.encoder.watch import Watch
from rag_explain.encoder.working_copy import find_blocks, first_module, make_working_copy, share
from rag_explain.errors import ProcessBound, UnsupportedModel
from rag_explain.texts.passage import Passage, as_passages
from rag_explain.texts.tokens import Role

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

Visitor = Callable[[int, Tensor], Tensor]
# Texts that are tokenized together, and positions that are embedded together: they bound what is in memory at once.
_EMBEDDED_AT_ONCE, _EMBEDDED = 512, BatchSize(4096)


class SharedModel(ProcessBound):
    """A user's model as a copy that shares its weights, and what looks whether the user's own is still the same.

    Attributes:
        whole: the working copy itself, for models whose output is not one embedding per text.
        observed: what the model's own `encode_query`, `encode_document` and `similarity` gave for the probes.
        watch: looks whether the user's model is still the one that the copy was made of.
        similarity: the model's own name of how it compares embeddings: "cosine", "dot", "euclidean", "maxsim" ...
        is_cosine: whether the score compares directions: embeddings are divided by their length.
        is_shifted: whether the model subtracts its reference's embedding (`ShiftedEncoder`): its own is then zero.
    """

    instead = "pickle the model, and make a new Explainer where it is unpickled"
    is_shifted = False
    reader: Reader

    def __init__(self, model: SentenceTransformer, *, name: str = "", device: str | torch.device | None = None) -> None:
        self.name = name or model.model_card_data.base_model or type(model).__name__
        copied, is_shared = share(model, device)
        self._first = self._first_module(copied)
        kinds = {"cpu", next(copied.parameters()).device.type}
        with ExitStack() as modes:
            for kind in kinds:
                modes.enter_context(torch.autocast(kind, enabled=False))
            self.observed = observe(copied)
        self.whole = make_working_copy(copied)
        # A copy that embeds as a framework does was made from the model that people hold, and may change.
        watched = getattr(model, "made_from", lambda: None)() or model
        self.watch = Watch(watched, self.observed.fleeting, is_shared=is_shared, adopt=self._adopt)
        self._modules = list(self.whole.named_children())
        # The final normalisation is left to the score, unless the embedding is truncated after it.
        self._truncate_dim: int | None = getattr(self.whole, "truncate_dim", None)
        self._normalizes = type(self._modules[-1][1]).__name__ == "Normalize" and self._truncate_dim is None
        if self._normalizes:
            self._modules.pop()
        self.similarity = str(self.whole.similarity_fn_name)  # asking sets a default: not on the caller's model
        self.is_cosine = self.similarity != "dot" or self._normalizes
        # The module tree of the copy does not change any more, and walking it would cost as much as a short query.
        self._parameters, self._buffers = list(self.whole.parameters()), list(self.whole.buffers())
        self._digest = lru_cache(maxsize=1)(partial(_digest, self.whole, self.observed))

    @abstractmethod
    def _first_module(self, copied: SentenceTransformer) -> Any:
        """The module that reads texts; one that this kind does not know is refused."""

    @abstractmethod
    def run(self, batch: Batch) -> Tensor:
        """(D, e): the embeddings of a batch, before the final normalisation."""

    @abstractmethod
    def describe(self) -> dict[str, str]:
        """What it is and how it reads texts, for people."""

    def read(self, texts: Sequence[str | Passage], role: Role) -> Batch:
        """The texts as `encode_query` or `encode_document` reads them."""
        return self.reader.read(as_passages(texts), role)

    def norms(self, embeddings: Tensor) -> Tensor:
        """(D,): what each embedding is divided by in the score."""
        if not self.is_cosine:
            return torch.ones_like(embeddings[:, 0])
        lengths: Tensor = torch.linalg.vector_norm(embeddings, dim=-1)
        return lengths.clamp_min(torch.finfo(embeddings.dtype).tiny)

    def embed(self, texts: Sequence[str | Passage], role: Role) -> NDArray[np.float32]:
        """(D, e): what `encode_query` or `encode_document` gives."""
        if not texts:
            return np.zeros((0, 0), np.float32)
        self.watch.state()
        embeddings, device = list[Tensor](), Device(lambda: str(self.device))
        with torch.inference_mode():
            for first in range(0, len(texts), _EMBEDDED_AT_ONCE):
                batch = self.read(texts[first : first + _EMBEDDED_AT_ONCE], role)
                found = batch.in_buckets(_EMBEDDED, device.sharing(self._run))
                embeddings += [found[index] for index in range(len(batch))]
            return self.vectors(torch.stack(embeddings))

    def vectors(self, embeddings: Tensor) -> NDArray[np.float32]:
        """(D, e): embeddings as `encode_query` and `encode_document` return them."""
        if self._normalizes:
            embeddings = embeddings / self.norms(embeddings)[:, None]
        return embeddings.to("cpu", torch.float32).numpy()

    @property
    def fingerprint(self) -> str:
        """32 hexadecimal digits, computed again when weights were written to; a model changed otherwise is refused."""
        return self._digest(self.watch.state())

    @property
    def device(self) -> torch.device:
        return self._parameters[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self._parameters[0].dtype

    def _adopt(self, old: Tensor, new: Tensor) -> None:
        """The user's model has another tensor where the copy has `old`: share that one from now on."""
        for module in self.whole.modules():
            for own in (*parts(module)[:2], module.__dict__):
                own.update({key: new for key, value in own.items() if value is old})
        self._parameters, self._buffers = list(self.whole.parameters()), list(self.whole.buffers())

    def follow_device(self) -> None:
        """Weights moved by `model.to(...)` are shared; the copy's own buffers must go along."""
        device = self.device
        for buffer in self._buffers:
            if buffer.device != device:
                buffer.data = buffer.data.to(device)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """No autograd, inference mode or autocast of the caller's reaches into what runs here. All thread-local.

        Nor an autocast of main memory's, where numbers are finished.
        """
        kind = self.device.type
        there = nullcontext() if kind == "cpu" else torch.autocast(kind, enabled=False)
        with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False), there:
            yield

    def _run(self, batch: Batch) -> Sequence[Tensor]:
        return list(self.run(batch))


class Encoder(SharedModel):
    """A torch model whose embedding can be taken as a function of any block's input."""

    def __init__(self, model: SentenceTransformer, *, name: str = "", device: str | torch.device | None = None) -> None:
        super().__init__(model, name=name, device=device)
        self._transformer = self._first
        self.transformer: nn.Module = self._transformer.auto_model
        self.is_shifted = bool(getattr(self._transformer, "is_shifted", False))
        self._visitor: ContextVar[_Visit | None] = ContextVar("rag_explain_visitor", default=None)
        for block in find_blocks(self._transformer):
            block.register_forward_pre_hook(self._enter_block, with_kwargs=True)
        self.reader = Reader(self.whole)
        self.n_blocks = self._count_blocks()

    def _first_module(self, copied: SentenceTransformer) -> Any:
        return first_module(copied)

    def reference(self, batch: Batch, reference: Reference = "padding") -> Batch:
        """The same batch with nothing said: special tokens kept, a filler between, positions and mask as they were."""
        return replace(batch, features=reference_features(batch.features, self._transformer, reference))

    def empty_words(self, batch: Batch, reference: Reference) -> WordVectors | None:
        """The word vectors of the batch's reference, where no id has them."""
        if reference not in ("zero", "mean"):
            return None
        table = self._word_vectors
        vector = table.mean(dim=0) if reference == "mean" else torch.zeros_like(table[0])
        return WordVectors(emptied(batch.features, self._transformer), vector)

    @cached_property
    def _word_vectors(self) -> Tensor:
        """(V, h): the table of word vectors, which listens to `WORD_VECTORS` from now on."""
        table: Any = self.transformer.get_input_embeddings()  # type: ignore[operator]  # every Transformers model has it
        table.register_forward_hook(put_word_vectors)
        weight: Tensor = table.weight
        return weight

    def run(self, batch: Batch, visit: Visitor | None = None, enter: Callable[[str], None] | None = None) -> Tensor:
        """(D, e): the embeddings of a batch, before the final normalisation.

        `visit(k, hidden)` sees the input (D, n, h) of every block and returns what the block is to work on instead;
        k = `n_blocks` is the output of the last block. `enter(name)` is told which module runs.
        """
        self.follow_device()
        features = dict(batch.to(self.device).features)
        # As `encode` runs it: what a module keeps from one pass is then fit for the next, recorded or not.
        mode = torch.inference_mode(not torch.is_grad_enabled())
        state = _Visit(visit)
        with mode, setting(self._visitor, state):
            for name, module in self._modules:
                if enter is not None:
                    enter(f"{type(module).__name__} (module {name})")
                features = module(features, **self._arguments(name, module, batch.role))
                if module is self._transformer and visit is not None:
                    features["token_embeddings"] = visit(state.calls, features["token_embeddings"])
        embedding: Tensor = features["sentence_embedding"]
        if self._truncate_dim is not None:
            embedding = embedding[:, : self._truncate_dim]
        return embedding

    def _arguments(self, name: str, module: nn.Module, task: Role) -> dict[str, Any]:
        """What the model's own `forward` hands to a module beside the features: the task, to one that reads it."""
        taken = {*((self.whole.module_kwargs or {}).get(name) or ()), *getattr(module, "forward_kwargs", ())}
        told = getattr(self.whole, "tasks", {}).get(task, task)  # a framework may tell no task, or another one
        return {"task": told} if "task" in taken and told is not None else {}

    def hidden(self, batch: Batch, block: int) -> tuple[Tensor, Tensor]:
        """(D, n, h) the input of a block, and (D, e) the embeddings; block `n_blocks` is the last one's output."""
        caught: list[Tensor] = []

        def visit(at: int, hidden: Tensor) -> Tensor:
            if at == block:
                check_hidden(hidden, batch)
                caught.append(hidden.clone())
            return hidden

        embeddings = self.run(batch, visit)
        if not caught:
            raise UnsupportedModel(f"no block {block} of this encoder was seen at work")
        return caught[0], embeddings

    def describe(self) -> dict[str, str]:
        """What it is and how it reads texts, for people."""
        following = []
        for module in list(self.whole.children())[1:]:
            mode = getattr(module, "pooling_mode", None)
            following.append(type(module).__name__ + (f" ({mode})" if mode else ""))
        modules = " + ".join(following) or "no further module"
        return {
            "architecture": f"{type(self.transformer).__name__}, {self.n_blocks} blocks, {modules}",
            "prompts": f"query {self.reader.prompt('query')!r}, document {self.reader.prompt('document')!r}",
            "computes on": f"{self.device}, {str(self.dtype).removeprefix('torch.')}",
        }

    def _enter_block(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        visit = self._visitor.get()
        if visit is None or IN_REFERENCE.get():
            return None
        if args:
            return (visit(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": visit(kwargs["hidden_states"])}

    def _count_blocks(self) -> int:
        visit = _Visit(None)
        with torch.no_grad(), setting(self._visitor, visit):
            batch = self.read(["a"], "query")
            try:
                self._transformer(dict(batch.to(self.device).features))
            except Exception as error:
                raise UnsupportedModel(f"the model failed on a one-letter text: {error}") from error
        if not visit.calls:
            raise UnsupportedModel(f"no block of {type(self.transformer).__name__} was seen at work")
        return visit.calls


def check_hidden(hidden: Tensor, batch: Batch) -> None:
    """Refuse a block that takes something else than (texts, tokens, dimensions), as XLNet's do."""
    if hidden.shape[:2] != batch.features["input_ids"].shape:
        raise UnsupportedModel(
            "the blocks of this encoder do not take hidden states of (texts, tokens, dimensions), as these methods "
            "must: use pooled or alignment, which look at the last block's output alone, or another model"
        )


def _digest(working: SentenceTransformer, observed: Observed, state: tuple[int, int]) -> str:
    """The fingerprint of the model in this state of its weights, which is there for the cache."""
    return digest(observed.facts, tensors(working, observed.each_time))


class _Visit:
    """Counts the blocks of one forward pass: some encoders call one module again and again."""

    def __init__(self, visit: Visitor | None) -> None:
        self.visit = visit
        self.calls = 0

    def __call__(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        return hidden if self.visit is None else self.visit(self.calls - 1, hidden)
