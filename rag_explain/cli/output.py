"""How a command shows what it found: in the terminal, as JSON, or as a page. Shared by the commands that explain."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from rag_explain.errors import InvalidInput

if TYPE_CHECKING:
    from rag_explain.results.explanation import Explanation
    from rag_explain.results.hits import Hits
    from rag_explain.texts.tokens import Unit


def add_output_arguments(command: argparse.ArgumentParser, *, top: int) -> None:
    """--json, --html, --top, --by."""
    form = command.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON, for machines")
    form.add_argument("--html", metavar="FILE", help="write a self-contained page to explore in a browser")
    command.add_argument("--top", type=_count, default=top, metavar="N", help="pairs to list (default: %(default)s)")
    by = "unit of the document (default: word; with --json what was computed)"
    command.add_argument("--by", choices=("word", "sentence", "token"), help=by)


def write(found: Explanation | Hits, arguments: argparse.Namespace) -> None:
    """Show an explanation or hits in the form that was asked for."""
    if arguments.json:
        _write_json(found, arguments.by)
    elif arguments.html is not None:
        try:
            found.to_html(arguments.html)
        except OSError as error:
            raise InvalidInput(f"the page cannot be written to {arguments.html}: {error.strerror}") from error
        print(f"written to {arguments.html}")
    else:
        _write_terminal(found, arguments.top, arguments.by)


def _write_json(found: Explanation | Hits, by: Unit | None) -> None:
    from rag_explain.render.pieces import in_unit
    from rag_explain.results.explanation import Explanation
    from rag_explain.results.serialization import to_json

    def data(explanation: Explanation) -> dict[str, Any]:
        return (explanation if by is None else in_unit(explanation, by)).to_dict()

    if isinstance(found, Explanation):
        print(to_json(data(found)))
        return
    hits = [hit.to_dict() for hit in found.load()]  # the reasons are what was asked for
    for hit, plain in zip(found, hits, strict=True):
        plain["explanation"] = None if hit.explanation is None else data(hit.explanation)
    print(to_json(hits))


def _write_terminal(found: Explanation | Hits, top: int, by: Unit | None) -> None:
    from rich.console import Console

    from rag_explain.render.terminal import draw
    from rag_explain.render.views.explanation import explanation_view
    from rag_explain.render.views.hits import hits_view
    from rag_explain.results.explanation import Explanation

    if isinstance(found, Explanation):
        view = explanation_view(found, top=top, by=by)
    else:
        view = hits_view(found, top=top, by=by)
    Console(highlight=False).print(draw(view))


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of pairs: use 0 or more")
    return int(text)
