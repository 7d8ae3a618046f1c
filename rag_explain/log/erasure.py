"""Erasing what must not be kept any longer: a record, or a document and all that was made from it."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from typing import Any

from rag_explain.errors import InvalidInput
from rag_explain.log.files import Folder
from rag_explain.log.record import head, seal

ERASED = "erased"


def erase(path: str | os.PathLike[str], *, records: Collection[str] = (), documents: Collection[str] = ()) -> int:
    """Remove records by id, and documents by id from every record. How many records were changed.

    A record is removed altogether. Of a document nothing remains in a record but that something was at this rank with
    this score; the answer goes too, since it was made from the document.
    """
    if isinstance(records, str) or isinstance(documents, str):
        raise InvalidInput("records and documents are collections of ids: give a list, even for one")
    if not records and not documents:
        raise InvalidInput("nothing to erase: give ids of records or of documents")
    unwanted, gone = frozenset(records), frozenset(documents)

    def change(line: bytes) -> bytes | None:
        data = head(line)
        if data["id"] in unwanted:
            return None
        return line if gone.isdisjoint(data["documents"]) else seal(_without(json.loads(line), gone))

    return Folder(path).rewrite(change)


def _without(data: dict[str, Any], documents: frozenset[str]) -> dict[str, Any]:
    hits = [_stub(hit) if hit["id"] in documents else hit for hit in data["hits"]]
    return {
        **data,
        "answer": None,
        "documents": [hit["id"] for hit in hits],
        "explained": sum(hit["explanation"] is not None for hit in hits),
        "hits": hits,
    }


def _stub(hit: dict[str, Any]) -> dict[str, Any]:
    kept = {name: hit[name] for name in ("rank", "score", "metric", "similarity", "gap")}
    nothing: dict[str, Any] = {"id": "", "hash": None, "text": None, "metadata": {}, "explanation": None}
    return {**kept, **nothing, "status": "skipped", "reason": ERASED}
