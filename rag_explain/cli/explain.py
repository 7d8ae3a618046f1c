"""rag-explain explain QUERY DOCUMENT; and how every command that explains is told with which model and method."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any

from rag_explain.cli.output import add_output_arguments, write
from rag_explain.encoder.loading import DEFAULT_MODEL

if TYPE_CHECKING:
    from rag_explain.explainer import Explainer

_MODEL = "name or folder of a sentence-transformers model, or openai-compatible:URL#model"


def add(commands: Any) -> None:
    command = commands.add_parser("explain", help="explain why a document matches a query")
    command.add_argument("query")
    command.add_argument("document")
    help = "print the sentences to read instead: where to look, not what carried the score"
    command.add_argument("--evidence", action="store_true", help=help)
    add_output_arguments(command, top=10)
    add_model_arguments(command)
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    with make_explainer(arguments) as explainer:
        # Where parts are left out, one unit is not made of another afterwards.
        unit = arguments.by if explainer.method.edits else None
        verb = explainer.evidence if arguments.evidence else partial(explainer.explain, unit=unit)
        write(verb(arguments.query, arguments.document), arguments)


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
