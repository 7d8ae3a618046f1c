"""rag-explain contrast QUERY --wanted ID [--got ID]: why a document was not returned, or not before another one."""

import argparse
from pathlib import Path
from typing import Any

from rag_explain.cli.explain import add_model_arguments, make_explainer
from rag_explain.cli.index import DEFAULT_FOLDER
from rag_explain.cli.output import add_form_arguments, count, working, write
from rag_explain.cli.search import add_stage_arguments, hybrid
from rag_explain.errors import InvalidInput


def add(commands: Any) -> None:
    command = commands.add_parser("contrast", help="say why a document that was wanted was not returned")
    command.add_argument("query")
    command.add_argument("--wanted", required=True, metavar="ID", help="the document that was wanted")
    command.add_argument("--got", metavar="ID", help="the hit to contrast it with (default: the one in its place)")
    command.add_argument("--index", type=Path, default=DEFAULT_FOLDER, help=f"the index (default {DEFAULT_FOLDER})")
    command.add_argument("-k", type=count, default=10, help="how many documents are returned (default 10)")
    command.add_argument(
        "--filter", action="append", default=[], metavar="NAME=VALUE", help="metadata that is asked for"
    )
    command.add_argument("--min-score", type=float, default=None, help="the worst score that is let through")
    help = "documents that may be encoded again to know a rank"
    command.add_argument("--reencode", type=count, default=0, metavar="N", help=help)
    add_stage_arguments(command)
    add_form_arguments(command)
    add_model_arguments(command)
    command.set_defaults(run=run, model=None)


def run(arguments: argparse.Namespace) -> None:
    from rag_explain.faiss import FaissRetriever, read_manifest

    arguments.model = arguments.model or read_manifest(arguments.index)["model"]
    options: dict[str, Any] = {"got": arguments.got, "k": arguments.k, "reencode": arguments.reencode}
    narrowed = {"filter": _filter(arguments.filter), "min_score": arguments.min_score}
    if arguments.hybrid and any(value is not None for value in narrowed.values()):
        raise InvalidInput("--filter and --min-score are of a search by vectors alone: leave them out, or --hybrid")
    with make_explainer(arguments) as explainer:
        retriever = FaissRetriever.load(arguments.index, explainer)
        staged = hybrid(retriever, arguments)
        with working("why not"):
            if staged is None:
                found = retriever.why_not(arguments.query, arguments.wanted, **options, **narrowed)
            else:
                found = staged.why_not(arguments.query, arguments.wanted, **options)
        write(found, arguments)


def _filter(given: list[str]) -> Any:
    """Metadata by name; what is asked for twice may be either. Numbers and truth values are compared as they print."""
    wanted: dict[str, list[str]] = {}
    for one in given:
        name, equals, value = one.partition("=")
        if not name or not equals:
            raise InvalidInput(f"--filter takes NAME=VALUE, not {one!r}")
        wanted.setdefault(name, []).append(value)
    if not wanted:
        return None
    return lambda metadata: all(str(metadata.get(name)) in values for name, values in wanted.items())
