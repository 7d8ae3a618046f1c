"""Which path explains a document: warm from the store, cold, or by factors that are built and kept."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rag_explain.encoder.batch import Batch
from rag_explain.errors import StoreError
from rag_explain.factors import Factors
from rag_explain.methods import ExplainedPair, Method
from rag_explain.scorers.base import Scorer
from rag_explain.store import KeptFactors, NewFactors, Store, factors_key
from rag_explain.store.tier import chunks
from rag_explain.texts.passage import Passage
from rag_explain.texts.tokens import Unit

# Documents travel in batches of at most this many positions: enough to fill the machine, little padding.
BUCKET_TOKENS = 2048
_WINDOW = 256  # documents that `precompute` sorts by length at a time
_SMOOTHING = 0.2  # weight of the newest measurement
Owners = dict[bytes, tuple[str, ...]]  # the ids that belong to each key: one text may be several documents
Name = TypeVar("Name", bytes, int)


@dataclass(frozen=True, eq=False)
class Planned:
    """One document explained; its path ("memory", "disk", "remote", "cold", "built" or "pair") and seconds."""

    pair: ExplainedPair
    provenance: dict[str, Any]


class DocumentPlanner:
    """The documents of one scorer and method, over a store; `policy` decides which are built."""

    def __init__(self, scorer: Scorer, method: Method, store: Store, policy: SkiRental | None = None) -> None:
        self._scorer, self._method, self._store = scorer, method, store
        self._policy = SkiRental() if policy is None else policy

    def explain(
        self, query: Any, passages: Sequence[Passage], ids: Sequence[str | None] | None = None, unit: Unit = "token"
    ) -> list[Planned]:
        """Explain the documents in the order given for a prepared query.

        What the store has in this unit is one product, the rest as the policy says. A method without factors has
        nothing in the store: every pair is computed.
        """
        if not self._method.has_factors:
            batch = self._scorer.read(passages, "document")
            pairs = self._cold(query, range(len(passages)), batch, "pair")
            return [pairs[index] for index in range(len(passages))]
        start = time.perf_counter()
        keys = self._keys(passages, query.fingerprint, unit)
        owners = _owners(keys, ids)
        found = self._store.get(keys, self._scorer.device)
        self._store.link([(key, owners[key]) for key in found if key in owners])
        costs = dict.fromkeys(found, (time.perf_counter() - start) / len(keys))
        missing = {key: passage for key, passage in zip(keys, passages, strict=True) if key not in found}
        planned: dict[bytes, Planned] = {}
        if missing:
            batch = self._scorer.read(list(missing.values()), "document")
            order = list(missing)
            lengths = zip(order, map(len, batch.tokens), strict=True)
            chosen = [key for key, n in lengths if self._policy.should_build(key, len(query.tokens), n)]
            at = [index for index, key in enumerate(order) if key not in chosen]
            planned = self._cold(query, [order[index] for index in at], batch.select(at), "cold") if at else {}
            start = time.perf_counter()
            built = self._build(order, batch, chosen, owners, unit)
            costs |= dict.fromkeys(built, (time.perf_counter() - start) / max(1, len(built)))
            found |= built
        planned |= self._warm(query, found, costs)
        return [planned[key] for key in keys]

    def precompute(
        self, passages: Iterable[tuple[Passage, str | None]], advance: Callable[[int], None], unit: Unit = "token"
    ) -> int:
        """Build and keep the factors of every document that the store does not have; how many were built."""
        return sum(self._precompute(window, advance, unit) for window in chunks(passages, _WINDOW))

    def _precompute(
        self, window: Sequence[tuple[Passage, str | None]], advance: Callable[[int], None], unit: Unit
    ) -> int:
        texts = [passage for passage, _ in window]
        keys = self._keys(texts, self._scorer.fingerprint, unit)
        owners = _owners(keys, [name for _, name in window])
        kept = self._store.has(keys)
        self._store.link([(key, owners[key]) for key in kept if key in owners])
        missing = {key: text for key, text in zip(keys, texts, strict=True) if key not in kept}
        advance(len(window) - len(missing))
        if not missing:
            return 0
        batch = self._scorer.read(list(missing.values()), "document")
        order = list(missing)
        for bucket in batch.buckets(BUCKET_TOKENS):
            wanted = [order[index] for index in bucket]
            self._build(order, batch, wanted, owners, unit)
            if not self._store.has(wanted):
                raise StoreError("nothing of what was just built is kept: the store is full or cannot be written to")
            advance(len(bucket))
        return len(missing)

    def _warm(self, query: Factors, found: dict[bytes, KeptFactors], costs: dict[bytes, float]) -> dict[bytes, Planned]:
        if not found:
            return {}
        start = time.perf_counter()
        pairs = self._method.warm(query, [item.placed for item in found.values()])
        product = (time.perf_counter() - start) / len(found)
        return {
            key: Planned(pair, {"path": item.tier, "seconds": costs[key] + product})
            for (key, item), pair in zip(found.items(), pairs, strict=True)
        }

    def _cold(self, query: Any, names: Sequence[Name], batch: Batch, path: str) -> dict[Name, Planned]:
        """Explain every document of a batch without factors; `names` are what to call them in the result."""
        planned: dict[Name, Planned] = {}
        for bucket in batch.buckets(BUCKET_TOKENS):
            part = batch.select(bucket)
            start = time.perf_counter()
            pairs = self._method.cold(query, part)
            seconds = time.perf_counter() - start
            if self._method.has_factors:
                self._policy.observe_cold(seconds, len(query.tokens), [len(tokens) for tokens in part.tokens])
            provenance = {"path": path, "seconds": seconds / len(part)}
            planned |= {names[index]: Planned(pair, provenance) for index, pair in zip(bucket, pairs, strict=True)}
        return planned

    def _build(
        self, keys: Sequence[bytes], batch: Batch, wanted: Sequence[bytes], owners: Owners, unit: Unit
    ) -> dict[bytes, KeptFactors]:
        """Build and keep those of the batch's documents that are wanted, each by one thread only."""
        if not wanted:
            return {}
        position = {key: index for index, key in enumerate(keys)}

        def compute(mine: list[bytes]) -> list[NewFactors]:
            chosen = batch.select([position[key] for key in mine])
            entries = []
            for bucket in chosen.buckets(BUCKET_TOKENS):
                part = chosen.select(bucket)
                start = time.perf_counter()
                built = self._method.factor(part, unit)
                self._policy.observe_build(time.perf_counter() - start, [len(tokens) for tokens in part.tokens])
                for index, factors in zip(bucket, built, strict=True):
                    entries.append(NewFactors(mine[index], factors, owners.get(mine[index], ())))
            return entries

        return self._store.build(wanted, compute, self._scorer.device)

    def _keys(self, passages: Sequence[Passage], fingerprint: str, unit: Unit) -> list[bytes]:
        settings = {**self._method.settings, "unit": unit}
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


