"""The remote tier: one object per row in a bucket, shared by machines.

`Objects` is all that a remote place must offer; `Bucket` is S3, Google Cloud Storage, Azure or a folder
through obstore. A place that is down or slow costs one timeout, then it is left alone for a while: the caller
computes.

    factors/<key>              "RXO1", how many owners, the owners, the row
    documents/<owner>/<key>    an empty mark: this document owns that row
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

from rag_explain.errors import MissingExtra, StoreError
from rag_explain.store.codec import MAX_BYTES
from rag_explain.store.tier import OWNER_BYTES, Row

T = TypeVar("T")

log = logging.getLogger(__name__)

_ROWS = "factors/"
_MARKS = "documents/"
_MAGIC = b"RXO1"


class Objects(Protocol):
    """Named bytes somewhere else. Any exception means that the place is down."""

    def get(self, names: Sequence[str]) -> Mapping[str, bytes]:
        """Those that exist; one that is larger than a row may be counts as missing."""

    def put(self, items: Mapping[str, bytes]) -> None:
        """Write all, replacing what is there."""

    def delete(self, names: Sequence[str]) -> None:
        """Remove those that exist."""

    def names(self, prefix: str) -> Iterable[str]:
        """The names that begin with `prefix`, which ends with a slash."""


class Bucket:
    """`Objects` in a bucket or a folder: s3://, gs://, az://, file://, memory://. Needs the extra `remote`.

    Args:
        url: the bucket and a prefix in it. Credentials come from the environment, as obstore documents.
        options: passed on to `obstore.store.from_url`.
    """

    def __init__(self, url: str, **options: Any) -> None:
        try:
            import obstore
            from obstore.store import from_url
        except ImportError as error:
            raise MissingExtra("obstore", "remote") from error
        if url.startswith("file://"):
            options.setdefault("mkdir", True)
        self._obstore = obstore
        self._store = from_url(url, **options)

    def get(self, names: Sequence[str]) -> dict[str, bytes]:
        """Those that exist, fetched together."""
        import asyncio

        async def one(name: str) -> bytes | None:
            try:
                result = await self._obstore.get_async(self._store, name)
            except FileNotFoundError:
                return None
            return bytes(await result.bytes_async()) if result.meta["size"] <= MAX_BYTES else None

        async def all_of_them() -> list[bytes | None]:
            return await asyncio.gather(*map(one, names))

        found = asyncio.run(all_of_them())
        return {name: data for name, data in zip(names, found, strict=True) if data is not None}

    def put(self, items: Mapping[str, bytes]) -> None:
        """Write all, sent together."""
        import asyncio

        async def all_of_them() -> None:
            await asyncio.gather(*(self._obstore.put_async(self._store, name, data) for name, data in items.items()))

        asyncio.run(all_of_them())

    def delete(self, names: Sequence[str]) -> None:
        """Remove those that exist."""
        for name in names:
            try:
                self._obstore.delete(self._store, name)
            except FileNotFoundError:
                log.debug("%s was gone already", name)

    def names(self, prefix: str) -> Iterator[str]:
        """The names that begin with `prefix`."""
        for page in self._obstore.list(self._store, prefix=prefix):
            for item in page:
                yield item["path"]


class Remote:
    """A tier over `Objects`: every call has a deadline, and after a failure the place is not asked for a
    while.

    Args:
        timeout: seconds that a lookup may take before the document is computed here instead.
        patience: seconds that a write, an erasure or a listing may take.
        pause: seconds during which a place that failed is not asked again.
    """

    name = "remote"
    readonly = False

    def __init__(self, objects: Objects, *, timeout: float = 2.0, patience: float = 60.0, pause: float = 60.0) -> None:
        self._objects = objects
        self._timeout = timeout
        self._patience = patience
        self._pause = pause
        self._resume = 0.0
        self._forgets = 0

    def has(self, keys: Sequence[bytes]) -> set[bytes]:
        """Those of the keys that are kept. They are fetched: a bucket answers that as fast as a question."""
        return set(self.get(keys))

    def get(self, keys: Sequence[bytes]) -> dict[bytes, Row]:
        """The rows that are kept under these keys, with their owners."""
        names = {_ROWS + key.hex(): key for key in keys}
        found = self._optional(lambda: dict(self._objects.get(list(names))), self._timeout)
        return {names[name]: _unwrap(names[name], data) for name, data in found.items()}

    def put(self, rows: Sequence[Row]) -> None:
        """Write the rows; first the marks, so that no row is ever there that cannot be forgotten."""
        marks = {_mark(owner, row.key): b"" for row in rows for owner in row.owners}
        data = {_ROWS + row.key.hex(): _wrap(row) for row in rows}

        def write() -> None:
            if marks:
                self._objects.put(marks)
            self._objects.put(data)

        self._optional(write, self._patience)

    def link(self, links: Sequence[tuple[bytes, Sequence[bytes]]]) -> None:
        """Give rows that are kept already more owners: new marks, and the rows written again with all of theirs."""
        rows = self.get([key for key, _ in links])
        changed = [
            replace(rows[key], owners=tuple(dict.fromkeys((*rows[key].owners, *owners))))
            for key, owners in links
            if key in rows and not set(owners).issubset(rows[key].owners)
        ]
        if changed:
            self.put(changed)

    def quarantine(self, key: bytes, reason: str) -> None:
        """Delete a damaged object: the next build writes it again."""
        self._optional(lambda: self._objects.delete([_ROWS + key.hex()]), self._patience)

    def owned_by(self, owners: Sequence[bytes]) -> set[bytes]:
        """The keys of the rows that one of these documents owns."""
        marks = self._within(lambda: self._marks(owners), self._patience)
        return {bytes.fromhex(name.rpartition("/")[2]) for name in marks}

    def forget(self, owners: Sequence[bytes], keys: Collection[bytes]) -> None:
        """Erase these rows and look that they are gone."""
        rows = [_ROWS + key.hex() for key in keys]

        def erase() -> None:
            self._objects.delete(rows)
            if self._objects.get(rows):
                raise StoreError("objects were still there after they were deleted")
            self._objects.delete(self._marks(owners))  # last: with its marks, a row that is left can be found again

        self._forgets += 1
        self._within(erase, self._patience)

    def _marks(self, owners: Sequence[bytes]) -> list[str]:
        return [name for owner in owners for name in self._objects.names(f"{_MARKS}{owner.hex()}/")]

    def forgets(self) -> int:
        """How often this process has forgotten anything: a bucket does not tell of others."""
        return self._forgets

    def scan(self) -> Iterator[Row]:
        """Every row with its owners, one by one."""
        for name in self._within(lambda: list(self._objects.names(_ROWS)), self._patience):
            key = bytes.fromhex(name.removeprefix(_ROWS))
            found = self._within(partial(self._objects.get, [name]), self._patience)
            yield _unwrap(key, found.get(name, b""))

    def prune(self, max_bytes: int) -> int:
        """Nothing: a bucket's own lifecycle rules decide what goes."""
        return 0

    def info(self) -> dict[str, Any]:
        """What there is, as plain data."""
        rows = self._within(lambda: sum(1 for _ in self._objects.names(_ROWS)), self._patience)
        return {"objects": type(self._objects).__name__, "rows": rows}

    def close(self) -> None:
        """Nothing is kept open."""

    # ------------------------------------------------------------------ deadlines

    def _optional(self, call: Callable[[], T], seconds: float) -> T:
        """`call`, unless the place failed a moment ago."""
        if time.monotonic() < self._resume:
            raise StoreError("the remote store failed a moment ago and is left alone for now")
        return self._within(call, seconds)

    def _within(self, call: Callable[[], T], seconds: float) -> T:
        """`call` in a thread that is given up after `seconds`: a place that hangs must not hang the host."""
        outcome: dict[str, Any] = {}
        done = threading.Event()

        def run() -> None:
            try:
                outcome["value"] = call()
            except Exception as error:
                outcome["error"] = error
            done.set()

        threading.Thread(target=run, name="rag_explain.remote", daemon=True).start()
        if not done.wait(seconds):
            outcome["error"] = TimeoutError(f"no answer within {seconds:g} s")
        if "error" in outcome:
            self._resume = time.monotonic() + self._pause
            reason = str(outcome["error"]).partition("\n")[0] or type(outcome["error"]).__name__
            raise StoreError(f"the remote store failed: {reason}") from outcome["error"]
        self._resume = 0.0
        result: T = outcome["value"]
        return result


def _wrap(row: Row) -> bytes:
    return b"".join((_MAGIC, len(row.owners).to_bytes(4, "little"), *row.owners, row.data))


def _unwrap(key: bytes, data: bytes) -> Row:
    """The row and its owners; data that does not look like that is handed on, to be found damaged."""
    start = len(_MAGIC) + 4
    count = int.from_bytes(data[len(_MAGIC) : start], "little")
    end = start + count * OWNER_BYTES
    if data[: len(_MAGIC)] != _MAGIC or end > len(data):
        return Row(key, b"")
    return Row(key, data[end:], tuple(data[at : at + OWNER_BYTES] for at in range(start, end, OWNER_BYTES)))


def _mark(owner: bytes, key: bytes) -> str:
    return f"{_MARKS}{owner.hex()}/{key.hex()}"
