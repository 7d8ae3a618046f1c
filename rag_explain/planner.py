"""Which path explains a document: warm from the store, cold, or by factors that are built and kept."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from math import ceil
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from rag_explain.devices import Device
from rag_explain.encoder.batch import Batch
from rag_explain.errors import BudgetSpent, EmbedderStopped, InvalidInput, StoreError, first_line
from rag_explain.factors import Factors
from rag_explain.methods import ExplainedPair, Method
from rag_explain.pairing import Placed
from rag_explain.results.notices import PARTIAL
from rag_explain.results.plan import Plan
from rag_explain.results.precomputed import Precomputed
from rag_explain.results.spans import ValuedSpan
from rag_explain.scorers.base import Scorer
from rag_explain.ski_rental import SkiRental
from rag_explain.store import KeptFactors, NewFactors, Store, factors_key
from rag_explain.store.tier import chunks
from rag_explain.texts.passage import Passage, as_passage
from rag_explain.texts.segments import part_spans, sentence_spans, word_spans
from rag_explain.texts.tokens import Role, Unit

log = logging.getLogger("rag_explain.planner")
K = TypeVar("K", bound=Hashable)

_WINDOW = 256  # documents that `precompute` sorts by length at a time
Owners = dict[bytes, tuple[str, ...]]  # the ids that belong to each key: one text may be several documents
# The units of which a document's factors can be summed to a unit, the smallest in the store first.
_FINER: dict[Unit, tuple[Unit, ...]] = {
    "token": ("token",),
    "word": ("word", "token"),
    "sentence": ("sentence", "word", "token"),
}
# Documents whose edited texts are embedded together, by sentence; by word each has enough of its own.
_EDITED = 16
_TOKENS_PER_WORD = 4 / 3
# What is built for a document that is looked at again and again. Words cost nearly as much as tokens, which serve all.
_BUILT: dict[Unit, Unit] = {"token": "token", "word": "token", "sentence": "sentence"}


class DocumentPlanner:
    """The documents of one scorer and method, over a store; `policy` says which are built, `device` how many at once.

    Provenance of a pair is its path ("memory", "disk", "remote", "cold", "built" or "pair") and seconds.
    """

    def __init__(self, scorer: Scorer, method: Method, store: Store, policy: SkiRental | None = None) -> None:
        self._scorer, self._method, self._store = scorer, method, store
        self.device = Device(lambda: scorer.device)
        self._policy = SkiRental() if policy is None else policy
        # By fingerprint and text, as long as the store has them: what was explained is compared at once.
        self._lately: WeakValueDictionary[tuple[str, Passage], Factors] = WeakValueDictionary()
        self._identity = lru_cache(8)(lambda fingerprint: store.identify(fingerprint, scorer.probes, scorer.tolerance))

    def explain(
        self, query: Any, passages: Sequence[Passage], ids: Sequence[str | None] | None = None, unit: Unit = "token"
    ) -> list[ExplainedPair]:
        """Explain the documents in the order given for a prepared query, in this unit or a finer one.

        What the store has in such a unit is one product, the rest as the policy says. A method without factors has
        nothing in the store: every pair is computed.
        """
        if not self._method.has_factors:
            each = self._cold(query, self._scorer.read(passages, "document"), "pair")
            return [each[index] for index in range(len(passages))]
        start = time.perf_counter()
        kept = self._find(passages, ids, query.fingerprint, unit)
        seconds = (time.perf_counter() - start) / len(passages)
        self._lately.update({(query.fingerprint, one): item.placed.factors for one, item in kept.items()})
        pairs = self._warm(query, {passage: (item, seconds) for passage, item in kept.items()})
        missing = list(dict.fromkeys(passage for passage in passages if passage not in kept))
        if missing:
            built = unit if self._method.edits else _BUILT[unit]
            pairs |= self._missing(query, missing, _names(passages, ids), built)
        return [pairs[passage] for passage in passages]

    def _find(
        self, passages: Sequence[Passage], ids: Sequence[str | None] | None, fingerprint: str, unit: Unit
    ) -> dict[Passage, KeptFactors]:
        """What the store has of these documents in a unit that this one can be made of, the cheapest first."""
        found: dict[Passage, KeptFactors] = {}
        for grain in self._grains(unit):
            left = [index for index, passage in enumerate(passages) if passage not in found]
            if not left:
                break
            keys = self._keys([passages[index] for index in left], fingerprint, grain)
            kept = self._store.get(keys, self._scorer.device)
            self._link(keys, None if ids is None else [ids[index] for index in left], kept)
            found |= {passages[index]: kept[key] for index, key in zip(left, keys, strict=True) if key in kept}
        return found

    def _grains(self, unit: Unit) -> tuple[Unit, ...]:
        """The units in which a document's factors serve this one."""
        if self._method.edits:
            return (unit,)
        return _FINER[unit] if self._method.linear else ("token",)

    def _missing(
        self, query: Any, passages: Sequence[Passage], names: Mapping[Passage, tuple[str, ...]], unit: Unit
    ) -> dict[Passage, ExplainedPair]:
        """Explain documents that the store does not have: cold, or by factors that are built in this unit and kept."""
        keys = self._keys(passages, query.fingerprint, unit)
        batch = self._scorer.read(passages, "document")
        chosen = list(range(len(passages))) if self._method.edits else self._worth_building(query, keys, batch, unit)
        others = [index for index in range(len(passages)) if index not in chosen]
        cold = self._cold(query, batch.select(others), "cold") if others else {}
        pairs = {passages[others[index]]: one for index, one in cold.items()}
        start = time.perf_counter()
        owners = {keys[index]: names[passages[index]] for index in chosen if names.get(passages[index])}
        try:
            built = self._build(keys, batch, [keys[index] for index in chosen], owners, unit)
        except BudgetSpent:
            built = self._partly(keys, batch, unit)
        seconds = (time.perf_counter() - start) / max(1, len(built))
        position = dict(zip(keys, passages, strict=True))
        return pairs | self._warm(query, {position[key]: (item, seconds) for key, item in built.items()})

    def _partly(self, keys: Sequence[bytes], batch: Batch, unit: Unit) -> dict[bytes, KeptFactors]:
        """What was built before no more texts could be sent, and of the next document what is known of it."""
        built = self._store.get(keys, self._scorer.device)
        for index, key in enumerate(keys):
            if key not in built:
                factors = self._method.partial(batch.select([index]), unit)
                built[key] = KeptFactors(Placed.on_host(factors), "partial")
        return built

    def _worth_building(self, query: Factors, keys: Sequence[bytes], batch: Batch, unit: Unit) -> list[int]:
        """The documents of a batch for which the policy says so."""
        rows = batch.rows(unit)
        return [
            index
            for index, (key, tokens) in enumerate(zip(keys, batch.tokens, strict=True))
            if self._policy.should_build(key, len(query.tokens), len(tokens), rows[index])
        ]

    def _warm(self, query: Factors, kept: Mapping[Passage, tuple[KeptFactors, float]]) -> dict[Passage, ExplainedPair]:
        """One product for all whose factors are there; `kept` also says what getting them took."""
        if not kept:
            return {}
        start = time.perf_counter()
        pairs = self._method.warm(query, [item.placed for item, _ in kept.values()])
        product = (time.perf_counter() - start) / len(kept)
        return {
            passage: replace(pair, provenance={"path": item.tier, "seconds": seconds + product})
            for (passage, (item, seconds)), pair in zip(kept.items(), pairs, strict=True)
        }

    def precompute(
        self, texts: Iterable[tuple[str | Passage, str | None]], advance: Callable[[int], None], unit: Unit = "token"
    ) -> Precomputed:
        """Build and keep the factors of every document that the store does not have.

        A text that fails does not stop the others; the reason of the first one is a warning. When what embeds is
        stopped, nothing more is tried.
        """
        built, given, failures, stopped = 0, list[bytes](), _Failures(), ""
        for window in chunks(texts, _WINDOW):
            passages, ids = _readable(window, failures)
            epoch = self._store.epoch()
            keys = self._keys(passages, self._scorer.fingerprint, unit)
            given += keys
            owners = self._link(keys, ids, kept := self._store.has(keys))
            missing = {key: text for key, text in zip(keys, passages, strict=True) if key not in kept}
            advance(len(window) - len(missing))
            try:
                new = self._build_all(missing, owners, unit, failures, advance)
            except EmbedderStopped as error:
                new, stopped = list(self._store.has(list(missing))), str(error)
            is_forgotten = self._store.epoch() != epoch  # by another thread or process, while these were built
            if len(new) > 1 and not is_forgotten and not self._store.has(new):
                raise StoreError("nothing of what was just built is kept: the store is full or cannot be written to")
            built += len(new)
            if stopped:
                break
        held = {key for part in chunks(dict.fromkeys(given), _WINDOW) for key in self._store.has(part)}
        failed = failures.unreadable + sum(key in failures.keys - held for key in given)
        return Precomputed(built, sum(key in held for key in given), failed, stopped)

    def plan(self, passages: Sequence[Passage], query: Passage | None, unit: Unit) -> Plan:
        """What explaining these documents, for this query, would have to embed.

        Where words are only those of the best sentences, which are not known: at most, as if the longest were the best.
        """
        texts = set([] if query is None else self._unembedded([query], "query", "word"))
        is_most = query is not None and self._method.narrows(unit)
        missing, more = self._unkept(passages, "sentence" if is_most else unit)
        if is_most:
            longest = [self._method.narrowed(passage, _longest(passage)) for passage in passages]
            wordless, words = self._unkept(longest, unit)
            missing, more = missing | {replace(passage, within=None) for passage in wordless}, more | words
        texts |= more
        return Plan(
            documents=len(passages),
            kept=sum(passage not in missing for passage in passages),
            embeddings=len(texts),
            characters=sum(len(text) for _, text in texts),
            tokens=ceil(sum(len(word_spans(text)) for _, text in texts) * _TOKENS_PER_WORD),
            left=self._scorer.texts_left,
            is_most=is_most,
        )

    def _unkept(self, passages: Sequence[Passage], unit: Unit) -> tuple[set[Passage], set[tuple[Role, str]]]:
        """The documents that the store does not have in this unit, and the texts that they would take."""
        keys = dict(zip(passages, self._keys(passages, self._scorer.fingerprint, unit), strict=True))
        kept = self._store.has(list(keys.values()))
        missing = [passage for passage, key in keys.items() if key not in kept]
        parts = chunks(missing, _WINDOW)
        return set(missing), {text for some in parts for text in self._unembedded(some, "document", unit)}

    def _unembedded(self, passages: Sequence[Passage], role: Role, unit: Unit) -> list[tuple[Role, str]]:
        """The texts that factors take and that are not at hand."""
        wanted = self._method.embedded(self._scorer.read(passages, role), unit)
        found = self._scorer.at_hand(wanted, role)
        return [(role, passage.string) for passage, vector in zip(wanted, found, strict=True) if vector is None]

    def _build_all(
        self,
        texts: Mapping[bytes, Passage],
        owners: Owners,
        unit: Unit,
        failures: _Failures,
        advance: Callable[[int], None],
    ) -> list[bytes]:
        """Build documents together, or one by one where one of them fails; the keys of those that were built here."""
        built: list[bytes] = []
        left = dict(texts)
        if not texts:
            return built
        try:
            batch, order = self._scorer.read(list(texts.values()), "document"), list(texts)
            for bucket in self._buckets(batch, unit):
                wanted = [order[index] for index in bucket]
                found = self._build(order, batch, wanted, owners, unit)
                built += [key for key, one in found.items() if one.tier == "built"]
                advance(len(wanted))
                for key in wanted:
                    del left[key]
        except (StoreError, EmbedderStopped):
            raise
        except Exception as error:  # whatever one text makes a model or a tokenizer raise
            if len(left) == 1:
                failures.add(error, *left)
                advance(1)
                return built
            for key, text in left.items():
                built += self._build_all({key: text}, owners, unit, failures, advance)
        return built

    def kept(self, passages: Sequence[Passage]) -> list[Factors | None]:
        """The factors of each document that the store has, in whichever unit; None for the others."""
        if not self._method.has_factors:
            return [None] * len(passages)
        fingerprint = self._scorer.fingerprint
        lately = [self._lately.get((fingerprint, passage)) for passage in passages]
        if all(factors is not None for factors in lately):
            return lately
        found = self._find(passages, None, fingerprint, "sentence")
        return [found[passage].placed.factors if passage in found else None for passage in passages]

    def _cold(self, query: Any, batch: Batch, path: str) -> dict[int, ExplainedPair]:
        """Explain every document of a batch without factors; by the document's index."""

        def compute(part: Batch) -> list[ExplainedPair]:
            start = time.perf_counter()
            pairs = self._method.cold(query, part)
            seconds = time.perf_counter() - start
            if self._method.has_factors:
                self._policy.observe_cold(seconds, len(query.tokens), list(map(len, part.tokens)))
            return [replace(pair, provenance={"path": path, "seconds": seconds / len(part)}) for pair in pairs]

        return batch.in_buckets(self.device.size(), self.device.sharing(compute))

    def _build(
        self, keys: Sequence[bytes], batch: Batch, wanted: Sequence[bytes], owners: Owners, unit: Unit
    ) -> dict[bytes, KeptFactors]:
        """Build and keep those of the batch's documents that are wanted, each by one thread only.

        When what embeds is stopped, what is complete is kept before that is raised.
        """
        if not wanted:
            return {}
        position = {key: index for index, key in enumerate(keys)}
        stopped: list[EmbedderStopped] = []

        def factor(part: Batch) -> list[Factors]:
            start = time.perf_counter()
            built = self._method.factor(part, unit)
            rows = [len(one.tokens) for one in built]
            self._policy.observe_build(time.perf_counter() - start, list(map(len, part.tokens)), rows)
            return built

        def compute(mine: list[bytes]) -> list[NewFactors]:
            part = batch.select([position[key] for key in mine])
            built = list[tuple[int, Factors]]()
            for some in self._buckets(part, unit, self._method.passes(part, unit)):
                try:
                    built += zip(some, self.device.sharing(factor)(part.select(some)), strict=True)
                except EmbedderStopped as error:
                    stopped.append(error)
                    built += self._complete(part, some, unit)
                    break
            return [NewFactors(mine[index], one, owners.get(mine[index], ())) for index, one in built]

        found = self._store.build(wanted, compute, self._scorer.device)
        if stopped:
            raise stopped[0]
        return found

    def _complete(self, batch: Batch, some: Sequence[int], unit: Unit) -> Iterator[tuple[int, Factors]]:
        """The factors of those documents of which all was embedded before something stopped: it is at hand."""
        for index in some:
            with suppress(EmbedderStopped):
                factors = self._method.partial(batch.select([index]), unit)
                if all(notice.code != PARTIAL for notice in factors.notices):
                    yield index, factors

    def _buckets(self, batch: Batch, unit: Unit, rows: Sequence[int] | None = None) -> Iterator[Sequence[int]]:
        """Which texts of a batch are computed together; `rows` as `Batch.buckets` takes it."""
        if self._method.edits:
            return chunks(range(len(batch)), _EDITED if unit == "sentence" else 1)
        return batch.buckets(self.device.size(), rows)

    def _keys(self, passages: Sequence[Passage], fingerprint: str, unit: Unit) -> list[bytes]:
        name, settings = self._method.name, {**self._method.kept_settings, "unit": unit}
        identity = self._identity(fingerprint)
        key = partial(factors_key, role="document", fingerprint=identity, precision=self._store.precision)
        return [key(passage, method=name, settings=settings) for passage in passages]

    def _link(self, keys: Sequence[bytes], ids: Sequence[str | None] | None, kept: Container[bytes]) -> Owners:
        """The ids that belong to each key; they own from now on what is kept already."""
        owners = _names(keys, ids)
        self._store.link([(key, names) for key, names in owners.items() if key in kept])
        return owners


