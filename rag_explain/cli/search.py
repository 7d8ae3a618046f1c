"""rag-explain search QUERY"""

import argparse
from pathlib import Path
from typing import Any

from rag_explain.cli.explain import add_model_arguments, make_explainer
from rag_explain.cli.index import DEFAULT_FOLDER
from rag_explain.cli.output import add_output_arguments, write


def add(commands: Any) -> None:
    command = commands.add_parser("search", help="search an index and say why each document was found")
    command.add_argument("query")
    command.add_argument("--index", type=Path, default=DEFAULT_FOLDER, help=f"the index (default {DEFAULT_FOLDER})")
    add_result_arguments(command)
    add_model_arguments(command)
    command.set_defaults(run=run, model=None)


def add_result_arguments(command: argparse.ArgumentParser) -> None:
    """-k, --explain, and how to show what was found."""
    command.add_argument("-k", type=int, default=3, help="how many documents (default 3)")
    command.add_argument("--explain", type=int, default=None, metavar="N", help="explain only the first N")
    add_output_arguments(command, top=3)


def run(arguments: argparse.Namespace) -> None:
    from rag_explain.faiss import FaissRetriever, read_manifest

    arguments.model = arguments.model or read_manifest(arguments.index)["model"]
    with make_explainer(arguments) as explainer:
        retriever = FaissRetriever.load(arguments.index, explainer, unit=arguments.by)
        write(retriever.search(arguments.query, arguments.k, top=arguments.explain), arguments)
