"""A FAISS index in a folder, with its documents and the model that they belong to. Nothing is pickled.

manifest.json     format, version, model, fingerprint, whether queries are normalised, how many documents
documents.jsonl   one line per row: row, id, text, the span of the caller's text in it, metadata
index.faiss       FAISS's own file
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rag_explain.errors import FormatError, InvalidInput
from rag_explain.results.serialization import to_json, to_plain
from rag_explain.texts.passage import Passage

_FORMAT, _VERSION = "rag_explain.faiss", 1
_INDEX, _DOCUMENTS, _MANIFEST = "index.faiss", "documents.jsonl", "manifest.json"


@dataclass(frozen=True)
class Row:
    """What is kept of one row of the index."""

    row: int
    id: str | None
    text: str | Passage | None
    metadata: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        record: dict[str, Any] = {"row": self.row, "id": self.id, "text": self.text}
        if isinstance(self.text, Passage):
            record |= {"text": self.text.string, "span": [self.text.start, self.text.end]}
        return record | {"metadata": to_plain(self.metadata)}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Row:
        """The inverse of `to_dict`."""
        text, span = record["text"], record.get("span")
        return cls(record["row"], record["id"], Passage(text, *span) if span else text, record["metadata"])


@dataclass
class SavedIndex:
    """What a folder holds: the index, and its rows by number."""

    index: Any
    documents: dict[int, str | Passage | None] = field(default_factory=dict)
    ids: dict[int, str] = field(default_factory=dict)
    metadata: dict[int, Mapping[str, Any]] = field(default_factory=dict)


def write_index(
    folder: Path, index: Any, rows: Sequence[Row], *, model: str, fingerprint: str, normalize: bool
) -> None:
    """Write index and rows; the manifest comes last, so that a folder that has one is whole."""
    import faiss

    folder.mkdir(parents=True, exist_ok=True)
    with _replacing(folder / _DOCUMENTS) as path, path.open("w", encoding="utf-8") as file:
        file.writelines(f"{to_json(row.to_dict())}\n" for row in rows)
    with _replacing(folder / _INDEX) as path:
        faiss.write_index(index, str(path))
    manifest = {
        "format": _FORMAT,
        "version": _VERSION,
        "model": model,
        "fingerprint": fingerprint,
        "normalize": normalize,
        "documents": len(rows),
    }
    with _replacing(folder / _MANIFEST) as path:
        path.write_text(to_json(manifest), encoding="utf-8")


def read_index(folder: Path, count: int) -> SavedIndex:
    """What `write_index` wrote, which must be `count` documents."""
    import faiss

    try:
        saved = SavedIndex(faiss.read_index(str(folder / _INDEX)))
        with (folder / _DOCUMENTS).open(encoding="utf-8") as file:
            for row in map(Row.from_dict, map(json.loads, file)):
                saved.documents[row.row] = row.text
                saved.metadata[row.row] = row.metadata
                if row.id is not None:
                    saved.ids[row.row] = row.id
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
        raise FormatError(f"the index in {folder} is damaged: {error}") from error
    if len(saved.documents) != count:
        raise FormatError(f"the index in {folder} is damaged: {len(saved.documents)} of {count} documents")
    return saved


def read_manifest(folder: Path) -> dict[str, Any]:
    """What a saved index says of itself."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidInput(f"there is no index in {folder}: make one with  rag-explain index FILE") from None
    except (OSError, ValueError) as error:
        raise FormatError(f"the index in {folder} is damaged: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT or manifest.get("version") != _VERSION:
        raise FormatError(f"{folder / _MANIFEST} was not written by this version: build the index again")
    return manifest


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A fresh file that takes the place of `path` only once it is whole."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield fresh
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
