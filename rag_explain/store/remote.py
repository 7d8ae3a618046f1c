"""The remote tier: one object per row in a bucket, shared by machines.

`Objects` is what a remote place must offer; `Bucket` is S3, Google Cloud Storage, Azure or a folder through obstore. A
place that is down or slow costs one timeout; then it is not asked for a while, and factors are computed instead.

    factors/<key>              "RXO1", how many owners, the owners, the row
    documents/<owner>/<key>    an empty mark: this document owns that row
    models/<fingerprint>/<name>    what a model computes for the probes
"""

import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit
from urllib.request import url2pathname

from rag_explain.errors import StoreError, import_extra, in_words
from rag_explain.store.codec import MAX_BYTES
from rag_explain.store.tier import OWNER_BYTES, Row, Tier

T = TypeVar("T")

_ROWS = "factors/"
_MARKS = "documents/"
_MODELS = "models/"
_MAGIC = b"RXO1"
_PAUSE = 60.0  # seconds during which a place that failed is not asked again


class Objects(Protocol):
    """Named bytes somewhere else. Any exception means that the place is down.

    A place that can tell which objects exist without sending them should also offer `has(names)`, which returns a set
    of those names; without it they are fetched.
    """

    def get(self, names: Sequence[str]) -> Mapping[str, bytes]:
        """Those that exist; one that is larger than a row may be counts as missing."""

    def put(self, items: Mapping[str, bytes]) -> None:
        """Write all, replacing what is there."""

    def delete(self, names: Sequence[str]) -> None:
        """Remove those that exist."""

    def names(self, prefix: str) -> Iterable[str]:
        """The names that begin with `prefix`, which ends with a slash."""


class Bucket(Objects):
    """`Objects` in a bucket or a folder, and a prefix in it: s3://, gs://, az://, file://, memory://. Extra: `remote`.

    Credentials come from the environment, or as options of `obstore.store.from_url`. A folder is made for its owner
    only, where there is none; without `make` it is refused.
    """

    def __init__(self, url: str, *, make: bool = True, **options: Any) -> None:
        self._obstore = import_extra("obstore", "obstore", "remote")
        stores = import_extra("obstore.store", "obstore", "remote")
        with in_words(StoreError, f"the remote store {url!r} cannot be opened", ": give s3://, gs://, az://, file://"):
            folder = Path(url2pathname(urlsplit(url).path)) if url.startswith("file://") else None
            if folder is not None and make:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            elif folder is not None and not folder.is_dir():
                raise StoreError(f"there is no store at {url}")
            self._store = stores.from_url(url, **options)

    def has(self, names: Sequence[str]) -> set[str]:
        """Those that exist, by their heads alone."""

        async def one(name: str) -> bool:
            try:
                await self._obstore.head_async(self._store, name)
            except FileNotFoundError:
                return False
            return True

        return {name for name, exists in zip(names, _together(map(one, names)), strict=True) if exists}

    def get(self, names: Sequence[str]) -> dict[str, bytes]:
        async def one(name: str) -> bytes | None:
            try:
                result = await self._obstore.get_async(self._store, name)
            except FileNotFoundError:
                return None
            return bytes(await result.bytes_async()) if result.meta["size"] <= MAX_BYTES else None

        found = zip(names, _together(map(one, names)), strict=True)
        return {name: data for name, data in found if data is not None}

    def put(self, items: Mapping[str, bytes]) -> None:
        _together(self._obstore.put_async(self._store, name, data) for name, data in items.items())

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                self._obstore.delete(self._store, name)

    def names(self, prefix: str) -> Iterator[str]:
        return (item["path"] for page in self._obstore.list(self._store, prefix=prefix) for item in page)


def _together(calls: Iterable[Awaitable[T]]) -> list[T]:
    """What all of these calls return; they are made and run at the same time, inside one event loop."""
    import asyncio

    async def gathered() -> list[T]:
        return await asyncio.gather(*calls)

    return asyncio.run(gathered())


