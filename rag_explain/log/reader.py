"""Reading a log: every record, one of them, or only what a listing needs."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import TypeVar

from rag_explain.errors import LogError
from rag_explain.log.files import Folder, LogFile
from rag_explain.log.record import Record, Summary, summary

T = TypeVar("T")
_LOGGER = logging.getLogger("rag_explain.log")
_ID_LENGTH = 32
_TIME_DIGITS = 12


def records(path: str | os.PathLike[str]) -> Iterator[Record]:
    """Every whole record of a log, in the order of writing. `path`: its folder, or one file of it.

    What cannot be read is left out, with one warning for each file.
    """
    return read(path, Record.from_line)


def summaries(path: str | os.PathLike[str]) -> Iterator[Summary]:
    """The same for a listing, several times as fast: only the head of each record is parsed."""
    return read(path, summary)


def find(path: str | os.PathLike[str], record_id: str) -> Record:
    """The record with this id, or with an id that begins so when it is the only one; "last" is the newest."""
    is_last = record_id == "last"
    lines = read(path, bytes, "" if is_last else record_id, newest_first=is_last)
    found = list(islice(lines, 1 if is_last or len(record_id) == _ID_LENGTH else None))
    if is_last and not found:
        raise LogError(f"the log {path} has no record")
    if not found:
        raise LogError(f"no record of the log {path} has an id that begins with {record_id!r}")
    if len(found) > 1:
        raise LogError(f"{len(found)} records of the log {path} have an id that begins with {record_id!r}: give more")
    return Record.from_line(found[0])


def read(
    path: str | os.PathLike[str],
    parse: Callable[[bytes], T],
    record_id: str = "",
    report: Callable[[LogFile], object] | None = None,
    *,
    newest_first: bool = False,
) -> Iterator[T]:
    """What `parse` makes of every whole record whose id begins with `record_id`, in the order of writing or against it.

    `report` takes each file that could not be read whole, once; without it the log warns.
    """
    key = f'"id":"{record_id}'.encode(errors="replace") if record_id else b""
    for file in Folder(path).files(_earliest(record_id), newest_first=newest_first):
        found = file.records(parse, key)
        yield from reversed(list(found)) if newest_first else found
        if file.problem and report is not None:
            report(file)
        elif file.problem:
            _LOGGER.warning("%s of the log %s was not read whole: %s", file.name, path, file.problem)


def _earliest(record_id: str) -> datetime | None:
    """When a record with this id was made, from the id itself: files sealed before that are not likely to hold it."""
    with suppress(ValueError, OverflowError, OSError):
        made = datetime.fromtimestamp(int(record_id[:_TIME_DIGITS], 16) / 1000, UTC)
        return made - timedelta(minutes=1) if len(record_id) == _ID_LENGTH else None  # machines' clocks differ
    return None
