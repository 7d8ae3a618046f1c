"""rag-explain doctor MODEL: what can be explained of a model, measured."""

import argparse
from typing import Any

from rag_explain.encoder.loading import DEFAULT_MODEL, load
from rag_explain.errors import RagExplainError


def add(commands: Any) -> None:
    command = commands.add_parser("doctor", help="say what is supported of a model, and how well it adds up")
    command.add_argument(
        "model", nargs="?", default=DEFAULT_MODEL, help="name or folder of a sentence-transformers model"
    )
    command.add_argument("--device", default=None, help="where to compute, for example cpu or cuda")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; exit code 1 when one of them is not as it should be."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
    from transformers.utils import logging

    from rag_explain.devices import described, missing
    from rag_explain.methods.checks import examine
    from rag_explain.scorers import resolve
    from rag_explain.scorers.checks import Finding

    logging.disable_progress_bar()
    reason = missing(arguments.device) if arguments.device else None
    if reason is not None:  # said before a model is fetched or loaded
        findings = [Finding(f"device {arguments.device}", reason, ok=False)]
    else:
        model, _ = load(arguments.model, arguments.device)
        findings = [Finding("device", described(arguments.device))] if arguments.device else []
        try:
            findings += examine(resolve(model, arguments.device))
        except RagExplainError as error:
            findings.append(Finding("supported", str(error), ok=False))
    table = Table(title=str(arguments.model), show_header=False, title_justify="left")
    for finding in findings:
        mark = Text("✓", style="green") if finding.ok else Text("✗", style="bold red")
        table.add_row(mark, finding.subject, Text(finding.seen))
    Console().print(table)
    return 0 if all(finding.ok for finding in findings) else 1
