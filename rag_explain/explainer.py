"""Explainer: from a query and documents to explanations."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from rag_explain import models
from rag_explain.encoder import Batch, Encoder
from rag_explain.errors import InvalidInput
from rag_explain.methods import ColdDocument, PairMethod, make
from rag_explain.multivector import MultiVector
from rag_explain.types import Embedded, Explanation, Factors, Role, Token

if TYPE_CHECKING:
    from sentence_transformers import MultiVectorEncoder, SentenceTransformer

# Documents travel in batches of at most this many positions: enough to fill the machine, little padding.
_BUCKET_TOKENS = 2048
# Hits of one query are explained one by one when they are looked at: the query's factors are kept that long.
_RECENT_QUERIES = 32


class Explainer:
    """Explains why documents match a query under one encoder and one method.

        explainer = Explainer("all-MiniLM-L6-v2")
        print(explainer.explain("capital of France", "Paris is the capital and largest city of France."))

    Safe to use from several threads; the model it was given is never changed.

    Args:
        model: a name, a folder, or a loaded SentenceTransformer or MultiVectorEncoder, whose weights are then shared.
        method: a name from docs/methods.md; None: `alignment` for a multi-vector encoder, else `bilrp`.
        layer: attribute to the input of encoder block `layer`; 0 is the embedding output. None: the method's default.
        device: where to compute; None: where the model is.
        options: options of the method; an unknown one raises.
    """

    def __init__(
        self,
        model: str | Path | SentenceTransformer | MultiVectorEncoder,
        method: str | None = None,
        *,
        layer: int | None = None,
        device: str | None = None,
        **options: Any,
    ) -> None:
        loaded, name = models.load(model, device)
        self.encoder = as_encoder(loaded, name, device)
        self.method = make(method, self.encoder, layer, options)
        self._queries: OrderedDict[str, Factors] = OrderedDict()
        self._queries_lock = threading.Lock()
        with _quiet_torch(self.encoder):
            self.method.check()

    # ------------------------------------------------------------------ explanations

    def explain(self, query: str, document: str | Embedded) -> Explanation:
        """Why `document` scores what it does for `query`."""
        return self.explain_many(query, [document])[0]

    def explain_many(self, query: str, documents: Sequence[str | Embedded]) -> list[Explanation]:
        """One explanation per document, in the order given; the query's factors are computed once."""
        if isinstance(documents, (str, Embedded)):
            raise InvalidInput("explain_many takes a list of documents: use explain for one")
        if not documents:
            return []
        if isinstance(self.method, PairMethod):
            return self._explain_pairs(self.method, query, documents)
        with _quiet_torch(self.encoder):
            half = self._query_factors(query)
            batch = self.encoder.tokenize(documents, "document")
            explanations: dict[int, Explanation] = {}
            for bucket in batch.buckets(_BUCKET_TOKENS):
                part = batch.select(bucket)
                explanations.update(zip(bucket, self._explain_batch(query, half, part), strict=True))
        return [explanations[index] for index in range(len(documents))]

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
            for bucket in batch.buckets(_BUCKET_TOKENS):
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

    def _explain_batch(self, query: str, half: Factors, batch: Batch) -> list[Explanation]:
        """Cold where that is cheaper: it takes one pass per query token, factors take one per document token."""
        start = time.perf_counter()
        longest = max(len(tokens) for tokens in batch.tokens)
        path = "cold" if len(half.tokens) < longest else "built"
        if path == "cold":
            found = self.method.cold(half, batch)
        else:
            found = [self.method.warm(half, factors) for factors in self.method.factor(batch)]
        provenance = {"path": path, "seconds": (time.perf_counter() - start) / len(batch)}
        return [
            self._explanation(query, half.tokens, half.truncated, passage, document, provenance)
            for passage, document in zip(batch.texts, found, strict=True)
        ]

    def _explain_pairs(self, method: PairMethod, query: str, documents: Sequence[str | Embedded]) -> list[Explanation]:
        """Methods that need both texts at once: nothing is kept, every pair is computed here and now."""
        explanations: dict[int, Explanation] = {}
        with _quiet_torch(self.encoder):
            asked = self.encoder.tokenize([query], "query")
            batch = self.encoder.tokenize(documents, "document")
            for bucket in batch.buckets(_BUCKET_TOKENS):
                start = time.perf_counter()
                part = batch.select(bucket)
                found = method.explain(asked, part)
                provenance = {"path": "pair", "seconds": (time.perf_counter() - start) / len(part)}
                for index, passage, document in zip(bucket, part.texts, found, strict=True):
                    explanations[index] = self._explanation(
                        query, asked.tokens[0], asked.truncated[0], passage, document, provenance
                    )
        return [explanations[index] for index in range(len(documents))]

    def _explanation(
        self,
        query: str,
        query_tokens: tuple[Token, ...],
        query_truncated: bool,
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
            fingerprint=self.encoder.fingerprint,
            references=document.references,
            similarities=document.similarities,
            unit=document.unit,
            surrogate=self.method.surrogate,
            truncated=tuple(truncated),
            provenance=provenance,
        )

    # ------------------------------------------------------------------ life

    def close(self) -> None:
        """Let go of what is kept between calls."""
        with self._queries_lock:
            self._queries.clear()

    def __enter__(self) -> Explainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Explainer({self.encoder.name!r}, method={self.method.name!r}, layer={self.method.layer})"


def as_encoder(model: SentenceTransformer | MultiVectorEncoder, name: str, device: str | None) -> Encoder:
    """The encoder of a loaded model of either kind."""
    from sentence_transformers import MultiVectorEncoder

    if isinstance(model, MultiVectorEncoder):
        return MultiVector(model, name=name, device=device)
    return Encoder(model, name=name, device=device)


@contextmanager
def _quiet_torch(encoder: Encoder) -> Iterator[None]:
    """No autograd, no inference mode and no autocast of the caller's reaches into the computation. All thread-local."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(encoder.device.type, enabled=False):
        yield
