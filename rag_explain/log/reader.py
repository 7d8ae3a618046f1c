"""Reading a log: every record, one of them, or only what a listing needs."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import islice

from rag_explain.errors import LogError
from rag_explain.log.files import Folder
from rag_explain.log.record import Record, Summary, summary, whole

_LOGGER = logging.getLogger("rag_explain.log")
_ID_LENGTH = 32
_TIME_DIGITS = 12
_HEAD_BYTES = 128  # format, version and id stand within these


def records(path: str | os.PathLike[str]) -> Iterator[Record]:
    """Every whole record of a log, in the order of writing. `path`: its folder, or one file of it."""
    return map(Record.from_line, _whole_lines(Folder(path)))


def summaries(path: str | os.PathLike[str]) -> Iterator[Summary]:
    """The same for a listing, several times as fast: only the head of each record is parsed."""
    return map(summary, _whole_lines(Folder(path)))


def find(path: str | os.PathLike[str], record_id: str) -> Record:
    """The record with this id, or with an id that begins so when it is the only one."""
    key = f'"id":"{record_id}'.encode()
    lines = (line for line in Folder(path).lines(_earliest(record_id)) if key in line[:_HEAD_BYTES] and whole(line))
    found = list(islice(lines, 1 if len(record_id) == _ID_LENGTH else None))
    if not found:
        raise LogError(f"no record of the log {path} has an id that begins with {record_id!r}")
    if len(found) > 1:
        raise LogError(f"{len(found)} records of the log {path} have an id that begins with {record_id!r}: give more")
    return Record.from_line(found[0])


def _earliest(record_id: str) -> datetime | None:
    """When a record with this id was made, from the id itself: files sealed before that cannot hold it."""
    with suppress(ValueError, OverflowError, OSError):
        made = datetime.fromtimestamp(int(record_id[:_TIME_DIGITS], 16) / 1000, UTC)
        return made - timedelta(minutes=1) if len(record_id) == _ID_LENGTH else None  # machines' clocks differ
    return None


def _whole_lines(folder: Folder) -> Iterator[bytes]:
    damaged = 0
    for line in folder.lines():
        if whole(line):
            yield line
        else:
            damaged += 1
    if damaged:
        _LOGGER.warning("%d damaged lines of the log %s were left out", damaged, folder.path)
