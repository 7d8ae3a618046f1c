"""rag-explain explain QUERY DOCUMENT"""

from __future__ import annotations

import argparse
from typing import Any

from rag_explain.cli.model import add_model_arguments, make_explainer
from rag_explain.cli.output import add_output_arguments, write


def add(commands: Any) -> None:
    command = commands.add_parser("explain", help="explain why a document matches a query")
    command.add_argument("query")
    command.add_argument("document")
    add_output_arguments(command, top=10)
    add_model_arguments(command)
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    with make_explainer(arguments) as explainer:
        write(explainer.explain(arguments.query, arguments.document), arguments)
    return 0
