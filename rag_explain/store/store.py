"""The store: memory, then disk, then remote, behind one small interface that never fails a search.

Looking up and keeping never raise for trouble in a tier: trouble is a miss and one warning. Forgetting does
raise, because whoever asks for an erasure must know when it did not happen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from rag_explain.errors import FormatError, InvalidInput, StoreError
from rag_explain.store.codec import Precision, decode, encode
from rag_explain.store.disk import DEFAULT_LIMIT, Disk
from rag_explain.store.memory import DEFAULT_BUDGET, Memory, Resident, SingleFlight
from rag_explain.store.remote import Bucket, Objects, Remote
from rag_explain.store.tier import Once, Row, Tier, chunks, owner
from rag_explain.types import Factors

T = TypeVar("T")

_BATCH = 64


@dataclass(frozen=True, slots=True)
class Found:
    """A document's factors, and where they came from: "memory", "disk", "remote", or "built" just now."""

    resident: Resident
    tier: str


@dataclass(frozen=True, slots=True)
class Entry:
    """A document's factors to be kept, and the ids of the caller's documents that they belong to."""

    key: bytes
    factors: Factors
    ids: tuple[str, ...] = ()


class Store:
    """Where the factors of documents are kept.

    Args:
        folder: of the disk tier; None keeps factors in memory only.
        remote: a URL (s3://, gs://, az://, file://) or anything with the four methods of `Objects`.
        memory: bytes per device; one number is the budget of every device.
        max_bytes: size limit of the disk tier.
        precision: of stored rows; "fp16" costs about 2e-4, "int8" about 4e-3 at half the size.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        remote: str | Objects | None = None,
        memory: int | Mapping[str, int] = DEFAULT_BUDGET,
        max_bytes: int = DEFAULT_LIMIT,
        precision: Precision = "fp16",
    ) -> None:
        if precision not in ("fp32", "fp16", "int8"):
            raise InvalidInput(f"precision must be fp32, fp16 or int8, not {precision!r}")
        self._asked = precision
        self._memory = Memory(memory)
        self._disk = None if folder is None else Disk(folder, max_bytes=max_bytes)
        self._remote = None
        if remote is not None:
            self._remote = Remote(Bucket(remote) if isinstance(remote, str) else remote)
        self._flights = SingleFlight()
        self._once = Once()
        self._gate = threading.Lock()  # nothing with an owner is kept while a document is being forgotten
        self._forgotten = 0
        self._disk_forgets = 0
        self._followed = self._read_disk_forgets()

    @property
    def precision(self) -> str:
        """For the key. Factors that go to disk are served as the disk keeps them, from the first time on."""
        return self._asked if self._tiers() else "fp32"

    # ------------------------------------------------------------------ factors

    def get(self, keys: Sequence[bytes], device: str = "cpu") -> dict[bytes, Found]:
        """Those of the keys that are kept anywhere; they are in memory afterwards."""
        epoch = self._follow_forgets()
        found = {key: Found(resident, "memory") for key, resident in self._memory.get(keys, device).items()}
        for tier in self._tiers():
            missing = [key for key in dict.fromkeys(keys) if key not in found]
            if not missing:
                break
            healthy = []
            nothing: dict[bytes, Row] = {}
            for key, row in self._try(tier, "get", partial(tier.get, missing), nothing).items():
                factors = self._decode(tier, row)
                if factors is not None:
                    resident = self._memory.put(key, factors, device=device, owners=row.owners)
                    found[key] = Found(resident, tier.name)
                    healthy.append(row)
            if healthy and self._forgets() != epoch:
                self._memory.forget(keys=[row.key for row in healthy])
            elif healthy and tier is self._remote and self._disk is not None:
                self._keep(self._disk, healthy)
        return found

    def has(self, keys: Sequence[bytes]) -> set[bytes]:
        """Those of the keys that are kept anywhere, without reading them where that can be helped."""
        self._follow_forgets()
        if not self._tiers():
            return self._memory.has(keys)
        found: set[bytes] = set()
        for tier in self._tiers():
            missing = [key for key in keys if key not in found]
            if missing:
                found |= self._try(tier, "get", partial(tier.has, missing), set())
        return found

    def put(self, entries: Sequence[Entry], device: str = "cpu") -> dict[bytes, Resident]:
        """Keep these factors in every tier, and hand them back as they will be served from now on."""
        residents: dict[bytes, Resident] = {}
        for batch in chunks(entries, _BATCH):
            rows = []
            for entry in batch:
                factors = entry.factors
                owners = tuple(map(owner, entry.ids))
                if self._tiers():
                    try:
                        row = Row(entry.key, encode(entry.key, factors, self._asked), owners)
                        factors = decode(row.key, row.data)
                        rows.append(row)
                    except StoreError as error:
                        self._once.warn("encode", str(error))
                residents[entry.key] = self._memory.put(entry.key, factors, device=device, owners=owners)
            for tier in self._tiers():
                if rows:
                    self._keep(tier, rows)
        return residents

    def build(
        self, keys: Sequence[bytes], compute: Callable[[list[bytes]], Sequence[Entry]], device: str = "cpu"
    ) -> dict[bytes, Found]:
        """`compute` and keep these keys, each once even when many threads ask for it at the same time."""

        def fly(mine: list[bytes]) -> dict[bytes, Found]:
            ready = self.get(mine, device)  # another thread may have landed between our miss and our turn
            missing = [key for key in mine if key not in ready]
            if not missing:
                return ready
            before = self._forgets()
            entries = compute(missing)
            with self._gate:
                if self._forgets() == before:
                    kept = self.put(entries, device)
                else:
                    # A document was forgotten while we computed: it may be this one. Serve it, do not keep it.
                    kept = self.put([entry for entry in entries if not entry.ids], device)
                    aside = Memory(0)
                    kept |= {e.key: aside.put(e.key, e.factors, device=device) for e in entries if e.ids}
            return ready | {key: Found(resident, "built") for key, resident in kept.items()}

        return self._flights.run(keys, fly)

    def link(self, documents: Sequence[tuple[bytes, Sequence[str]]]) -> None:
        """Let documents own factors that are kept already, so that forgetting the document erases them."""
        links = [(key, [owner(name) for name in ids]) for key, ids in documents]
        links = [(key, owners) for key, owners in links if not self._memory.owned(key, owners)]
        for key, owners in links:
            self._memory.link(key, owners)
        for tier in self._tiers():
            if links and not tier.readonly:
                self._try(tier, "put", partial(tier.link, links), None)

    # ------------------------------------------------------------------ looking after it

    def forget(self, ids: Sequence[str]) -> int:
        """Erase everything that these documents own, from every tier; how many factors went.

        Returns only when every tier has looked that they are gone; a `StoreError` names the tier where they
        are not. Other processes on the same disk tier drop what they hold in memory at their next lookup.
        """
        if isinstance(ids, str):
            raise InvalidInput("give a list of document ids, not one string")
        owners = list(map(owner, ids))
        failed: dict[str, StoreError] = {}
        with self._gate:
            self._forgotten += 1
            gone = self._memory.forget(owners)
            for tier in self._tiers():
                try:
                    gone |= tier.owned_by(owners)
                except StoreError as error:
                    failed[tier.name] = error
            for tier in self._tiers():
                try:
                    tier.forget(owners, gone)
                except StoreError as error:
                    failed[tier.name] = error
            if self._tiers():
                self._memory.clear()  # it may hold rows whose owners only another process knew
        if failed:
            reasons = "; ".join(f"{name}: {error}" for name, error in failed.items())
            raise StoreError(f"the documents are not erased everywhere ({reasons}): forget them again")
        return len(gone)

    def verify(self) -> dict[str, dict[str, int]]:
        """Read every row of every tier; damaged ones are quarantined. Rows and damaged rows per tier."""
        report = {}
        for tier in self._tiers():
            counts = {"rows": 0, "damaged": 0, "taken_over": 0}
            if isinstance(tier, Disk) and not tier.readonly:
                counts["taken_over"] = tier.take_over()
            for row in tier.scan():
                counts["rows"] += 1
                counts["damaged"] += self._decode(tier, row) is None
            report[tier.name] = counts
        return report

    def prune(self, max_bytes: int) -> int:
        """Drop the factors used longest ago from the disk tier until it takes at most `max_bytes`."""
        return sum(tier.prune(max_bytes) for tier in self._tiers() if not tier.readonly)

    def export(self, target: Store) -> int:
        """Copy every healthy row of the first tier below memory into another store; how many were copied."""
        if not self._tiers() or not target._tiers():
            raise StoreError("only a store on disk or a remote one can be exported, and only to such a one")
        source = self._tiers()[0]
        healthy = (row for row in source.scan() if self._decode(source, row) is not None)
        count = 0
        for batch in chunks(healthy, _BATCH):
            for tier in target._tiers():
                tier.put(batch)
            count += len(batch)
        return count

    def info(self) -> dict[str, Any]:
        """What is kept where, as plain data."""
        return {"memory": self._memory.info()} | {tier.name: tier.info() for tier in self._tiers()}

    def close(self) -> None:
        """Let go of everything; what was put is on disk already."""
        self._memory.clear()
        for tier in self._tiers():
            tier.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ trouble

    def _tiers(self) -> list[Tier]:
        return [tier for tier in (self._disk, self._remote) if tier is not None]

    def _read_disk_forgets(self) -> int:
        if self._disk is not None:
            self._disk_forgets = self._try(self._disk, "get", self._disk.forgets, self._disk_forgets)
        return self._disk_forgets

    def _forgets(self) -> int:
        """A number that changes when anybody forgets anything, in this process or on the same disk."""
        return self._forgotten + self._read_disk_forgets()

    def _follow_forgets(self) -> int:
        """Drop what memory holds when another process forgot something: it may be among it."""
        now = self._read_disk_forgets()
        if now != self._followed:
            self._memory.clear()
            self._followed = now
        return self._forgotten + now

    def _try(self, tier: Tier, kind: str, call: Callable[[], T], otherwise: T) -> T:
        try:
            return call()
        except StoreError as error:
            doing = "read" if kind == "get" else "written"
            self._once.warn(f"{tier.name} {kind}", f"{tier.name} cannot be {doing}, factors are computed here: {error}")
            return otherwise

    def _keep(self, tier: Tier, rows: Sequence[Row]) -> None:
        if not tier.readonly:
            self._try(tier, "put", partial(tier.put, rows), None)

    def _decode(self, tier: Tier, row: Row) -> Factors | None:
        try:
            return decode(row.key, row.data)
        except FormatError as error:
            self._once.warn(
                f"{tier.name} damaged", f"a row on {tier.name} is damaged and will be computed again: {error}"
            )
            if not tier.readonly:
                self._try(tier, "put", partial(tier.quarantine, row.key, str(error)), None)
            return None
