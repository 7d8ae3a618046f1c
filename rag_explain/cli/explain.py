"""rag-explain explain QUERY DOCUMENT; and how every command that explains is told with which model and method."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rag_explain.cli.output import add_output_arguments, working, write
from rag_explain.encoder.loading import DEFAULT_MODEL
from rag_explain.errors import InvalidInput, in_words

if TYPE_CHECKING:
    from rag_explain.explainer import Explainer

_NAME = 200  # characters of a text that could be the name of a file
_MODEL = "name or folder of a sentence-transformers model, or openai-compatible:URL#model"


def add(commands: Any) -> None:
    command = commands.add_parser("explain", help="explain why a document matches a query")
    command.add_argument("query")
    command.add_argument("document", help="a text; @FILE for what is in a file, - for standard input")
    help = "print the sentences to read instead: where to look, not what carried the score"
    command.add_argument("--evidence", action="store_true", help=help)
    add_output_arguments(command, top=10)
    add_model_arguments(command)
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    with make_explainer(arguments) as explainer:
        # Where parts are left out, one unit is not made of another afterwards.
        unit = arguments.by if explainer.method.edits else None
        verb: Any = explainer.evidence if arguments.evidence else partial(explainer.explain, unit=unit)
        verb = explainer.what_if if arguments.what_if else verb
        document = _read(arguments.document)
        with working("explaining"):
            found = verb(arguments.query, document)
        write(found, arguments)


def _read(document: str) -> str:
    """The text that is meant. The name of a file is not: nobody wants that explained."""
    if document == "-":
        if sys.stdin is None:
            raise InvalidInput("standard input is closed: give the document as an argument")
        with in_words(InvalidInput, "standard input cannot be read", ": it must be UTF-8"):
            return sys.stdin.read()
    if document == "@":
        raise InvalidInput("@ takes the name of a file: @FILE")
    if document.startswith("@"):
        with in_words(InvalidInput, f"{document[1:]} cannot be read", ": it must be a text in UTF-8"):
            return Path(document[1:]).read_text(encoding="utf-8-sig")
    if len(document) < _NAME and Path(document).is_file():
        raise InvalidInput(f"{document} is a file: write @{document} to explain what is in it")
    return document


def add_model_arguments(command: argparse.ArgumentParser) -> None:
    """--model, --method, --layer, --label, --device, --store."""
    command.add_argument("--model", default=DEFAULT_MODEL, help=_MODEL)
    command.add_argument("--method", default=None, help="explanation method (default: the model's first)")
    command.add_argument("--layer", type=int, default=None, help="attribute to the input of this encoder block")
    command.add_argument("--label", default=None, help="of a cross-encoder with several labels, the one to explain")
    command.add_argument("--device", default=None, help="where to compute, for example cpu or cuda")
    command.add_argument("--store", default=None, help="folder in which documents' factors are kept")


def make_explainer(arguments: argparse.Namespace) -> Explainer:
    """The Explainer that the arguments ask for."""
    options = {name: getattr(arguments, name) for name in ("layer", "label", "device", "store")}
    return load_explainer(arguments.model, arguments.method, **options)


def load_explainer(model: str, method: str | None, **options: Any) -> Explainer:
    """An Explainer, loaded without progress bars."""
    from transformers.utils import logging

    from rag_explain.explainer import Explainer

    logging.disable_progress_bar()
    return Explainer(model, method, **options)
