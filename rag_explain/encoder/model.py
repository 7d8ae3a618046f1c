"""A sentence-transformers model, seen as blocks and one embedding per text."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from rag_explain.encoder.batch import Batch
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
from rag_explain.encoder.shared_model import PLURAL, SharedModel, Towers
from rag_explain.encoder.towers import Tower
from rag_explain.encoder.working_copy import check_first, find_blocks
from rag_explain.errors import UnsupportedModel
from rag_explain.texts.tokens import Role

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

Visitor = Callable[[int, Tensor], Tensor]


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
                f"a StaticEmbedding reads {PLURAL[batch.role]} in this model, and it has no text that says nothing: "
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
