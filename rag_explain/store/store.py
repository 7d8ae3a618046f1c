"""The store: memory, then disk, then remote, as one small interface that never fails a search.

Looking up and keeping never raise for trouble in a tier: trouble is a miss and one warning. Forgetting does raise: a
caller who asks for an erasure must know when it did not happen.
"""

import json
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from itertools import product
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Self, get_args

from rag_explain.errors import FormatError, InvalidInput, ProcessBound, StoreError
from rag_explain.factors import Factors
from rag_explain.pairing import Placed
from rag_explain.probes import Probes
from rag_explain.results.serialization import to_json
from rag_explain.store.codec import Precision, decode, encode
from rag_explain.store.disk import DEFAULT_DISK_BYTES, Disk
from rag_explain.store.memory import DEFAULT_MEMORY_BYTES, Builds, Memory
from rag_explain.store.remote import Bucket, Objects, Remote
from rag_explain.store.tier import Row, Tier, chunks, owner

log = logging.getLogger("rag_explain.store")

_BATCH = 64


@dataclass(frozen=True, slots=True)
class NewFactors:
    """A document's factors to be kept, and the ids of the caller's documents that they belong to."""

    key: bytes
    factors: Factors
    ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KeptFactors:
    """A document's factors, and where they came from: "memory", "disk", "remote", or "built" just now."""

    placed: Placed
    tier: str


