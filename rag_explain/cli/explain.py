"""rag-explain explain QUERY DOCUMENT"""

from __future__ import annotations

import argparse
from typing import Any

from rag_explain.cli.model import add_model_arguments, make_explainer


def add(commands: Any) -> None:
    """Register the command."""
    command = commands.add_parser("explain", help="explain why a document matches a query")
    command.add_argument("query")
    command.add_argument("document")
    command.add_argument("--json", action="store_true", help="print the explanation as JSON")
    add_model_arguments(command)
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Explain one pair and print it."""
    from rich.console import Console

    with make_explainer(arguments) as explainer:
        explanation = explainer.explain(arguments.query, arguments.document)
    if arguments.json:
        print(explanation.to_json())
    else:
        Console().print(explanation)
    return 0
