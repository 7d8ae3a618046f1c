"""What every tier below memory offers: rows of bytes under 32-byte keys, owned by documents.

Tiers know nothing of factors. What they hand out may be damaged; `Store` decodes it, and a row that does not
decode is reported back with `quarantine` and counts as a miss.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Row:
    """One document's factors as bytes, and the ids of the caller's documents that it belongs to."""

    key: bytes
    data: bytes
    ids: tuple[str, ...] = ()


class Tier(Protocol):
    """A place that keeps rows. Every method may raise `StoreError`; none is called while a lock is held."""

    name: str

    @property
    def readonly(self) -> bool:
        """Whether rows can only be read here."""

    def has(self, keys: Sequence[bytes]) -> set[bytes]:
        """Those of the keys that are kept, without reading their data."""

    def get(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """The rows that are kept under these keys."""

    def put(self, rows: Sequence[Row]) -> None:
        """Keep these rows: when this returns, they are safe."""

    def link(self, owners: Sequence[tuple[bytes, Sequence[str]]]) -> None:
        """Let documents own rows that are kept already."""

    def quarantine(self, key: bytes, reason: str) -> None:
        """Stop handing out a row that turned out to be damaged."""

    def forget(self, ids: Sequence[str]) -> set[bytes]:
        """Erase every row that one of these documents owns; the erased keys. Raises unless all are gone."""

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
