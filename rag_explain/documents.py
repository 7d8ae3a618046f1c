"""A query's documents, each explained by the cheapest path: from the store, cold, or built and kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rag_explain.encoder import Batch, Encoder
from rag_explain.errors import StoreError
from rag_explain.methods import ColdDocument, Method
from rag_explain.store import KeptFactors, NewFactors, Store, factors_key
from rag_explain.store.policy import SkiRental
from rag_explain.store.tier import chunks
from rag_explain.types import Embedded, Factors

# Documents travel in batches of at most this many positions: enough to fill the machine, little padding.
BUCKET_TOKENS = 2048
_WINDOW = 256  # documents that `precompute` sorts by length at a time


@dataclass(frozen=True, eq=False)
class Served:
    """One document explained, and by which path: "memory", "disk", "remote", "cold" or "built", with its seconds."""

    document: ColdDocument
    provenance: dict[str, Any]


class Documents:
    """The documents of one encoder and method, over a store; `policy` decides which are built."""

    def __init__(self, encoder: Encoder, method: Method, store: Store, policy: SkiRental | None = None) -> None:
        self._encoder = encoder
        self._method = method
        self._store = store
        self._policy = SkiRental() if policy is None else policy

    def explain(
        self, query: Factors, passages: Sequence[Embedded], ids: Sequence[str | None] | None = None
    ) -> list[Served]:
        """Explain the documents in the order given: what the store has as one product, the rest as the policy says."""
        start = time.perf_counter()
        keys = self._keys(passages, query.fingerprint)
        owners = _owners(keys, ids)
        found = self._store.get(keys, self._device)
        self._store.link([(key, owners[key]) for key in found if key in owners])
        lookup = (time.perf_counter() - start) / len(keys)
        missing = {key: passage for key, passage in zip(keys, passages, strict=True) if key not in found}
        served: dict[bytes, Served] = {}
        costs = dict.fromkeys(found, lookup)
        if missing:
            batch = self._encoder.tokenize(list(missing.values()), "document")
            chosen = self._choose(query, list(missing), batch)
            served = self._cold(query, list(missing), batch, [index for index, build in enumerate(chosen) if not build])
            start = time.perf_counter()
            wanted = [key for key, build in zip(missing, chosen, strict=True) if build]
            built = self._build(list(missing), batch, wanted, owners)
            costs |= dict.fromkeys(built, (time.perf_counter() - start) / max(1, len(built)))
            found |= built
        served |= self._warm(query, found, costs)
        return [served[key] for key in keys]

    def precompute(
        self,
        passages: Iterable[tuple[Embedded, str | None]],
        advance: Callable[[int], None],
    ) -> int:
        """Build and keep the factors of every document that the store does not have; how many were built."""
        count = 0
        for window in chunks(passages, _WINDOW):
            texts = [passage for passage, _ in window]
            keys = self._keys(texts, self._encoder.fingerprint)
            owners = _owners(keys, [name for _, name in window])
            kept = self._store.has(keys)
            self._store.link([(key, owners[key]) for key in kept if key in owners])
            missing = {key: text for key, text in zip(keys, texts, strict=True) if key not in kept}
            advance(len(window) - len(missing))
            if not missing:
                continue
            batch = self._encoder.tokenize(list(missing.values()), "document")
            order = list(missing)
            for bucket in batch.buckets(BUCKET_TOKENS):
                wanted = [order[index] for index in bucket]
                self._build(order, batch, wanted, owners)
                if not self._store.has(wanted):
                    raise StoreError(
                        "nothing of what was just built is kept: the store is full or cannot be written to"
                    )
                count += len(bucket)
                advance(len(bucket))
        return count

    # ------------------------------------------------------------------ the three paths

    def _choose(self, query: Factors, keys: Sequence[bytes], batch: Batch) -> list[bool]:
        """For each document whether to build its factors now."""
        if not self._method.cacheable:
            return [False] * len(keys)
        lengths = [len(tokens) for tokens in batch.tokens]
        asked = len(query.tokens)
        return [self._policy.should_build(key, asked, n) for key, n in zip(keys, lengths, strict=True)]

    def _warm(self, query: Factors, found: dict[bytes, KeptFactors], costs: dict[bytes, float]) -> dict[bytes, Served]:
        if not found:
            return {}
        start = time.perf_counter()
        documents = self._method.warm(query, [item.resident for item in found.values()])
        product = (time.perf_counter() - start) / len(found)
        return {
            key: Served(document, {"path": item.tier, "seconds": costs[key] + product})
            for (key, item), document in zip(found.items(), documents, strict=True)
        }

    def _cold(self, query: Factors, keys: Sequence[bytes], batch: Batch, indices: list[int]) -> dict[bytes, Served]:
        served: dict[bytes, Served] = {}
        if not indices:
            return served
        asked = batch.select(indices)
        for bucket in asked.buckets(BUCKET_TOKENS):
            part = asked.select(bucket)
            start = time.perf_counter()
            documents = self._method.cold(query, part)
            seconds = time.perf_counter() - start
            self._policy.observe_cold(seconds, len(query.tokens), [len(tokens) for tokens in part.tokens])
            provenance = {"path": "cold", "seconds": seconds / len(part)}
            for index, document in zip(bucket, documents, strict=True):
                served[keys[indices[index]]] = Served(document, provenance)
        return served

    def _build(
        self, keys: Sequence[bytes], batch: Batch, wanted: Sequence[bytes], owners: dict[bytes, tuple[str, ...]]
    ) -> dict[bytes, KeptFactors]:
        """Build and keep those of the batch's documents that are wanted, each by one thread only."""
        if not wanted:
            return {}
        position = {key: index for index, key in enumerate(keys)}

        def compute(mine: list[bytes]) -> list[NewFactors]:
            asked = batch.select([position[key] for key in mine])
            entries = []
            for bucket in asked.buckets(BUCKET_TOKENS):
                part = asked.select(bucket)
                start = time.perf_counter()
                factors = self._method.factor(part)
                self._policy.observe_build(time.perf_counter() - start, [len(tokens) for tokens in part.tokens])
                for index, half in zip(bucket, factors, strict=True):
                    entries.append(NewFactors(mine[index], half, owners.get(mine[index], ())))
            return entries

        return self._store.build(wanted, compute, self._device)

    # ------------------------------------------------------------------ names

    @property
    def _device(self) -> str:
        return str(self._encoder.device)

    def _keys(self, passages: Sequence[Embedded], fingerprint: str) -> list[bytes]:
        settings = self._method.settings
        return [
            factors_key(
                passage,
                role="document",
                fingerprint=fingerprint,
                method=self._method.name,
                settings=settings,
                precision=self._store.precision,
            )
            for passage in passages
        ]


def _owners(keys: Sequence[bytes], ids: Sequence[str | None] | None) -> dict[bytes, tuple[str, ...]]:
    """The ids that belong to each key: one text may be several documents."""
    owners: dict[bytes, tuple[str, ...]] = {}
    for key, name in zip(keys, ids or [None] * len(keys), strict=True):
        if name is not None:
            owners[key] = (*owners.get(key, ()), name)
    return owners
