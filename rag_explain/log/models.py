"""What the models behind a log computed when it was written: models.jsonl in its folder, one line per model.

A record names its model by a fingerprint. Months later, `verify` tells by these numbers whether the model at hand is
still that one, also where nothing that the fingerprint reads has changed. They hold nothing of a query or document.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from rag_explain.log.files import Folder
from rag_explain.probes import Probes
from rag_explain.results.serialization import to_json

_FILE = "models.jsonl"
_SAME = 1e-5  # of one machine, as a share of the numbers' size; sets that differ by more are each kept


def kept_models(path: str | os.PathLike[str]) -> dict[str, list[Probes]]:
    """The probes that were kept for each fingerprint. Lines that cannot be read are left out: they match no model."""
    found: dict[str, list[Probes]] = {}
    for fingerprint, probes in _lines(Path(path) / _FILE):
        found.setdefault(fingerprint, []).append(probes)
    return found


def keep_models(folder: Folder, models: Mapping[str, Probes]) -> None:
    """Add what the log does not have yet; on disk when this returns."""
    known = kept_models(folder.path)
    new = [
        to_json({"fingerprint": fingerprint, "probes": probes.to_dict()}).encode()
        for fingerprint, probes in models.items()
        if not any(one.distance(probes) <= _SAME for one in known.get(fingerprint, ()))
    ]
    if new:
        folder.append_to(_FILE, new)


def _lines(path: Path) -> Iterator[tuple[str, Probes]]:
    with suppress(FileNotFoundError, NotADirectoryError):
        for line in path.read_bytes().split(b"\n"):
            with suppress(ValueError, TypeError, LookupError):
                data = json.loads(line)
                yield str(data["fingerprint"]), Probes.from_dict(data["probes"])
