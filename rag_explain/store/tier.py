"""What every tier below memory offers: rows of bytes under 32-byte keys, and the documents that own each row.

A tier does not know what the bytes mean. `Store` decodes them; a row that does not decode is deleted and built again.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Any, Protocol, TypeVar

from rag_explain.texts.passage import check_id

T = TypeVar("T")

OWNER_BYTES = 20


@dataclass(frozen=True, slots=True)
class Row:
    """One text's factors as bytes, and the documents that own them, as `owner` names them."""

    key: bytes
    data: bytes
    owners: tuple[bytes, ...] = ()


def owner(document: str) -> bytes:
    """The 20 bytes that stand for a document's id in every tier: ids may be long, and may be personal data."""
    check_id(document)
    name = document.encode("utf-8", "surrogatepass")
    return blake2b(name, digest_size=OWNER_BYTES, person=b"rag_explain.doc").digest()


class Tier(Protocol):
    """A place that keeps rows. Every method may raise `StoreError`."""

    name: str
    readonly: bool  # rows can only be read here

    def has(self, keys: Sequence[bytes]) -> set[bytes]:
        """Those of the keys that are kept, without reading their data."""

    def get(self, keys: Sequence[bytes]) -> dict[bytes, Row]:
        """The rows that are kept under these keys, with their owners."""

    def put(self, rows: Sequence[Row]) -> None:
        """Keep these rows: when this returns, they are safe."""

    def link(self, links: Sequence[tuple[bytes, Sequence[bytes]]]) -> None:
        """Give rows that are kept already more owners."""

    def delete(self, key: bytes) -> None:
        """Delete a damaged row. Its owners stay known, so that it can be forgotten once it was computed again."""

    def owned_by(self, owners: Sequence[bytes]) -> set[bytes]:
        """The keys of the rows that one of these documents owns."""

    def forget(self, owners: Sequence[bytes], keys: Collection[bytes]) -> None:
        """Erase these rows, and these documents' ownership of anything; returns after a look that all are gone."""

    def probes(self, fingerprint: str) -> list[bytes]:
        """What models of this fingerprint were seen to compute, each set as `add_probes` was given it."""

    def add_probes(self, fingerprint: str, name: str, data: bytes) -> None:
        """Keep one set more, under a name of its own."""

    def scan(self) -> Iterator[Row]:
        """Every row, for `verify` and `export`; one that cannot be read comes without data."""

    def info(self) -> dict[str, Any]:
        """What there is, as plain data."""


def chunks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """`items` in lists of at most `size`."""
    rest = iter(items)
    while chunk := list(islice(rest, size)):
        yield chunk
