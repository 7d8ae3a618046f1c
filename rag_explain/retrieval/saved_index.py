"""A FAISS index in a folder, with its documents and the model that they belong to. Nothing is pickled.

manifest.json     format, version, model, fingerprint, probes, whether queries are normalised, how many documents
documents.jsonl   one line per row: row, id, text, the span of the caller's text in it, metadata
index.faiss       FAISS's own file
calibration.json  what unrelated texts score, where that was measured
"""

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rag_explain.errors import FormatError, InvalidInput, first_line, in_words
from rag_explain.results.calibration import Calibration
from rag_explain.results.serialization import to_json, to_plain
from rag_explain.retrieval.search import RetrievedDocument
from rag_explain.texts.passage import Passage

_FORMAT, _VERSION = "rag_explain.faiss", 2
_INDEX, _DOCUMENTS, _MANIFEST = "index.faiss", "documents.jsonl", "manifest.json"
_CALIBRATION = "calibration.json"


def write_index(
    folder: Path,
    index: Any,
    rows: Mapping[int, RetrievedDocument],
    about: Mapping[str, Any],
    calibration: Calibration | None = None,
) -> None:
    """Write index, documents by row, and a manifest that says this about them, for their owner's eyes only.

    What was there is replaced once all is written; the manifest comes last, so that a folder that has one is whole.
    """
    import faiss

    with in_words(InvalidInput, f"the index cannot be written to {folder}", ": give a folder, or a path for a new one"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        manifest = {"format": _FORMAT, "version": _VERSION, **about, "documents": len(rows)}
        with TemporaryDirectory(prefix=".", dir=folder) as fresh:  # readable by its owner only
            with Path(fresh, _DOCUMENTS).open("w", encoding="utf-8") as file:
                file.writelines(f"{to_json(_to_dict(row, document))}\n" for row, document in rows.items())
            faiss.write_index(index, str(Path(fresh, _INDEX)))
            Path(fresh, _MANIFEST).write_text(to_json(manifest), encoding="utf-8")
            (folder / _CALIBRATION).unlink(missing_ok=True)  # of the index that was there
            if calibration is not None:
                calibration.save(Path(fresh, _CALIBRATION))
            for name in (_CALIBRATION,) * (calibration is not None) + (_DOCUMENTS, _INDEX, _MANIFEST):
                Path(fresh, name).chmod(0o600)
                Path(fresh, name).replace(folder / name)


def read_index(folder: Path, count: int) -> tuple[Any, dict[int, RetrievedDocument]]:
    """The index and the documents by row that `write_index` wrote, which must be `count`."""
    import faiss

    try:
        index = faiss.read_index(str(folder / _INDEX))
        with (folder / _DOCUMENTS).open(encoding="utf-8") as file:
            rows = dict(_from_dict(json.loads(line)) for line in file)
    except RuntimeError as error:  # FAISS names a line of its own source
        raise FormatError(f"the index in {folder} is damaged: FAISS cannot read {_INDEX}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FormatError(f"the index in {folder} is damaged: {first_line(error)}") from error
    if len(rows) != count:
        raise FormatError(f"the index in {folder} is damaged: {len(rows)} of {count} documents")
    return index, rows


def read_calibration(folder: Path) -> Calibration | None:
    """What was measured of the index; None where nothing was."""
    path = folder / _CALIBRATION
    return Calibration.load(path) if path.exists() else None


def read_manifest(folder: Path) -> dict[str, Any]:
    """What a saved index says of itself."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidInput(f"there is no index in {folder}: make one with  rag-explain index FILE") from None
    except PermissionError as error:
        raise InvalidInput(f"the index in {folder} may not be read by this user: {error.strerror}") from error
    except (OSError, ValueError) as error:
        raise FormatError(f"the index in {folder} is damaged: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT or manifest.get("version") != _VERSION:
        raise FormatError(f"{folder / _MANIFEST} was not written by this version: build the index again")
    if not manifest.keys() >= {"model", "fingerprint", "probes", "normalize", "documents"}:
        raise FormatError(f"the index in {folder} is damaged: its manifest is not whole")
    return manifest


def _to_dict(row: int, document: RetrievedDocument) -> dict[str, Any]:
    text, span = document.text, None
    if isinstance(text, Passage):
        span, text = [text.start, text.end], text.string
    return {"row": row, "id": document.id, "text": text, "span": span, "metadata": to_plain(document.metadata)}


def _from_dict(record: Mapping[str, Any]) -> tuple[int, RetrievedDocument]:
    text, span = record["text"], record.get("span")
    text = Passage(text, *span) if span else text
    return record["row"], RetrievedDocument(id=record["id"], text=text, metadata=record["metadata"])
