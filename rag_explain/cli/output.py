"""How a command shows what it found: in the terminal, as JSON, or as a page. Shared by the commands that explain."""

from __future__ import annotations

import argparse
import tempfile
import webbrowser
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rag_explain.errors import InvalidInput
from rag_explain.render.views import view_of
from rag_explain.render.views.explanation import in_unit
from rag_explain.render.views.stages import load_stages
from rag_explain.results.display import Paged
from rag_explain.results.explanation import Explanation
from rag_explain.results.hits import Hit, Hits
from rag_explain.results.serialization import to_json
from rag_explain.texts.tokens import Unit

if TYPE_CHECKING:
    from rich.console import Console

_AT_ONCE = 3  # hits whose pairs are computed before progress is shown


def add_form_arguments(command: argparse.ArgumentParser) -> None:
    """--json, --html."""
    form = command.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON, for machines")
    page = "write a self-contained page to explore in a browser; without FILE a temporary one, and open it"
    form.add_argument("--html", metavar="FILE.html", nargs="?", const="", type=page_file, help=page)


def add_output_arguments(command: argparse.ArgumentParser, *, top: int) -> None:
    """--json, --html, --what-if, --top, --by."""
    add_form_arguments(command)
    help = "also compute score and rank again without the words that matter"
    command.add_argument("--what-if", action="store_true", help=help)
    command.add_argument("--top", type=count, default=top, metavar="N", help="pairs to list (default: %(default)s)")
    by = "unit of the document (default: word; with --json what was computed)"
    command.add_argument("--by", choices=("word", "sentence", "token"), help=by)


def working(what: str) -> AbstractContextManager[object]:
    """Says what is being done, on the terminal of a person who waits for it."""
    from rich.console import Console

    return Console(stderr=True).status(what)


def write(found: Explanation | Hits | Paged, arguments: argparse.Namespace) -> None:
    """Show what was found in the form that was asked for."""
    from rich.console import Console

    if isinstance(found, Hits) and (arguments.json or arguments.html is not None):
        _load(found, Console(stderr=True))
    if isinstance(found, Hits) and getattr(arguments, "what_if", False):
        with working("what if"):
            found.load("explanation").load("what_if")
    if arguments.json:
        print(to_json(_plain(found, getattr(arguments, "by", None))))
    elif arguments.html is not None:
        _write_page(found, arguments.html)
    else:
        from rag_explain.render.terminal import draw

        console = Console(highlight=False)
        if isinstance(found, Hits) and console.is_terminal:
            _show_first_look(found, console)
        is_explained = isinstance(found, Explanation | Hits)
        options = {"top": arguments.top, "by": arguments.by} if is_explained else {}
        console.print(draw(view_of(found, **options)))
        for hit in found if isinstance(found, Hits) and getattr(arguments, "what_if", False) else ():
            console.print()
            console.print(draw(view_of(hit.what_if())))


def _write_page(found: Explanation | Hits | Paged, path: str) -> None:
    """To the path; to a temporary file, which a browser opens, where there is none."""
    target = path or str(Path(tempfile.mkdtemp(prefix="rag-explain-")) / "why.html")
    try:
        found.to_html(target)
    except OSError as error:
        raise InvalidInput(f"the page cannot be written to {target}: {error.strerror}") from error
    print(f"written to {target}")
    if not path and not webbrowser.open(Path(target).as_uri()):
        print("no browser was found to open it")


def _load(hits: Hits, console: Console) -> None:
    """All explanations: with progress for a person who waits, else in one batch."""
    from rich.progress import track

    if not console.is_terminal:
        hits.load()
        return
    for start in track(range(0, len(hits), _AT_ONCE), "pairs of words", console=console, transient=True):
        hits[start : start + _AT_ONCE].load()


def _show_first_look(hits: Hits, console: Console) -> None:
    """The words of all hits at once, while their pairs are computed; it makes room for the whole then."""
    from rich.console import Group
    from rich.live import Live
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from rag_explain.render.terminal import draw
    from rag_explain.render.views.highlights import first_look_view

    if all(hit.status != "pending" for hit in hits):
        return
    bar = Progress(TextColumn("pairs of words"), BarColumn(), MofNCompleteColumn(), console=console)
    task = bar.add_task("pairs", total=len(hits))
    hits.load("highlights")
    with Live(Group(draw(first_look_view(hits)), bar), console=console, transient=True):
        for start in range(0, len(hits), _AT_ONCE):
            hits[start : start + _AT_ONCE].load()
            bar.update(task, completed=min(start + _AT_ONCE, len(hits)))


def _plain(found: Explanation | Hits | Paged, by: Unit | None) -> dict[str, Any] | list[Any]:
    if isinstance(found, Explanation):
        return (found if by is None else in_unit(found, by)).to_dict()
    if not isinstance(found, Hits):
        plain: dict[str, Any] = found.to_dict()
        return plain
    load_stages(found)
    return [_plain_hit(hit, by) for hit in found]


def _plain_hit(hit: Hit, by: Unit | None) -> dict[str, Any]:
    what_if = hit.peek_what_if()
    explanation = None if hit.explanation is None else _plain(hit.explanation, by)
    return hit.to_dict() | {"explanation": explanation} | ({} if what_if is None else {"what_if": what_if.to_dict()})


def page_file(text: str) -> str:
    """An argument that names a page; what is none is a query or a document that stands in the wrong place."""
    if text and not text.lower().endswith((".html", ".htm")):
        raise argparse.ArgumentTypeError(f"{text!r} does not end in .html: put queries and documents before --html")
    return text


def count(text: str) -> int:
    """An argument that says how many."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not how many there can be: use 0 or more")
    return int(text)
