"""rag-explain doctor MODEL: whether a model can be explained, and what was measured of it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rag_explain.cli.output import working
from rag_explain.encoder.loading import DEFAULT_MODEL
from rag_explain.errors import InvalidInput, RagExplainError

if TYPE_CHECKING:
    from rag_explain.scorers.checks import Finding


def add(commands: Any) -> None:
    command = commands.add_parser("doctor", help="say what is supported of a model, and how well it adds up")
    command.add_argument(
        "model", nargs="?", default=DEFAULT_MODEL, help="name or folder of a sentence-transformers model"
    )
    command.add_argument("--device", default=None, help="where to compute, for example cpu or cuda")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the verdict and what it rests on; exit code 1 when something is not as it should be."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
    from transformers.utils import logging

    from rag_explain.devices import described, missing
    from rag_explain.explainer import Explainer
    from rag_explain.methods.checks import examine
    from rag_explain.scorers import resolve
    from rag_explain.scorers.checks import Finding

    logging.disable_progress_bar()
    reason = missing(arguments.device) if arguments.device else None
    if reason is not None:  # said before a model is fetched or loaded
        findings = [Finding(f"device {arguments.device}", reason, ok=False)]
    else:
        findings = [Finding("device", described(arguments.device))] if arguments.device else []
        try:
            with working("measuring"):
                findings += examine(scorer := resolve(arguments.model, arguments.device))
                if all(finding.ok for finding in findings):
                    Explainer(scorer).close()  # which refuses what it could not explain
        except InvalidInput:  # there is no such model
            raise
        except RagExplainError as error:
            findings.append(Finding("supported", str(error), ok=False))
    Console(highlight=False).print(Text(_verdict(str(arguments.model), findings)), soft_wrap=True)
    table = Table(show_header=False)
    for finding in findings:
        mark = Text("✓", style="green") if finding.ok else Text("✗", style="bold red")
        table.add_row(mark, finding.subject, Text(finding.seen))
    Console().print(table)
    return 0 if all(finding.ok for finding in findings) else 1


def _verdict(name: str, findings: Sequence[Finding]) -> str:
    """In one sentence: can it be explained, and if not, why not."""
    wrong = next((finding for finding in findings if not finding.ok), None)
    if wrong is not None:
        return f"No: {name} cannot be explained here. {wrong.subject}: {wrong.seen}."
    if any(finding.subject == "rows + rest = embedding" for finding in findings):
        return f"Yes: {name} can be explained exactly."
    return "".join(f"Yes: {name} can be explained. {one.seen}." for one in findings if one.subject == "supported")
