"""rag-explain index FILE|DIR..."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rag_explain.cli.explain import add_model_arguments, make_explainer
from rag_explain.cli.output import working
from rag_explain.errors import InvalidInput

DEFAULT_FOLDER = Path(".rag-explain")
_SUFFIXES = (".txt", ".md", ".jsonl")
_TEXT_FIELDS = ("text", "page_content", "content", "body", "abstract")
_ID_FIELDS = ("id", "_id", "doc_id")


class Document(NamedTuple):
    """A whole text from a file, before it is cut into chunks."""

    name: str
    text: str
    metadata: dict[str, Any]


def add(commands: Any) -> None:
    command = commands.add_parser("index", help="make text files searchable")
    command.add_argument("paths", nargs="+", type=Path, metavar="FILE|DIR", help=f"{', '.join(_SUFFIXES)}")
    command.add_argument("--index", type=Path, default=DEFAULT_FOLDER, help="where to write (default %(default)s)")
    command.add_argument("--chunk", type=int, default=128, metavar="TOKENS", help="length of a chunk (default 128)")
    add_model_arguments(command)
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    from rich.console import Console

    from rag_explain.encoder.chunking import chunk_spans
    from rag_explain.faiss import FaissRetriever

    if arguments.index.exists() and not arguments.index.is_dir():  # known before anything is embedded
        raise InvalidInput(f"{arguments.index} is a file: give a folder, or a path for a new one, as --index")
    documents = [document for path in arguments.paths for document in read_documents(path)]
    with make_explainer(arguments) as explainer, working("embedding"):
        texts, ids, metadata = [], [], []
        for document in documents:
            for start, end in chunk_spans(document.text, explainer.scorer.reader, arguments.chunk):
                texts.append(document.text[start:end])
                ids.append(f"{document.name}:{start}-{end}")
                metadata.append({**document.metadata, "source": document.name, "start": start, "end": end})
        if not texts:
            raise InvalidInput("the files hold no text")
        retriever = FaissRetriever.from_texts(texts, explainer, ids=ids, metadata=metadata)
        folder = Path(arguments.model)
        retriever.save(arguments.index, model=str(folder.resolve()) if folder.is_dir() else None)
    told = f"{len(texts)} chunks of {len(documents)} documents are in {arguments.index}"
    Console(stderr=True).print(told, highlight=False)


def read_documents(path: Path) -> Iterator[Document]:
    """The documents of one file, or of all text files below a folder, in the order of their names."""
    if path.is_dir():
        files = (file for file in path.rglob("*") if file.suffix.lower() in _SUFFIXES and file.is_file())
        inside = (file.relative_to(path) for file in files)
        names = sorted(name for name in inside if not any(part.startswith(".") for part in name.parts))
        if not names:
            raise InvalidInput(f"there is no {', '.join(_SUFFIXES)} file in {path}")
        for name in names:
            yield from _read(path / name, str(name))
    elif path.suffix.lower() not in _SUFFIXES:
        raise InvalidInput(f"{path} is not a text file that can be read here: give {', '.join(_SUFFIXES)}")
    else:
        yield from _read(path, path.name)


def _read(file: Path, name: str) -> Iterator[Document]:
    try:
        content = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InvalidInput(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{file} is not UTF-8 at byte {error.start}: convert it first") from error
    if file.suffix.lower() == ".jsonl":
        for number, line in enumerate(content.split("\n"), 1):  # not splitlines: JSON may hold other line ends
            if line.strip():
                yield _parse(line, f"{name}:{number}")
    elif content.strip():
        yield Document(name, content, {})


def _parse(line: str, where: str) -> Document:
    """One line of JSON: a text, perhaps an id, and metadata."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{where} is not JSON: {error}") from error
    key = next((key for key in _TEXT_FIELDS if isinstance(record, dict) and key in record), None)
    if key is None:
        raise InvalidInput(f"{where} has no text: each line must be an object with one of {', '.join(_TEXT_FIELDS)}")
    text = record.pop(key)
    text = " ".join(text) if isinstance(text, list) and all(isinstance(part, str) for part in text) else text
    if not isinstance(text, str):
        raise InvalidInput(f"{where}: {key} must be a string, not {type(text).__name__}")
    name = next((str(record.pop(key)) for key in _ID_FIELDS if key in record), where)
    return Document(name, text, record)
