"""rag-explain search QUERY"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rag_explain.cli.index import DEFAULT_FOLDER
from rag_explain.cli.model import add_model_arguments, make_explainer
from rag_explain.plain import to_json

if TYPE_CHECKING:
    from rag_explain.types import Hits


def add(commands: Any) -> None:
    """Register the command."""
    command = commands.add_parser("search", help="search an index and say why each document was found")
    command.add_argument("query")
    command.add_argument("--index", type=Path, default=DEFAULT_FOLDER, help=f"the index (default {DEFAULT_FOLDER})")
    add_result_arguments(command)
    add_model_arguments(command)
    command.set_defaults(run=run, model=None)


def add_result_arguments(command: argparse.ArgumentParser) -> None:
    """-k, --explain, --json, --html"""
    command.add_argument("-k", type=int, default=3, help="how many documents (default 3)")
    command.add_argument("--explain", type=int, default=None, metavar="N", help="explain only the first N")
    command.add_argument("--json", action="store_true", help="print the hits as JSON lines")
    command.add_argument("--html", type=Path, default=None, metavar="PATH", help="also write a page")


def run(arguments: argparse.Namespace) -> int:
    """Search, explain, print."""
    from rag_explain.faiss import FaissRetriever, read_manifest

    arguments.model = arguments.model or read_manifest(arguments.index)["model"]
    with make_explainer(arguments) as explainer:
        retriever = FaissRetriever.load(arguments.index, explainer)
        hits = retriever.search(arguments.query, arguments.k, True if arguments.explain is None else arguments.explain)
        show(hits, arguments)
    return 0


def show(hits: Hits, arguments: argparse.Namespace) -> None:
    """Print the hits the way the arguments ask for."""
    from rich.console import Console

    if arguments.json:
        for hit in hits:
            _ = hit.explanation  # `to_dict` never computes
            print(to_json(hit.to_dict()))
    else:
        Console().print(hits)
    if arguments.html is not None:
        hits.to_html(arguments.html)
