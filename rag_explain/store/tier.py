"""What every tier below memory offers: rows of bytes under 32-byte keys, owned by the caller's documents.

Tiers know nothing of factors. What they hand out may be damaged; `Store` decodes it, and a row that does not
decode is reported back with `quarantine` and counts as a miss.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

log = logging.getLogger(__name__)

OWNER_BYTES = 20


@dataclass(frozen=True, slots=True)
class Row:
    """One text's factors as bytes, and the documents that own them, as `owner` names them."""

    key: bytes
    data: bytes
    owners: tuple[bytes, ...] = ()


def owner(document: str) -> bytes:
    """The 20 bytes that stand for a document's id in every tier: ids may be long, and may be personal data."""
    return blake2b(
        document.encode("utf-8", "surrogatepass"), digest_size=OWNER_BYTES, person=b"rag_explain.doc"
    ).digest()


class Tier(Protocol):
    """A place that keeps rows. Every method may raise `StoreError`; none is called while a lock is held."""

    name: str

    @property
    def readonly(self) -> bool:
        """Whether rows can only be read here."""

    def has(self, keys: Sequence[bytes]) -> set[bytes]:
        """Those of the keys that are kept, without reading their data."""

    def get(self, keys: Sequence[bytes]) -> dict[bytes, Row]:
        """The rows that are kept under these keys, with their owners."""

    def put(self, rows: Sequence[Row]) -> None:
        """Keep these rows: when this returns, they are safe."""

    def link(self, links: Sequence[tuple[bytes, Sequence[bytes]]]) -> None:
        """Give rows that are kept already more owners."""

    def quarantine(self, key: bytes, reason: str) -> None:
        """Stop handing out a row that turned out to be damaged."""

    def owned_by(self, owners: Sequence[bytes]) -> set[bytes]:
        """The keys of the rows that one of these documents owns."""

    def forget(self, owners: Sequence[bytes], keys: Collection[bytes]) -> None:
        """Erase these rows, and these documents' ownership of anything. Returns only when all are seen to be gone."""

    def forgets(self) -> int:
        """A number that changes whenever anybody forgets anything."""

    def scan(self) -> Iterator[Row]:
        """Every row, for `verify` and `export`."""

    def prune(self, max_bytes: int) -> int:
        """Drop the rows that were used longest ago until at most `max_bytes` are taken; how many went."""

    def info(self) -> dict[str, Any]:
        """What there is, as plain data."""

    def close(self) -> None:
        """Let go of connections and files."""


class Once:
    """Warns about each kind of trouble once, then at debug level: a host searches many times a second."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._said: set[str] = set()

    def warn(self, kind: str, message: str) -> None:
        """Log `message` as a warning the first time that this kind of trouble happens."""
        with self._lock:
            first = kind not in self._said
            self._said.add(kind)
        log.log(logging.WARNING if first else logging.DEBUG, "%s", message)


def chunks(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """`items` in lists of at most `size`."""
    chunk: list[Any] = []
    for item in items:
        chunk.append(item)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
