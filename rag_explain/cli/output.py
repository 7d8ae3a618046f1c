"""How a command shows what it found: in the terminal, as JSON, or as a page. Shared by the commands that explain."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from rag_explain.errors import InvalidInput

if TYPE_CHECKING:
    from rag_explain.results.explanation import Explanation
    from rag_explain.results.hits import Hit, Hits
    from rag_explain.texts.tokens import Unit


def add_output_arguments(command: argparse.ArgumentParser, *, top: int) -> None:
    """--json, --html, --top, --by."""
    form = command.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON, for machines")
    form.add_argument("--html", metavar="FILE", help="write a self-contained page to explore in a browser")
    command.add_argument("--top", type=_count, default=top, metavar="N", help="pairs to list (default: %(default)s)")
    command.add_argument(
        "--by",
        choices=("word", "sentence", "token"),
        help="unit of the document (default: word; with --json what was computed)",
    )


def write(found: Explanation | Hits, arguments: argparse.Namespace) -> None:
    """Show an explanation or hits in the form that was asked for."""
    from rich.console import Console

    from rag_explain.render.terminal import explanation_view, hits_view
    from rag_explain.results.explanation import Explanation
    from rag_explain.results.serialization import to_json

    by: Unit | None = arguments.by
    if arguments.json:
        data = _data(found, by) if isinstance(found, Explanation) else [_hit_data(hit, by) for hit in found]
        print(to_json(data))
    elif arguments.html is not None:
        try:
            found.to_html(arguments.html)
        except OSError as error:
            raise InvalidInput(f"the page cannot be written to {arguments.html}: {error.strerror}") from error
        print(f"written to {arguments.html}")
    else:
        top: int = arguments.top
        view = (
            explanation_view(found, top=top, by=by)
            if isinstance(found, Explanation)
            else hits_view(found, top=top, by=by)
        )
        Console(highlight=False).print(view)


def _hit_data(hit: Hit, by: Unit | None) -> dict[str, Any]:
    explanation = hit.explanation  # computed here: the reasons are what was asked for
    return hit.to_dict() | {"explanation": None if explanation is None else _data(explanation, by)}


def _data(explanation: Explanation, by: Unit | None) -> dict[str, Any]:
    from rag_explain.render.view import at

    return (explanation if by is None else at(explanation, by)).to_dict()


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of pairs: use 0 or more")
    return int(text)
