"""rag-explain demo: the main job, end to end, on the embedded defaults."""

from __future__ import annotations

import argparse
from typing import Any

from rag_explain.cli.model import add_model_arguments, make_explainer

_QUERY = "How do bees find their way home?"
_DOCUMENTS = (
    "Honeybees navigate back to the hive by the position of the sun and by landmarks they have learned.",
    "Our home insurance covers damage by insects, but not the loss of bees.",
    "The bakery on the corner is closed on Mondays.",
)


def add(commands: Any) -> None:
    """Register the command."""
    command = commands.add_parser("demo", help="see it work on a few sentences")
    add_model_arguments(command)
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Explain a query against three documents, best first."""
    from rich.console import Console

    with make_explainer(arguments) as explainer:
        explanations = explainer.explain_many(_QUERY, _DOCUMENTS)
    console = Console()
    for explanation in sorted(explanations, key=lambda item: -item.score):
        console.print(explanation)
    return 0
