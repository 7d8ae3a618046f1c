"""Explainer: from a query and documents to explanations."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from rag_explain import models
from rag_explain.comparison import Compared, Comparison
from rag_explain.contrast import Contrast
from rag_explain.documents import BUCKET_TOKENS, Documents
from rag_explain.encoder import Encoder, as_passages, quiet_torch
from rag_explain.errors import InvalidInput, RagExplainError
from rag_explain.methods import ColdDocument, PairMethod, applicable, make
from rag_explain.methods.subspace import Slices, split
from rag_explain.multivector import MultiVector
from rag_explain.store import Store
from rag_explain.types import Embedded, Explanation, Factors, Role, Token

if TYPE_CHECKING:
    from sentence_transformers import MultiVectorEncoder, SentenceTransformer

# Hits of one query are explained one by one when they are looked at: the query's factors are kept that long.
_RECENT_QUERIES = 32


class Explainer:
    """Explains why documents match a query under one encoder and one method.

        explainer = Explainer("all-MiniLM-L6-v2")
        print(explainer.explain("capital of France", "Paris is the capital and largest city of France."))

    Safe to use from several threads; the model it was given is never changed.

    Args:
        model: a name, a folder, or a loaded SentenceTransformer or MultiVectorEncoder, whose weights are then shared;
            or another explainer's `encoder`.
        method: a name from docs/methods.md; None: `alignment` for a multi-vector encoder, else `bilrp`.
        layer: attribute to the input of encoder block `layer`; 0 is the embedding output. None: the method's default.
        device: where to compute; None: where the model is.
        store: a folder in which documents' factors are kept, or a `Store`; None keeps them in memory only.
        options: options of the method; an unknown one raises.
    """

    def __init__(
        self,
        model: str | Path | SentenceTransformer | MultiVectorEncoder | Encoder,
        method: str | None = None,
        *,
        layer: int | None = None,
        device: str | None = None,
        store: str | Path | Store | None = None,
        **options: Any,
    ) -> None:
        if isinstance(model, Encoder) and device is not None:
            raise InvalidInput("an Encoder stays on its device: give the model itself to choose another")
        self.encoder = model if isinstance(model, Encoder) else as_encoder(*models.load(model, device), device)
        self.method = make(method, self.encoder, layer, options)
        self._queries: OrderedDict[str, Factors] = OrderedDict()
        self._queries_lock = threading.Lock()
        with quiet_torch(self.encoder):
            self.method.check()
        self._owns_store = not isinstance(store, Store)
        self.store = store if isinstance(store, Store) else Store(store)
        self._documents = Documents(self.encoder, self.method, self.store)

    # ------------------------------------------------------------------ explanations

    def explain(self, query: str, document: str | Embedded) -> Explanation:
        """Why `document` scores what it does for `query`."""
        return self.explain_many(query, [document])[0]

    def explain_many(
        self, query: str, documents: Sequence[str | Embedded], *, ids: Sequence[str | None] | None = None
    ) -> list[Explanation]:
        """One explanation per document, in the order given; the query's factors are computed once.

        Documents that the store has are explained by one product. `ids` are the caller's names of the documents, under
        which `store.forget(ids)` erases what is kept of them.
        """
        if isinstance(documents, (str, Embedded)):
            raise InvalidInput("explain_many takes a list of documents: use explain for one")
        passages = as_passages(documents)
        _check_ids(passages, ids)
        if not passages:
            return []
        if isinstance(self.method, PairMethod):
            return self._explain_pairs(self.method, query, passages)
        with quiet_torch(self.encoder):
            half = self._query_factors(query)
            served = self._documents.explain(half, passages, ids)
        sides = (half.tokens, half.truncated, half.fingerprint)
        return [
            self._explanation(query, *sides, passage, item.document, item.provenance)
            for passage, item in zip(passages, served, strict=True)
        ]

    def contrast(self, query: str, wanted: str | Embedded, got: str | Embedded) -> Contrast:
        """Why `got` and not `wanted`: which words made the difference between their scores."""
        return Contrast(*self.explain_many(query, [wanted, got]))

    def precompute(
        self, texts: Iterable[str | Embedded], progress: bool = True, *, ids: Iterable[str | None] | None = None
    ) -> int:
        """Build and keep the factors of documents before anybody asks; how many were built.

        Documents that the store has are left alone, so that an interrupted run goes on where it stopped.
        """
        if isinstance(texts, (str, Embedded)):
            raise InvalidInput("precompute takes a list of texts")
        if not self.method.cacheable:
            raise InvalidInput(f"{self.method.name} computes every pair anew: there is nothing to precompute")
        total = len(texts) if isinstance(texts, Sized) else None
        names = repeat(None) if ids is None else ids
        pairs = ((as_passages([text])[0], name) for text, name in zip(texts, names, strict=ids is not None))
        with quiet_torch(self.encoder), _progress(progress, total) as advance:
            return self._documents.precompute(pairs, advance)

    def subspaces(self, query: str, document: str | Embedded, slices: Slices) -> dict[str, Explanation]:
        """The explanation of a pair split by named slices of the embedding, which sum to the whole.

        `slices` maps names to `slice` objects or to (start, stop); dimensions in none of them come last. Each slice's
        score is its part of the whole score.
        """
        if not self.method.bilinear:
            raise InvalidInput(f"{self.method.name} is not a product of factors, so it has no parts by dimension")
        half, passage = self.factor([query], "query")[0], as_passages([document])[0]
        parts = split(half, self.factor([passage])[0], slices)
        sides = (half.tokens, half.truncated, half.fingerprint)
        return {
            name: self._explanation(query, *sides, passage, part, {"subspace": name}) for name, part in parts.items()
        }

    def compare(
        self, query: str, document: str | Embedded, methods: Sequence[str | Mapping[str, Any]] | None = None
    ) -> Comparison:
        """The same pair under several methods, side by side, with how far they agree.

        A method is a name, or a mapping with "method" and its options, such as {"method": "ij", "layer": 5}. None: all
        methods that explain pairs of this encoder. One that refuses the encoder is listed with its reason.
        """
        chosen = applicable(self.encoder) if methods is None else methods
        if isinstance(chosen, str) or not chosen:
            raise InvalidInput("compare takes a list of at least one method")
        return Comparison.of([self._compared(query, document, choice) for choice in chosen])

    def _compared(self, query: str, document: str | Embedded, choice: str | Mapping[str, Any]) -> Compared:
        options: dict[str, Any] = {"method": choice} if isinstance(choice, str) else dict(choice)
        label = " ".join(str(value) if key == "method" else f"{key}={value}" for key, value in options.items())
        start = time.perf_counter()
        try:
            with Explainer(self.encoder, **options) as other:
                start = time.perf_counter()
                explanation = other.explain(query, document)
        except RagExplainError as error:
            return Compared(label, None, time.perf_counter() - start, str(error))
        return Compared(label, explanation, time.perf_counter() - start)

    def factor(self, texts: Sequence[str | Embedded], role: Role = "document") -> list[Factors]:
        """Each text's half of every explanation, always computed here and now."""
        if role not in ("query", "document"):
            raise InvalidInput(f"role must be 'query' or 'document', not {role!r}")
        if isinstance(texts, (str, Embedded)):
            raise InvalidInput("factor takes a list of texts")
        if not texts:
            return []
        with quiet_torch(self.encoder):
            batch = self.encoder.tokenize(texts, role)
            factors: dict[int, Factors] = {}
            for bucket in batch.buckets(BUCKET_TOKENS):
                factors.update(zip(bucket, self.method.factor(batch.select(bucket)), strict=True))
        return [factors[index] for index in range(len(texts))]

    def query_vector(self, query: str) -> NDArray[np.float32]:
        """(e,): what the model's `encode_query` gives, where possible from the pass that explanations need anyway."""
        # Factors keep float32: of a model in double precision they do not know the last bits.
        if not self.method.embeds or self.encoder.dtype == torch.float64:
            vectors = self.encoder.embed([query], "query")
        else:
            with quiet_torch(self.encoder):
                embedding = torch.as_tensor(self._query_factors(query).embedding.copy())
                vectors = self.encoder.vectors(embedding.to(self.encoder.device, self.encoder.dtype)[None])
        vector: NDArray[np.float32] = vectors[0]
        return vector

    # ------------------------------------------------------------------ inside

    def _query_factors(self, query: str) -> Factors:
        key = f"{self.encoder.fingerprint}:{query}"
        with self._queries_lock:
            if key in self._queries:
                self._queries.move_to_end(key)
                return self._queries[key]
        (factors,) = self.method.factor(self.encoder.tokenize([query], "query"))
        with self._queries_lock:
            self._queries[key] = factors
            while len(self._queries) > _RECENT_QUERIES:
                self._queries.popitem(last=False)
        return factors

    def _explain_pairs(self, method: PairMethod, query: str, documents: Sequence[Embedded]) -> list[Explanation]:
        """Methods that need both texts at once: nothing is kept, every pair is computed here and now."""
        explanations: dict[int, Explanation] = {}
        fingerprint = self.encoder.fingerprint
        with quiet_torch(self.encoder):
            asked = self.encoder.tokenize([query], "query")
            batch = self.encoder.tokenize(documents, "document")
            for bucket in batch.buckets(BUCKET_TOKENS):
                start = time.perf_counter()
                part = batch.select(bucket)
                found = method.explain(asked, part)
                provenance = {"path": "pair", "seconds": (time.perf_counter() - start) / len(part)}
                for index, passage, document in zip(bucket, part.texts, found, strict=True):
                    explanations[index] = self._explanation(
                        query, asked.tokens[0], asked.truncated[0], fingerprint, passage, document, provenance
                    )
        return [explanations[index] for index in range(len(documents))]

    def _explanation(
        self,
        query: str,
        query_tokens: tuple[Token, ...],
        query_truncated: bool,
        fingerprint: str,
        passage: Embedded,
        document: ColdDocument,
        provenance: dict[str, Any],
    ) -> Explanation:
        truncated: list[Role] = ["query"] if query_truncated else []
        if document.truncated:
            truncated.append("document")
        if document.note is not None:
            provenance = {**provenance, "note": document.note}
        return Explanation(
            query=query,
            document=passage.text,
            query_tokens=query_tokens if document.query_tokens is None else document.query_tokens,
            document_tokens=document.tokens,
            matrix=document.matrix,
            score=document.score,
            method=self.method.name,
            additive=self.method.additive,
            settings=self.method.settings,
            model=self.encoder.name,
            fingerprint=fingerprint,
            references=document.references,
            similarities=document.similarities,
            unit=document.unit,
            surrogate=self.method.surrogate,
            truncated=tuple(truncated),
            provenance=provenance,
        )

    # ------------------------------------------------------------------ life

    def close(self) -> None:
        """Let go of what is kept between calls, and close the store unless it was given open."""
        with self._queries_lock:
            self._queries.clear()
        if self._owns_store:
            self.store.close()

    def __enter__(self) -> Explainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Explainer({self.encoder.name!r}, method={self.method.name!r}, layer={self.method.layer})"


def _check_ids(passages: Sequence[Embedded], ids: Sequence[str | None] | None) -> None:
    if ids is not None and (isinstance(ids, str) or len(ids) != len(passages)):
        raise InvalidInput(f"give one id, or None, for each of the {len(passages)} documents")


@contextmanager
def _progress(shown: bool, total: int | None) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr, or nothing."""
    if not shown:
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("factors"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("factors", total=total)
        yield lambda count: bar.advance(task, count)


def as_encoder(model: SentenceTransformer | MultiVectorEncoder, name: str, device: str | None) -> Encoder:
    """The encoder of a loaded model of either kind."""
    from sentence_transformers import MultiVectorEncoder

    if isinstance(model, MultiVectorEncoder):
        return MultiVector(model, name=name, device=device)
    return Encoder(model, name=name, device=device)
