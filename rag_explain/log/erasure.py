"""Erasing what must not be kept any longer: a record, or a document and all that was made from it."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import replace

from rag_explain.errors import InvalidInput
from rag_explain.log.files import Folder
from rag_explain.log.record import MEASURED, LoggedHit, Record, counted, summary

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
        head = summary(line)
        if head.id in unwanted:
            return None
        if gone.isdisjoint(head.documents):
            return line
        record = Record.from_line(line)
        hits = [_emptied(hit) if hit.id in gone else hit for hit in record.logged_hits]
        return replace(record, answer=None, answer_hash=None, **counted(hits)).to_line()

    return Folder(path).rewrite(change)


def _emptied(hit: LoggedHit) -> LoggedHit:
    """Built anew from what may stay, so that a member that is added later is not kept by mistake."""
    return LoggedHit(id="", status="skipped", reason=ERASED, **{name: getattr(hit, name) for name in MEASURED})
