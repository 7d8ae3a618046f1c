"""Explainer: from a query and documents to explanations."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from rag_explain import models
from rag_explain.documents import BUCKET_TOKENS, Documents, Served
from rag_explain.encoder import Encoder, as_passages
from rag_explain.errors import InvalidInput
from rag_explain.methods import make
from rag_explain.store import Store
from rag_explain.types import Embedded, Explanation, Factors, Role

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

# Hits of one query are explained one by one when they are looked at: the query's factors are kept that long.
_RECENT_QUERIES = 32


class Explainer:
    """Explains why documents match a query under one encoder and one method.

        explainer = Explainer("all-MiniLM-L6-v2")
        print(explainer.explain("capital of France", "Paris is the capital and largest city of France."))

    Safe to use from several threads; the model it was given is never changed.

    Args:
        model: a name, a folder, or a loaded SentenceTransformer, whose weights are then shared.
        method: `bilrp` (default) or `hxp`.
        layer: attribute to the input of encoder block `layer`; 0 is the embedding output. None: the method's default.
        device: where to compute; None: where the model is.
        store: a folder in which documents' factors are kept, or a `Store`; None keeps them in memory only.
        options: options of the method; an unknown one raises.
    """

    def __init__(
        self,
        model: str | Path | SentenceTransformer,
        method: str | None = None,
        *,
        layer: int | None = None,
        device: str | None = None,
        store: str | Path | Store | None = None,
        **options: Any,
    ) -> None:
        loaded, name = models.load(model, device)
        self.encoder = Encoder(loaded, name=name, device=device)
        self.method = make(method, self.encoder, layer, options)
        self._queries: OrderedDict[str, Factors] = OrderedDict()
        self._queries_lock = threading.Lock()
        with _quiet_torch(self.encoder):
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
        with _quiet_torch(self.encoder):
            half = self._query_factors(query)
            served = self._documents.explain(half, passages, ids)
        return [self._explanation(query, half, *item) for item in zip(passages, served, strict=True)]

    def precompute(
        self, texts: Iterable[str | Embedded], progress: bool = True, *, ids: Iterable[str | None] | None = None
    ) -> int:
        """Build and keep the factors of documents before anybody asks; how many were built.

        Documents that the store has are left alone, so that an interrupted run goes on where it stopped.
        """
        if isinstance(texts, (str, Embedded)):
            raise InvalidInput("precompute takes a list of texts")
        total = len(texts) if isinstance(texts, Sized) else None
        names = repeat(None) if ids is None else ids
        pairs = ((as_passages([text])[0], name) for text, name in zip(texts, names, strict=ids is not None))
        with _quiet_torch(self.encoder), _progress(progress, total) as advance:
            return self._documents.precompute(pairs, advance)

    def factor(self, texts: Sequence[str | Embedded], role: Role = "document") -> list[Factors]:
        """Each text's half of every explanation, always computed here and now."""
        if role not in ("query", "document"):
            raise InvalidInput(f"role must be 'query' or 'document', not {role!r}")
        if isinstance(texts, (str, Embedded)):
            raise InvalidInput("factor takes a list of texts")
        if not texts:
            return []
        with _quiet_torch(self.encoder):
            batch = self.encoder.tokenize(texts, role)
            factors: dict[int, Factors] = {}
            for bucket in batch.buckets(BUCKET_TOKENS):
                factors.update(zip(bucket, self.method.factor(batch.select(bucket)), strict=True))
        return [factors[index] for index in range(len(texts))]

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

    def _explanation(self, query: str, half: Factors, passage: Embedded, served: Served) -> Explanation:
        document = served.document
        truncated: list[Role] = ["query"] if half.truncated else []
        if document.truncated:
            truncated.append("document")
        return Explanation(
            query=query,
            document=passage.text,
            query_tokens=half.tokens,
            document_tokens=document.tokens,
            matrix=document.matrix,
            score=document.score,
            method=self.method.name,
            additive=self.method.additive,
            settings=self.method.settings,
            model=self.encoder.name,
            fingerprint=half.fingerprint,
            surrogate=self.encoder.surrogate,
            truncated=tuple(truncated),
            provenance=served.provenance,
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


@contextmanager
def _quiet_torch(encoder: Encoder) -> Iterator[None]:
    """No autograd, no inference mode and no autocast of the caller's reaches into the computation. All thread-local."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(encoder.device.type, enabled=False):
        yield