def _names(items: Sequence[K], ids: Sequence[str | None] | None) -> dict[K, tuple[str, ...]]:
    """The ids of each item that has any: the same text, or key, may be given several times."""
    names: dict[K, tuple[str, ...]] = {}
    for item, name in zip(items, ids or [None] * len(items), strict=True):
        if name is not None:
            names[item] = (*names.get(item, ()), name)
    return names


def _longest(passage: Passage) -> list[ValuedSpan]:
    """Its sentences, each with the number of its words as its value."""
    text = passage.text
    return [ValuedSpan(text[a:b], a, b, len(part_spans(text[a:b]))) for a, b in sentence_spans(text)]


class _Failures:
    """The texts that `precompute` could not explain: by their keys, and how many were no texts at all."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.unreadable = 0

    def add(self, error: Exception, key: bytes | None = None) -> None:
        """Count a text; the log says the first reason."""
        if not self.keys and not self.unreadable:
            log.warning("a text could not be explained and is left out: %s", first_line(error))
        if key is None:
            self.unreadable += 1
        else:
            self.keys.add(key)


def _readable(
    window: Sequence[tuple[str | Passage, str | None]], failures: _Failures
) -> tuple[list[Passage], list[str | None]]:
    """The texts that can be read, and their ids."""
    passages, ids = list[Passage](), list[str | None]()
    for text, name in window:
        try:
            passages.append(as_passage(text))
            ids.append(name)
        except InvalidInput as error:
            failures.add(error)
    return passages, ids
