"""A learned sparse encoder: a sum over the words of its vocabulary, of which each text has a few.

    score(q, d) = sum over words v of e_q[v] e_d[v]                             encoder/sparse.py has the weights

A weight belongs to the token that won the maximum, or to all tokens by what each added where they are summed. So the
cells of two texts' tokens are exact, and each word says how they met: laptop -> "notebook" <- notebook.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rag_explain.devices import to_host
from rag_explain.encoder.batch import Batch
from rag_explain.encoder.model import Encoder
from rag_explain.encoder.probing import probed
from rag_explain.encoder.sparse import SparseTextEncoder
from rag_explain.encoder.sparse_static import StaticWeights
from rag_explain.encoder.working_copy import share
from rag_explain.errors import InvalidInput, ModelChanged, UnsupportedModel
from rag_explain.probes import Probes
from rag_explain.results.terms import Term, distinct
from rag_explain.scorers.base import TermSplit
from rag_explain.scorers.bi_encoder import BiEncoder
from rag_explain.texts.passage import Passage, as_passages
from rag_explain.texts.tokens import Role, Token
from rag_explain.texts.units import text_units

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer, SparseEncoder

_FOLDED = 256  # numbers that are kept of a probe's thousands


class Weights(NamedTuple):
    """One text: its tokens with the word that each is part of, and (V,) weights of which each token has a part."""

    labels: list[str]
    weights: NDArray[np.float64]
    active: NDArray[np.float64]  # (n, V)
    is_max: bool

    def parts(self, words: NDArray[np.intp]) -> NDArray[np.float64]:
        """(n, len(words)) what of each of these words' weights belongs to each token."""
        active = self.active[:, words]
        if not self.is_max:
            return active
        won = np.arange(len(active))[:, None] == active.argmax(axis=0)
        return np.where(won, self.weights[words], 0.0)


class Sparse(BiEncoder):
    """A sentence-transformers SparseEncoder of a masked language model and SpladePooling."""

    _encoder: SparseTextEncoder

    def __init__(self, encoder: SparseTextEncoder) -> None:
        super().__init__(encoder)
        whole: Any = encoder.whole  # a SparseEncoder
        self._most: int | None = whole.max_active_dims
        self.methods = ("terms", "bilrp", "hxp", "occlusion") if self._most is None else ("terms", "occlusion")

    @property
    def encoder(self) -> Encoder:
        if self._most is not None:
            raise InvalidInput(
                f"{self.name} keeps the {self._most} largest weights of a text (max_active_dims), a step that is not "
                f"followed: use {self._own_methods}"
            )
        return self._encoder

    @property
    def own_probes(self) -> Probes:
        return Probes.of(map(folded, super().own_probes.values))

    def probe_vectors(self, role: Role) -> Iterable[NDArray[np.float32]]:
        return map(folded, super().probe_vectors(role))

    def embed(self, passages: Sequence[str | Passage], role: Role) -> NDArray[np.float32]:
        """(D, V): dense, with the zeros."""
        return np.asarray(_largest(super().embed(passages, role), self._most))

    def token_vectors(self, batch: Batch) -> NoReturn:
        raise InvalidInput(
            f"{self.name} has weights of words and no vectors of tokens to look for sentences with: "
            'explain(..., unit="sentence") says what each sentence carries'
        )

    def by_terms(self, query: Batch, documents: Batch) -> Iterator[TermSplit]:
        (asked,) = self._weights(query)
        for found in self._weights(documents):
            yield _split(asked, found, self._word, is_cosine=self.measure == "cosine")

    def _weights(self, batch: Batch) -> Iterator[Weights]:
        """Of each text; one by one, since a position takes a number for each word of the vocabulary."""
        for index, (tokens, passage) in enumerate(zip(batch.tokens, batch.passages, strict=True)):
            one = batch if len(batch) == 1 else batch.select([index])
            active, weights, is_max = self._active(one)
            largest, parts = to_host(_largest(weights, self._most)[0], one.unpad(active)[0])
            labels = _labels(tokens, passage, truncated=batch.truncated[index])
            yield Weights(labels, largest.double().numpy(), parts.double().numpy(), is_max)

    def _active(self, batch: Batch) -> tuple[Tensor, Tensor, bool]:
        """(1, n, V) what each token says of each word, (1, V) the weights, and whether only the largest counts."""
        return *self._encoder.active(batch), self._encoder.pooling.is_max

    def _word(self, number: int) -> str:
        """A word of the vocabulary, as people write it."""
        tokenizer: Any = self._encoder.whole[0].tokenizer
        piece = tokenizer.convert_ids_to_tokens(int(number)) if number < len(tokenizer) else None
        return f"[{number}]" if piece is None else tokenizer.convert_tokens_to_string([piece]).strip() or piece


