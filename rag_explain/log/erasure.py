"""Erasing what must not be kept any longer: a record, or a document and all that was made from it."""

import os
import re
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from rag_explain.errors import InvalidInput
from rag_explain.log.files import Folder
from rag_explain.log.record import MEASURED, LoggedHit, Record, counted, summary
from rag_explain.log.redaction import MASK, with_texts
from rag_explain.results.serialization import to_json

ERASED = "erased"
_NAME = re.compile(r"[!-~]{1,64}")  # what a user, a session or an application is called: no text, which has spaces


def erase(path: str | os.PathLike[str], *, records: Collection[str] = (), documents: Collection[str] = ()) -> int:
    """Remove records by id, and documents by id from every record. How many records were changed.

    A record is removed altogether. Of a document nothing remains in a record but that something was at this rank with
    this score; the answer goes too, since it was made from the document, and so does what the record's metadata may
    quote of it. A file that is damaged is not rewritten: an error says so when all others are done.
    """
    if isinstance(records, str) or isinstance(documents, str):
        raise InvalidInput("records and documents are collections of ids: give a list, even for one")
    if not records and not documents:
        raise InvalidInput("nothing to erase: give ids of records or of documents")
    unwanted, gone = frozenset(map(str, records)), frozenset(map(str, documents))

    def change(line: bytes) -> bytes | None:
        head = summary(line)
        if head.id in unwanted:
            return None
        return line if gone.isdisjoint(head.documents) else _without(Record.from_line(line), gone).to_line()

    return Folder(path).rewrite(change)


def _without(record: Record, gone: Collection[str]) -> Record:
    """Built anew from typed fields, so that a member that is added later is not kept by mistake."""
    erased = [hit for hit in record.logged_hits if hit.id in gone]
    hits = [_emptied(hit) if hit.id in gone else _unnamed(hit, gone) for hit in record.logged_hits]
    metadata = _unquoted(record.metadata, to_json([[hit.id, hit.text, hit.around, hit.metadata] for hit in erased]))
    return replace(record, answer=None, answer_hash=None, metadata=metadata, **counted(hits))


def _emptied(hit: LoggedHit) -> LoggedHit:
    return LoggedHit(id="", status="skipped", reason=ERASED, **{name: getattr(hit, name) for name in MEASURED})


def _unnamed(hit: LoggedHit, gone: Collection[str]) -> LoggedHit:
    """A hit whose stages name what is erased no more."""
    stages = tuple(replace(one, document=None) if one.document in gone else one for one in hit.stages)
    return replace(hit, stages=stages)


def _unquoted(metadata: Any, erased: str) -> Any:
    """Metadata in which only names stay that are no words of what is erased: by them the record is found again."""

    def kept(text: str) -> str:
        is_quoted = re.search(rf"(?<!\w){re.escape(text)}(?!\w)", erased) is not None
        return text if _NAME.fullmatch(text) and not is_quoted else MASK

    return with_texts(metadata, kept)
