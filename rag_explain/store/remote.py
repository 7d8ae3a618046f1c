"""The remote tier: one object per row in a bucket, shared by machines.

`Objects` is all that a remote place must offer; `Bucket` is S3, Google Cloud Storage, Azure or a folder
through obstore. A place that is down or slow costs one timeout, then it is left alone for a while: the caller
computes.

    factors/<key>               the row
    documents/<id hash>/<key>   an empty mark: this document owns that row
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any, Protocol, TypeVar

from rag_explain.errors import MissingExtra, StoreError
from rag_explain.store.codec import MAX_BYTES
from rag_explain.store.tier import Row

T = TypeVar("T")

log = logging.getLogger(__name__)

_ROWS = "factors/"
_MARKS = "documents/"


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

    def get(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """The rows that are kept under these keys."""
        names = {_ROWS + key.hex(): key for key in keys}
        found = self._optional(lambda: dict(self._objects.get(list(names))), self._timeout)
        return {names[name]: data for name, data in found.items()}

    def put(self, rows: Sequence[Row]) -> None:
        """Write the rows; first the marks, so that no row is ever there that cannot be forgotten."""
        marks = {_mark(name, row.key): b"" for row in rows for name in row.ids}
        data = {_ROWS + row.key.hex(): row.data for row in rows}

        def write() -> None:
            if marks:
                self._objects.put(marks)
            self._objects.put(data)

        self._optional(write, self._patience)

    def link(self, owners: Sequence[tuple[bytes, Sequence[str]]]) -> None:
        """Let documents own rows."""
        marks = {_mark(name, key) for key, names in owners for name in names}

        def write() -> None:
            known = self._objects.get(list(marks))
            self._objects.put({mark: b"" for mark in marks if mark not in known})

        if marks:
            self._optional(write, self._patience)

    def quarantine(self, key: bytes, reason: str) -> None:
        """Delete a damaged object: the next build writes it again."""
        self._optional(lambda: self._objects.delete([_ROWS + key.hex()]), self._patience)

    def forget(self, ids: Sequence[str]) -> set[bytes]:
        """Erase the rows of these documents and look that they are gone."""

        def erase() -> set[bytes]:
            marks = [name for document in ids for name in self._objects.names(_owner(document))]
            gone = {bytes.fromhex(name.rpartition("/")[2]) for name in marks}
            rows = [_ROWS + key.hex() for key in gone]
            self._objects.delete(rows)
            if self._objects.get(rows):
                raise StoreError("objects were still there after they were deleted")
            self._objects.delete(marks)  # last: as long as a mark is there, forgetting can be tried again
            return gone

        self._forgets += 1
        return self._within(erase, self._patience)

    def forgets(self) -> int:
        """How often this process has forgotten anything: a bucket does not tell of others."""
        return self._forgets

    def scan(self) -> Iterator[Row]:
        """Every row, one by one, without its documents: the marks cannot be read backwards."""
        for name in self._within(lambda: list(self._objects.names(_ROWS)), self._patience):
            found = self._within(partial(self._objects.get, [name]), self._patience)
            yield Row(bytes.fromhex(name.removeprefix(_ROWS)), found.get(name, b""))

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


def _owner(document: str) -> str:
    """Where a document's marks are. Hashed: ids may hold anything, and object names are no secret."""
    digest = blake2b(document.encode("utf-8", "surrogatepass"), digest_size=20, person=b"rag_explain.doc")
    return f"{_MARKS}{digest.hexdigest()}/"


def _mark(document: str, key: bytes) -> str:
    return _owner(document) + key.hex()