class InferenceFree(Sparse):
    """A SparseEncoder whose documents are read by a model, and whose queries by a table of weights."""

    def __init__(self, model: SparseEncoder, documents: SparseTextEncoder, queries: StaticWeights, own: Probes) -> None:
        super().__init__(documents)
        self._model, self._queries, self._own = model, queries, own
        self._made_of = _sides(model)
        self.methods = ("terms",)

    @property
    def encoder(self) -> Encoder:
        raise InvalidInput(f"{self.name} reads queries by a table of weights, without a model: use terms")

    @property
    def fingerprint(self) -> str:
        if _sides(self._model) != self._made_of:
            raise ModelChanged.because("its routes or settings are others")
        both = super().fingerprint + self._queries.digest
        return hashlib.blake2b(both.encode(), digest_size=16).hexdigest()

    @property
    def own_probes(self) -> Probes:
        return Probes.of(map(folded, self._own.values))

    def read(self, passages: Sequence[Passage], role: Role) -> Batch:
        return self._queries.read(passages, role) if role == "query" else super().read(passages, role)

    def embed(self, passages: Sequence[str | Passage], role: Role) -> NDArray[np.float32]:
        if role == "document":
            return super().embed(passages, role)
        found = [self._queries.active(self.read([passage], role))[1] for passage in as_passages(passages)]
        return np.asarray(_largest(torch.cat(found).float(), self._most).numpy())

    def _active(self, batch: Batch) -> tuple[Tensor, Tensor, bool]:
        return (*self._queries.active(batch), False) if batch.role == "query" else super()._active(batch)


def sparse_of(model: SparseEncoder, name: str, device: str | None) -> Sparse:
    """The scorer of a SparseEncoder: one encoder for all texts, or a Router to one of documents and a table."""
    routes = getattr(model[0], "sub_modules", None)
    if routes is None or len(model) > 1 or {"query", "document"} - {*routes}:
        return Sparse(SparseTextEncoder(cast("SentenceTransformer", model), name=name, device=device))
    (table, *more), documents = routes["query"], list(routes["document"])
    if more or type(table).__name__ != "SparseStaticEmbedding":
        raise UnsupportedModel(
            f"queries of this model are read by {type(table).__name__} and documents by {type(documents[0]).__name__}: "
            "of two sides, the query's is explained where it is a SparseStaticEmbedding"
        )
    settings: dict[str, Any] = {"prompts": model.prompts, "similarity_fn_name": model.similarity_fn_name}
    settings |= {"max_active_dims": model.max_active_dims, "default_prompt_name": model.default_prompt_name}
    # The same modules, and so the same weights.
    alone = type(model)(modules=documents, device=str(model.device), **settings)
    encoder = SparseTextEncoder(cast("SentenceTransformer", alone), name=name, device=device)
    copied, _ = share(cast("SentenceTransformer", model), device)
    return InferenceFree(model, encoder, StaticWeights(model, table), probed(copied)[0])


def _sides(model: SparseEncoder) -> tuple[Any, ...]:
    """What a Router and the model around it decide, beside the modules that are watched."""
    routes = [tuple(map(id, (route, *route))) for route in cast("Any", model)[0].sub_modules.values()]
    settings = model.similarity_fn_name, model.max_active_dims, model.default_prompt_name, dict(model.prompts)
    return (*routes, *settings)


def folded(weights: NDArray[Any]) -> NDArray[np.float32]:
    """Thousands of weights as a few sums, by which they are known again."""
    rows = np.pad(weights, (0, -len(weights) % _FOLDED)).reshape(-1, _FOLDED)
    return np.asarray(rows.sum(axis=0, dtype=np.float64), np.float32)


def _largest(weights: Any, most: int | None) -> Any:
    """The largest weights of each text, as sentence-transformers keeps them, and zeros."""
    from sentence_transformers.util import select_max_active_dims

    return select_max_active_dims(weights, max_active_dims=most)


def _labels(tokens: Sequence[Token], passage: Passage, *, truncated: bool) -> list[str]:
    """The word of the text that each token is a part of; of a special token its name."""
    words, owners = text_units(tokens, passage.text, "word", truncated=truncated)
    return [words[at].text if at >= 0 else token.label for token, at in zip(tokens, owners, strict=True)]


def _split(query: Weights, document: Weights, word: Callable[[int], str], *, is_cosine: bool) -> TermSplit:
    """What each pair of tokens carries, and each word of the vocabulary in which they met."""
    left, right = query.weights, document.weights
    norm = float(np.linalg.norm(left) * np.linalg.norm(right)) if is_cosine else 1.0
    norm = norm or 1.0  # a text without any weight scores nothing
    shared = np.flatnonzero(left * right)
    rows, columns = query.parts(shared), document.parts(shared)
    matrix = np.zeros((len(rows) + 1, len(columns) + 1))
    matrix[:-1, :-1] = rows @ columns.T / norm
    terms = tuple(
        Term(
            word(int(number)),
            distinct(query.labels[at] for at in np.flatnonzero(rows[:, k])),
            distinct(document.labels[at] for at in np.flatnonzero(columns[:, k])),
            float(left[number] * right[number]) / norm,
            {"query weight": float(left[number]), "document weight": float(right[number])},
        )
        for k, number in enumerate(shared)
    )
    return TermSplit(matrix, float(left @ right) / norm, terms)
