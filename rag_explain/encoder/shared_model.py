"""A user's model as a copy that shares its weights, and is watched: what all kinds of encoders are made of."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import lru_cache, partial
from typing import TYPE_CHECKING, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rag_explain._torch import parts
from rag_explain.devices import Device
from rag_explain.encoder.batch import Batch
from rag_explain.encoder.identity import backend_of, digest, tensors
from rag_explain.encoder.probing import Observed, observe
from rag_explain.encoder.reading import Reader
from rag_explain.encoder.towers import Tower, is_router, towers_of
from rag_explain.encoder.watch import Watch
from rag_explain.encoder.working_copy import make_working_copy, share
from rag_explain.errors import ProcessBound, UnsupportedModel
from rag_explain.texts.passage import Passage, as_passages
from rag_explain.texts.tokens import Role

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

Towers = Mapping[Role, Tower]
PLURAL: dict[Role, str] = {"query": "queries", "document": "documents"}
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
            self._check(tower, "the model" if one is other else f"what reads {PLURAL[role]} in the model")
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
        """(D,): what each embedding is divided by in the score; never by less than 1e-12, as in torch."""
        if not self.is_cosine:
            return torch.ones_like(embeddings[:, 0])
        lengths: Tensor = torch.linalg.vector_norm(embeddings, dim=-1)
        return lengths.clamp_min(max(1e-12, torch.finfo(embeddings.dtype).tiny))

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


def _digest(working: SentenceTransformer, observed: Observed, state: tuple[int, int]) -> str:
    """The fingerprint of the model in this state of its weights, which is there for the cache."""
    return digest(observed.facts, tensors(working, observed.each_time))