@dataclass(eq=False)
class Remote(Tier):
    """A tier over `Objects`: every call has a deadline, and after a failure the place is not asked for a while."""

    objects: Objects
    _: KW_ONLY
    timeout: float = 2.0  # seconds that a lookup may take before the document is computed here instead
    patience: float = 60.0  # seconds that a write, an erasure or a listing may take
    readonly: bool = False  # never write or delete an object
    name = "remote"
    _resume = 0.0  # when the place may be asked again

    def has(self, keys: Sequence[bytes]) -> set[bytes]:
        names = {_ROWS + key.hex(): key for key in keys}
        return {names[name] for name in self._ask(lambda: self._existing(list(names)), seconds=self.timeout)}

    def get(self, keys: Sequence[bytes]) -> dict[bytes, Row]:
        names = {_ROWS + key.hex(): key for key in keys}
        found = self._ask(lambda: dict(self.objects.get(list(names))), seconds=self.timeout)
        return {names[name]: _unwrap(names[name], data) for name, data in found.items()}

    def put(self, rows: Sequence[Row]) -> None:
        """Write the rows; first the marks, so that no row is ever there that cannot be forgotten."""
        marks = {f"{_MARKS}{owner.hex()}/{row.key.hex()}": b"" for row in rows for owner in row.owners}
        data = {
            _ROWS + row.key.hex(): b"".join((_MAGIC, len(row.owners).to_bytes(4, "little"), *row.owners, row.data))
            for row in rows
        }

        def write() -> None:
            if marks:
                self.objects.put(marks)
            self.objects.put(data)

        self._ask(write)

    def link(self, links: Sequence[tuple[bytes, Sequence[bytes]]]) -> None:
        """Write new marks, and the rows again with all of their owners."""
        rows = self.get([key for key, _ in links])
        changed = [
            replace(rows[key], owners=tuple(dict.fromkeys((*rows[key].owners, *owners))))
            for key, owners in links
            if key in rows and not set(owners).issubset(rows[key].owners)
        ]
        if changed:
            self.put(changed)

    def delete(self, key: bytes) -> None:
        self._ask(lambda: self.objects.delete([_ROWS + key.hex()]))

    def owned_by(self, owners: Sequence[bytes]) -> set[bytes]:
        marks = self._ask(lambda: self._marks(owners), insist=True)
        return {bytes.fromhex(name.rpartition("/")[2]) for name in marks}

    def forget(self, owners: Sequence[bytes], keys: Collection[bytes]) -> None:
        if self.readonly:
            raise StoreError("the remote store was opened only to be read")
        rows = [_ROWS + key.hex() for key in keys]

        def erase() -> None:
            self.objects.delete(rows)
            if self._existing(rows):
                raise StoreError("objects were still there after they were deleted")
            self.objects.delete(self._marks(owners))  # last: with its marks, a row that is left can be found again

        self._ask(erase, insist=True)

    def _marks(self, owners: Sequence[bytes]) -> list[str]:
        return [name for owner in owners for name in self.objects.names(f"{_MARKS}{owner.hex()}/")]

    def _existing(self, names: Sequence[str]) -> set[str]:
        has: Callable[[Sequence[str]], Iterable[str]] = getattr(self.objects, "has", self.objects.get)
        return set(has(names))

    def probes(self, fingerprint: str) -> list[bytes]:
        def read() -> list[bytes]:
            return list(self.objects.get(list(self.objects.names(f"{_MODELS}{fingerprint}/"))).values())

        return self._ask(read, seconds=self.timeout)

    def add_probes(self, fingerprint: str, name: str, data: bytes) -> None:
        self._ask(lambda: self.objects.put({f"{_MODELS}{fingerprint}/{name}": data}))

    def scan(self) -> Iterator[Row]:
        for name in self._ask(lambda: list(self.objects.names(_ROWS)), insist=True):
            found = self._ask(partial(self.objects.get, [name]), insist=True)
            yield _unwrap(bytes.fromhex(name.removeprefix(_ROWS)), found.get(name, b""))

    def info(self) -> dict[str, Any]:
        rows = self._ask(lambda: sum(1 for _ in self.objects.names(_ROWS)), insist=True)
        return {"objects": type(self.objects).__name__, "rows": rows}

    def _ask(self, call: Callable[[], T], *, seconds: float | None = None, insist: bool = False) -> T:
        """`call` in a thread that is given up after `seconds`: a place that hangs must not hang the host.

        A place that failed a moment ago is not asked again, unless `insist`.
        """
        if time.monotonic() < self._resume and not insist:
            raise StoreError("the remote store failed a moment ago and is left alone for now")
        seconds = self.patience if seconds is None else seconds
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)

        # Not a pool's thread, which the interpreter would wait for at its end.
        threading.Thread(target=run, name="rag_explain.remote", daemon=True).start()
        try:
            answer = future.result(seconds)
        except Exception as error:
            self._resume = time.monotonic() + _PAUSE
            reason = str(error).partition("\n")[0] if future.done() else f"no answer within {seconds:g} s"
            raise StoreError(f"the remote store failed: {reason or type(error).__name__}") from error
        self._resume = 0.0
        return answer


def _unwrap(key: bytes, data: bytes) -> Row:
    """The row and its owners; data that does not look like that is handed on, to be found damaged."""
    start = len(_MAGIC) + 4
    count = int.from_bytes(data[len(_MAGIC) : start], "little")
    end = start + count * OWNER_BYTES
    if data[: len(_MAGIC)] != _MAGIC or end > len(data):
        return Row(key, b"")
    return Row(key, data[end:], tuple(data[at : at + OWNER_BYTES] for at in range(start, end, OWNER_BYTES)))