class Store(ProcessBound, AbstractContextManager["Store"]):
    """Where the factors of documents are kept.

    Args:
        folder: of the disk tier; None keeps factors in memory only.
        remote: a URL (s3://, gs://, az://, file://) or anything with the four methods of `Objects`.
        memory_bytes: what memory may take, per device; one number is the limit of every device.
        max_bytes: what the disk tier may take.
        device_precision: of what memory holds on a device that is not the CPU: "fp16" takes half of the room there and
            adds an error of about 2e-4; it is multiplied in float32.
        precision: of stored rows; "fp16" adds an error of about 2e-4, "int8" about 4e-3 at half the size.
        readonly: only read: nothing is made or changed in the folder or the remote.
    """

    instead = "open the same folder or remote where it is unpickled"

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        remote: str | Objects | None = None,
        memory_bytes: int | Mapping[str, int] = DEFAULT_MEMORY_BYTES,
        max_bytes: int = DEFAULT_DISK_BYTES,
        precision: Precision = "fp16",
        device_precision: Literal["fp32", "fp16"] = "fp32",
        readonly: bool = False,
    ) -> None:
        if precision not in get_args(Precision):
            raise InvalidInput(f"precision must be fp32, fp16 or int8, not {precision!r}")
        if not (folder is None or isinstance(folder, PathLike) or _is_path(folder)):
            raise InvalidInput(f"a store is kept in a folder, not {folder!r}: give a bucket's URL as Store(remote=...)")
        if device_precision not in ("fp32", "fp16"):
            raise InvalidInput(f"device_precision must be fp32 or fp16, not {device_precision!r}")
        self._memory = Memory(memory_bytes, is_half=device_precision == "fp16")
        self._disk = None if folder is None else Disk(folder, max_bytes=max_bytes, readonly=readonly)
        self._tiers: list[Tier] = [] if self._disk is None else [self._disk]  # below memory
        if remote is not None:
            objects = Bucket(remote, make=not readonly) if isinstance(remote, str) else remote
            self._tiers.append(Remote(objects, readonly=readonly))
        # For the key. Factors that go to disk are served as the disk keeps them, from the first time on.
        self.precision: Precision = precision if self._tiers else "fp32"
        self._warned: set[str] = set()  # kinds of trouble
        self._models: dict[str, dict[str, Probes]] = {}  # what was seen of each fingerprint, by name
        self._building = Builds()
        self._gate = threading.Lock()  # nothing with an owner is kept while a document is being forgotten
        self._own_epoch = 0
        self._disk_epoch: object = None  # as it was read last
        self._memory_epoch = self.epoch()  # in which nothing that memory holds was forgotten

    def get(self, keys: Sequence[bytes], device: str = "cpu") -> dict[bytes, KeptFactors]:
        """Those of the keys that are kept anywhere; they are in memory afterwards."""
        epoch = self._drop_forgotten()
        found = {key: KeptFactors(placed, "memory") for key, placed in self._memory.get(keys, device).items()}
        for tier in self._tiers:
            missing = [key for key in dict.fromkeys(keys) if key not in found]
            if missing:
                found |= self._get_from(tier, missing, device, epoch)
        return found

    def _get_from(self, tier: Tier, keys: Sequence[bytes], device: str, epoch: object) -> dict[bytes, KeptFactors]:
        """What `tier` has of these keys. It stays in memory unless a document was forgotten after `epoch`."""
        rows: dict[bytes, Row] = {}
        with self._tolerated(tier, "read"):
            rows = tier.get(keys)
        read = {key: (self._decode(tier, row), row.owners) for key, row in rows.items()}
        whole = {key: (factors, owners) for key, (factors, owners) in read.items() if factors is not None}
        found = {key: KeptFactors(one, tier.name) for key, one in self._memory.put_many(whole, device=device).items()}
        if found and self.epoch() != epoch:
            self._memory.drop(found)
        elif found and self._disk is not None and tier is not self._disk:
            self._keep(self._disk, [rows[key] for key in found])
        return found

    def has(self, keys: Sequence[bytes]) -> set[bytes]:
        """Those of the keys that are kept anywhere, without reading them where that can be helped."""
        self._drop_forgotten()
        if not self._tiers:
            return self._memory.has(keys)
        found: set[bytes] = set()
        for tier in self._tiers:
            missing = [key for key in keys if key not in found]
            if missing:
                with self._tolerated(tier, "read"):
                    found |= tier.has(missing)
        return found

    def identify(self, fingerprint: str, probes: Probes, tolerance: float) -> str:
        """The name under which a model's factors are kept: its fingerprint, and the kept probes that it matches.

        A model of this fingerprint that computes something else than any that was seen here gets a name of its own.
        """
        known = self._models.get(fingerprint, {})
        kept: list[tuple[Tier, dict[str, Probes]]] = []
        for tier in self._tiers:
            with self._tolerated(tier, "read"):
                kept.append((tier, {one.id: one for one in _read_probes(tier.probes(fingerprint))}))
                known = known | kept[-1][1]
        # By name, so that processes which see the same sets choose the same one.
        alike = [name for name, one in sorted(known.items()) if one.distance(probes) <= tolerance]
        name = alike[0] if alike else probes.id
        self._models[fingerprint] = {name: probes, **known}
        data = to_json(self._models[fingerprint][name].to_dict()).encode()
        for tier, sets in kept:
            if name not in sets and not tier.readonly:
                with self._tolerated(tier, "written"):
                    tier.add_probes(fingerprint, name, data)
        return f"{fingerprint}:{name}"

    def put(self, new: Sequence[NewFactors], device: str = "cpu") -> dict[bytes, Placed]:
        """Keep these factors in every tier, and hand them back as they will be served from now on."""
        placed: dict[bytes, Placed] = {}
        for batch in chunks(new, _BATCH):
            rows, kept = list[Row](), dict[bytes, tuple[Factors, tuple[bytes, ...]]]()
            for one in batch:
                owners = tuple(map(owner, one.ids))
                kept[one.key] = self._as_kept(one, owners, rows) if self._tiers else one.factors, owners
            placed |= self._memory.put_many(kept, device=device)
            for tier in self._tiers:
                self._keep(tier, rows)
        return placed

    def _as_kept(self, new: NewFactors, owners: tuple[bytes, ...], rows: list[Row]) -> Factors:
        """The factors as they will be read back, their row added to `rows`; unchanged where they cannot be kept."""
        try:
            row = Row(new.key, encode(new.key, new.factors, self.precision), owners)
            factors = decode(row.key, row.data)
        except StoreError as error:
            self._warn("encode", str(error))
            return new.factors
        rows.append(row)
        return factors

    def build(
        self, keys: Sequence[bytes], compute: Callable[[list[bytes]], Sequence[NewFactors]], device: str = "cpu"
    ) -> dict[bytes, KeptFactors]:
        """`compute` and keep these keys, each once even when many threads ask for it at the same time.

        When another thread's computation fails, its keys are computed here: its error is its own.
        """
        epoch = self.epoch()
        with self._building.hold(keys) as builds:
            # Another thread may have built them while this one waited.
            ready: dict[bytes, KeptFactors] = {key: one.result for key, one in builds.items() if one.result is not None}
            ready |= self.get([key for key in builds if key not in ready], device)
            missing = [key for key in dict.fromkeys(keys) if key not in ready]
            if not missing:
                return ready
            new = compute(missing)
            with self._gate:
                # When a document was forgotten since this was asked for, it may be one of these: served, and neither
                # kept nor given to a thread that waits for it, and may have asked afterwards.
                barred = {one.key for one in new if one.ids} if self.epoch() != epoch else set()
                placed = self.put([one for one in new if one.key not in barred], device)
            placed |= {one.key: Memory(0).put(one.key, one.factors, device=device) for one in new if one.key in barred}
            for key, one in placed.items():
                ready[key] = KeptFactors(one, "built")
                builds[key].result = None if key in barred else ready[key]
        return ready

    def link(self, documents: Sequence[tuple[bytes, Sequence[str]]]) -> None:
        """Let documents own factors that are kept already, so that forgetting the document erases them."""
        links = [(key, [owner(name) for name in ids]) for key, ids in documents]
        links = [(key, owners) for key, owners in links if self._memory.link(key, owners)]
        for tier in self._tiers if links else ():
            if not tier.readonly:
                with self._gate, self._tolerated(tier, "written"):
                    tier.link(links)

    def forget(self, ids: Sequence[str]) -> int:
        """Erase everything that these documents own, from every tier; how many factors went.

        Returns only when every tier has looked that they are gone; a `StoreError` names the tier where they
        are not. Other processes on the same disk tier drop what they hold in memory at their next lookup.
        """
        if isinstance(ids, str) or not isinstance(ids, Iterable):
            raise InvalidInput("give a list of document ids, even for one")
        owners = list(map(owner, ids))
        with self._gate:
            self._own_epoch += 1
            gone = self._memory.forget(owners)
            failed: dict[str, StoreError] = {}
            # All keys first: a row may have its owners in another tier only.
            steps = (lambda tier: gone.update(tier.owned_by(owners)), lambda tier: tier.forget(owners, gone))
            for step, tier in product(steps, self._tiers):
                try:
                    step(tier)
                except StoreError as error:
                    failed[tier.name] = error
            self._memory_epoch = self.epoch()
            if self._tiers:
                self._memory.clear()  # it may hold rows whose owners only another process knew
        if failed:
            reasons = "; ".join(f"{name}: {error}" for name, error in failed.items())
            raise StoreError(f"the documents are not erased everywhere ({reasons}): forget them again")
        return len(gone)

    def epoch(self) -> tuple[int, object]:
        """Something that changes whenever a document is forgotten, by this store or by a process on the same disk."""
        if self._disk is not None:
            with self._tolerated(self._disk, "read"):
                self._disk_epoch = self._disk.epoch()
        return self._own_epoch, self._disk_epoch

    def _drop_forgotten(self) -> tuple[int, object]:
        """Empty memory when another process has forgotten something: it may hold that. Returns the epoch."""
        epoch = self.epoch()
        if epoch != self._memory_epoch:
            self._memory.clear()
            self._memory_epoch = epoch
        return epoch

    def verify(self) -> dict[str, dict[str, int]]:
        """Read every row of every tier, and delete damaged ones. Rows and damaged rows per tier."""
        report = {}
        for tier in self._tiers:
            damaged = [self._decode(tier, row) is None for row in tier.scan()]
            report[tier.name] = {"rows": len(damaged), "damaged": sum(damaged)}
        return report

    def prune(self, max_bytes: int) -> int:
        """Drop the factors used longest ago from the disk tier until it takes at most `max_bytes`."""
        return 0 if self._disk is None or self._disk.readonly else self._disk.prune(max_bytes)

    def export(self, target: Self) -> int:
        """Copy every healthy row of the first tier below memory into another store; how many were copied."""
        if not self._tiers or not target._tiers:
            raise StoreError("only a store on disk or a remote one can be exported, and only to such a one")
        source = self._tiers[0]
        healthy = (row for row in source.scan() if self._decode(source, row) is not None)
        count = 0
        for batch in chunks(healthy, _BATCH):
            count += len(batch)
            for tier in target._tiers:
                tier.put(batch)
        return count

    def info(self) -> dict[str, Any]:
        """What is kept where, as plain data."""
        return {"memory": self._memory.info()} | {tier.name: tier.info() for tier in self._tiers}

    def close(self) -> None:
        """Let go of everything; what was put is on disk already."""
        self._memory.clear()
        if self._disk is not None:
            self._disk.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextmanager
    def _tolerated(self, tier: Tier, doing: str) -> Iterator[None]:
        try:
            yield
        except StoreError as error:
            trouble = f"{tier.name} cannot be {doing}"
            self._warn(trouble, f"{trouble}, factors are computed here: {error}")

    def _warn(self, kind: str, message: str) -> None:
        """Warn about each kind of trouble once, then at debug level: a host searches many times a second."""
        log.log(logging.DEBUG if kind in self._warned else logging.WARNING, "%s", message)
        self._warned.add(kind)

    def _keep(self, tier: Tier, rows: Sequence[Row]) -> None:
        if rows and not tier.readonly:
            with self._tolerated(tier, "written"):
                tier.put(rows)

    def _decode(self, tier: Tier, row: Row) -> Factors | None:
        """The row's factors; a damaged row is deleted, to be computed again."""
        try:
            return decode(row.key, row.data)
        except FormatError as error:
            trouble = f"a row on {tier.name} is damaged"
            self._warn(trouble, f"{trouble} and will be computed again: {error}")
        if not tier.readonly:
            with self._tolerated(tier, "written"):
                tier.delete(row.key)
        return None


def _read_probes(found: Iterable[bytes]) -> Iterator[Probes]:
    """Those sets that can be read; a damaged one matches no model."""
    for data in found:
        with suppress(ValueError):
            yield Probes.from_dict(json.loads(data))


def _is_path(folder: object) -> bool:
    """Whether this is a string that may be the path of a folder: not an empty one, and not a URL."""
    return isinstance(folder, str) and folder != "" and "://" not in folder