def _owners(keys: Sequence[bytes], ids: Sequence[str | None] | None) -> Owners:
    owners: Owners = {}
    for key, name in zip(keys, ids or [None] * len(keys), strict=True):
        if name is not None:
            owners[key] = (*owners.get(key, ()), name)
    return owners


class SkiRental:
    """What has been spent on cold explanations of each document, and whether that pays for its factors.

    Ski-rental: whatever queries come, this costs at most twice what it would have cost to know them beforehand. Costs
    are estimated in passes (a tangent or cotangent through one token of the document) and turned into seconds by what
    such passes were measured to take. Thread-safe; remembers the `capacity` documents asked for last.
    """

    def __init__(self, capacity: int = 65_536) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._spent: OrderedDict[bytes, float] = OrderedDict()
        # A cotangent pulled back costs about as much as a tangent pushed forward, until both were measured.
        self._per_pass = {"build": 1.0, "cold": 1.0}
        self._measured: set[str] = set()

    def estimate_build(self, document_tokens: int) -> float:
        """Expected cost of a document's factors: one tangent per token, and one for the rest."""
        return self._per_pass["build"] * _passes(document_tokens, document_tokens)

    def estimate_cold(self, query_tokens: int, document_tokens: int) -> float:
        """Expected cost of one cold explanation: one cotangent per query token, and one for the rest."""
        return self._per_pass["cold"] * _passes(query_tokens, document_tokens)

    def should_build(self, key: bytes, query_tokens: int, document_tokens: int) -> bool:
        """Whether this look at the document should build its factors; if not, it is charged for the look."""
        cold = self.estimate_cold(query_tokens, document_tokens)
        build = self.estimate_build(document_tokens)
        with self._lock:
            spent = self._spent.pop(key, 0.0) + cold
            if spent >= build:
                return True
            self._spent[key] = spent
            if len(self._spent) > self._capacity:
                self._spent.popitem(last=False)
            return False

    def observe_build(self, seconds: float, document_tokens: Sequence[int]) -> None:
        """Learn from a batch of builds that took `seconds` together."""
        self._learn("build", seconds / sum(_passes(n, n) for n in document_tokens))

    def observe_cold(self, seconds: float, query_tokens: int, document_tokens: Sequence[int]) -> None:
        """Learn from a batch of cold explanations that took `seconds` together."""
        self._learn("cold", seconds / sum(_passes(query_tokens, n) for n in document_tokens))

    def _learn(self, kind: str, seconds: float) -> None:
        other = "cold" if kind == "build" else "build"
        with self._lock:
            if kind in self._measured:
                self._per_pass[kind] += _SMOOTHING * (seconds - self._per_pass[kind])
                return
            # The first measurement turns passes into seconds: the other kind and what was spent follow.
            scale = seconds / self._per_pass[kind]
            self._per_pass[kind] = seconds
            self._measured.add(kind)
            if other not in self._measured:
                self._per_pass[other] *= scale
                for key in self._spent:
                    self._spent[key] *= scale


def _passes(rows: int, document_tokens: int) -> int:
    """How often one row of a block of `rows` and the rest goes through one token of the document."""
    return (rows + 1) * max(1, document_tokens)
