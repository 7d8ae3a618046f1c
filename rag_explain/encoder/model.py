"""A sentence-transformers model, seen as blocks and one embedding per text: a copy that shares the user's weights."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rag_explain._torch import parts
from rag_explain.devices import Device
from rag_explain.encoder.batch import Batch
from rag_explain.encoder.identity import backend_of, digest, tensors
from rag_explain.encoder.probing import Observed, observe
from rag_explain.encoder.reading import Reader, reader_of
from rag_explain.encoder.reference import (
    IN_REFERENCE,
    Reference,
    WordVectors,
    emptied,
    put_word_vectors,
    reference_features,
    setting,
)
from rag_explain.encoder.towers import Tower, is_router, towers_of
from rag_explain.encoder.watch import Watch
from rag_explain.encoder.working_copy import check_first, find_blocks, make_working_copy, share
from rag_explain.errors import ProcessBound, UnsupportedModel
from rag_explain.texts.passage import Passage, as_passages
from rag_explain.texts.tokens import Role

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

Visitor = Callable[[int, Tensor], Tensor]
Towers = Mapping[Role, Tower]
_PLURAL: dict[Role, str] = {"query": "queries", "document": "documents"}
# Texts that are tokenized together; with the positions that are embedded together they bound what is in memory at once.
_EMBEDDED_AT_ONCE = 512


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
    embedded_tokens = 4096  # positions that are embedded together
    reader: Reader

    def __init__(self, model: SentenceTransformer, *, name: str = "", device: str | torch.device | None = None) -> None:
        self.name = name or model.model_card_data.base_model or type(model).__name__
        copied, is_shared = share(model, device)
        towers = towers_of(copied)
        self._check_all(towers)
        kinds = {"cpu", next(copied.parameters()).device.type}
        with ExitStack() as modes:
            for kind in kinds:
                modes.enter_context(torch.autocast(kind, enabled=False))
            self.observed = observe(copied)
        self.whole = make_working_copy(copied)
        # A copy that embeds as a framework does was made from the model that people hold, and may change.
        watched = getattr(model, "made_from", lambda: None)() or model
        self.watch = Watch(watched, self.observed.fleeting, is_shared=is_shared, adopt=self._adopt)
        # Asking sets a default: not on the caller's model. A cross-encoder compares nothing.
        self.similarity = str(getattr(self.whole, "similarity_fn_name", "logit"))
        self._truncate_dim: int | None = getattr(self.whole, "truncate_dim", None)
        # A final normalisation is left to the score, unless the embedding is truncated after it.
        ends = [tower.ends_normalised and self._truncate_dim is None for tower in towers.values()]
        self.is_cosine = self.similarity != "dot" or all(ends)
        trimmed = {id(tower): tower.without_normalisation() for tower in towers.values() if tower.ends_normalised}
        is_left = self.is_cosine and self._truncate_dim is None
        self.towers: Towers = {
            role: trimmed.get(id(tower), tower) if is_left else tower for role, tower in towers.items()
        }
        # The module tree of the copy does not change any more, and walking it would cost as much as a short query.
        self._parameters, self._buffers = list(self.whole.parameters()), list(self.whole.buffers())
        self._digest = lru_cache(maxsize=1)(partial(_digest, self.whole, self.observed))

    @property
    def roles(self) -> tuple[Role, ...]:
        """A role for each way in which texts are embedded: one where queries and documents differ in prompts alone."""
        modules = (module for tower in self.towers.values() for _, module in tower.modules)
        return get_args(Role) if self.has_two_towers or any(map(is_router, modules)) else ("document",)

    @property
    def has_two_towers(self) -> bool:
        """Whether queries and documents are read by different modules."""
        return self.towers["query"] is not self.towers["document"]

    def _check_all(self, towers: Towers) -> None:
        """Refuse towers that this kind of encoder does not know, alone or together."""
        one, other = towers.values()
        for role, tower in towers.items():
            self._check(tower, "the model" if one is other else f"what reads {_PLURAL[role]} in the model")
        readers = [backend_of(tower.first.tokenizer) for tower in towers.values()]
        if one.is_static != other.is_static and readers[0] is readers[1]:
            raise UnsupportedModel(
                "the model's StaticEmbedding shares its tokenizer with the other tower, each of whose calls changes "
                "how texts are cut and padded in both: give it a copy of the tokenizer"
            )

    @abstractmethod
    def _check(self, tower: Tower, what: str) -> None:
        """Refuse a tower that this kind of encoder does not know; `what` is what it is called."""

    @abstractmethod
    def run(self, batch: Batch) -> Tensor:
        """(D, e): the embeddings of a batch, before the final normalisation."""

    def describe(self) -> dict[str, str]:
        """What it is and how it reads texts, for people."""
        query, document = (self._architecture(role) for role in self.towers)
        return {
            "architecture": f"queries: {query}; documents: {document}" if self.has_two_towers else document,
            "prompts": f"query {self.reader.prompt('query')!r}, document {self.reader.prompt('document')!r}",
            "computes on": f"{self.device}, {str(self.dtype).removeprefix('torch.')}",
        }

    @abstractmethod
    def _architecture(self, role: Role) -> str:
        """What reads texts of this role, for people."""

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
                found = batch.in_buckets(device.size(self.embedded_tokens), device.sharing(self._run))
                embeddings += [found[index] for index in range(len(batch))]
            return self.vectors(torch.stack(embeddings), role)

    def vectors(self, embeddings: Tensor, role: Role) -> NDArray[np.float32]:
        """(D, e): embeddings as `encode_query` or `encode_document` returns them."""
        if self.towers[role].normalises:
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
        """The least precise one, where towers differ."""
        return min((one.dtype for one in self._parameters), key=lambda dtype: torch.finfo(dtype).bits)

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

    output: ClassVar[str] = "sentence_embedding"  # where the model's modules put what is taken apart

    def __init__(self, model: SentenceTransformer, *, name: str = "", device: str | torch.device | None = None) -> None:
        super().__init__(model, name=name, device=device)
        self._transformers = {id(tower.first): tower.first for tower in self.towers.values() if not tower.is_static}
        self.is_shifted = all(_is_shifted(tower) for tower in self.towers.values())
        self._visitor: ContextVar[_Visit | None] = ContextVar("rag_explain_visitor", default=None)
        for transformer in self._transformers.values():
            for block in find_blocks(transformer):
                block.register_forward_pre_hook(self._enter_block, with_kwargs=True)
        self.reader = self._make_reader()
        self._word_vectors = lru_cache(_word_vectors)
        depths = {role: self._count_blocks(role) for role, tower in self.towers.items() if not tower.is_static}
        self._depths, self.n_blocks = depths, min(depths.values())

    def _check_all(self, towers: Towers) -> None:
        super()._check_all(towers)
        if len({_is_shifted(tower) for tower in towers.values()}) > 1:
            raise UnsupportedModel("one tower of the model is a ShiftedEncoder and the other is not: shift both")

    def _check(self, tower: Tower, what: str) -> None:
        if not tower.is_static:
            check_first(tower.first, what)

    def _make_reader(self) -> Reader:
        return reader_of(self.whole, self.towers)

    def reference(self, batch: Batch, reference: Reference = "padding") -> Batch:
        """The same batch with nothing said: special tokens kept, a filler between, positions and mask as they were."""
        return replace(batch, features=reference_features(batch.features, self._reading(batch), reference))

    def _reading(self, batch: Batch) -> Any:
        """The module with the transformer that reads this batch."""
        tower = self.towers[batch.role]
        if tower.is_static:
            raise UnsupportedModel(
                f"a StaticEmbedding reads {_PLURAL[batch.role]} in this model, and it has no text that says nothing: "
                "use bilrp"
            )
        return tower.first

    def empty_words(self, batch: Batch, reference: Reference) -> WordVectors | None:
        """The word vectors of the batch's reference, where no id has them."""
        if reference not in ("zero", "mean"):
            return None
        transformer = self._reading(batch)
        table = self._word_vectors(transformer.auto_model)
        vector = table.mean(dim=0) if reference == "mean" else torch.zeros_like(table[0])
        return WordVectors(emptied(batch.features, transformer), vector)

    def run(self, batch: Batch, visit: Visitor | None = None, enter: Callable[[str], None] | None = None) -> Tensor:
        """(D, e): the embeddings of a batch, before the final normalisation.

        `visit(k, hidden)` sees the input (D, n, h) of every block and returns what the block is to work on instead;
        k = `n_blocks` is the output of the last block, also of a tower with more blocks, whose others are not seen. A
        tower without blocks shows its word vectors in each place. `enter(name)` is told which module runs.
        """
        self.follow_device()
        features = dict(batch.to(self.device).features)
        # As `encode` runs it: what a module keeps from one pass is then fit for the next, recorded or not.
        mode = torch.inference_mode(not torch.is_grad_enabled())
        tower = self.towers[batch.role]
        with mode, setting(self._visitor, _Visit(visit, self.n_blocks)):
            for name, module in tower.modules:
                if enter is not None:
                    enter(f"{type(module).__name__} (module {name})")
                if module is tower.first and tower.is_static:
                    features = self._looked_up(tower, features, visit)
                    continue
                features = module(features, **self._arguments(name, module, batch.role))
                if module is tower.first and visit is not None and "token_embeddings" in features:
                    features["token_embeddings"] = visit(self.n_blocks, features["token_embeddings"])
        embedding: Tensor = features[self.output]
        if self._truncate_dim is not None:
            embedding = embedding[:, : self._truncate_dim]
        return embedding

    def _looked_up(self, tower: Tower, features: dict[str, Any], visit: Visitor | None) -> dict[str, Any]:
        """What a table of word vectors makes of a batch: their mean, whatever stands around them."""
        vectors: Tensor = tower.first.embedding.weight[features["input_ids"]]
        mask = features["attention_mask"][..., None].to(vectors)
        if visit is not None:
            for block in range(self.n_blocks + 1):
                vectors = visit(block, vectors)
        mean = (vectors * mask).sum(dim=1) / mask.sum(dim=1)
        return {**features, "token_embeddings": vectors, "sentence_embedding": mean}

    def _arguments(self, name: str, module: nn.Module, task: Role) -> dict[str, Any]:
        """What the model's own `forward` hands to a module beside the features: the task, to one that reads it."""
        taken = {*((self.whole.module_kwargs or {}).get(name) or ()), *getattr(module, "forward_kwargs", ())}
        told = getattr(self.whole, "tasks", {}).get(task, task)  # a framework may tell no task, or another one
        return {"task": told} if "task" in taken and told is not None else {}

    def check_comparable(self) -> None:
        """Refuse to compare vectors of tokens that two towers give other widths."""
        if not self.has_two_towers:
            return
        query, document = (tower.first.get_embedding_dimension() for tower in self.towers.values())
        if query != document:
            raise UnsupportedModel(
                f"a token of a query has {query} dimensions in this model and one of a document {document}, "
                "so that they cannot be compared: use bilrp"
            )

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

    def _architecture(self, role: Role) -> str:
        tower, after = self.towers[role], []
        for _, module in tower.modules[1:]:
            mode = getattr(module, "pooling_mode", None)
            after.append(type(module).__name__ + (f" ({mode})" if mode else ""))
        after += ["Normalize"] * tower.normalises
        if tower.is_static:
            count, width = tower.first.embedding.weight.shape
            return " + ".join([f"StaticEmbedding, {count:,} word vectors of {width} dimensions", *after])
        modules = " + ".join(after) or "no further module"
        return f"{type(tower.first.auto_model).__name__}, {self._depths[role]} blocks, {modules}"

    def _enter_block(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        visit = self._visitor.get()
        if visit is None or IN_REFERENCE.get():
            return None
        if args:
            return (visit(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": visit(kwargs["hidden_states"])}

    def _shortest(self, role: Role) -> Batch:
        return self.read(["a"], role)

    def _count_blocks(self, role: Role) -> int:
        """How many blocks the tower of this role has: some encoders call one module again and again."""
        visit, first = _Visit(None), self.towers[role].first
        with torch.no_grad(), setting(self._visitor, visit):
            batch = self._shortest(role)
            try:
                first(dict(batch.to(self.device).features))
            except Exception as error:
                raise UnsupportedModel(f"the model failed on a one-letter text: {error}") from error
        if not visit.calls:
            raise UnsupportedModel(f"no block of {type(first.auto_model).__name__} was seen at work")
        return visit.calls


def check_hidden(hidden: Tensor, batch: Batch) -> None:
    """Refuse a block that takes something else than (texts, tokens, dimensions), as XLNet's do."""
    if hidden.shape[:2] != batch.features["input_ids"].shape:
        raise UnsupportedModel(
            "the blocks of this encoder do not take hidden states of (texts, tokens, dimensions), as these methods "
            "must: use pooled or alignment, which look at the last block's output alone, or another model"
        )


def _is_shifted(tower: Tower) -> bool:
    return bool(getattr(tower.first, "is_shifted", False))


def _word_vectors(transformer: Any) -> Tensor:
    """(V, h): a transformer's table of word vectors, which listens to `WORD_VECTORS` from now on."""
    table = transformer.get_input_embeddings()
    table.register_forward_hook(put_word_vectors)
    weight: Tensor = table.weight
    return weight


def _digest(working: SentenceTransformer, observed: Observed, state: tuple[int, int]) -> str:
    """The fingerprint of the model in this state of its weights, which is there for the cache."""
    return digest(observed.facts, tensors(working, observed.each_time))


class _Visit:
    """Counts the blocks of one forward pass: some encoders call one module again and again.

    Blocks from the number `last` on are not shown.
    """

    def __init__(self, visit: Visitor | None, last: int = 0) -> None:
        self.visit, self.last = visit, last
        self.calls = 0

    def __call__(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        return hidden if self.visit is None or self.calls > self.last else self.visit(self.calls - 1, hidden)
