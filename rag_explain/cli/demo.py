"""rag-explain demo: the main job, end to end, on the embedded defaults."""

import argparse
import json
from importlib.resources import files
from typing import Any

from rag_explain.cli.explain import add_model_arguments, make_explainer
from rag_explain.cli.output import working, write
from rag_explain.cli.search import add_result_arguments, found

_QUERY = "How do bees find their way home?"
# Each has a trap among its hits: another sense of a word, a negation, or no word in common at all.
_OTHERS = (
    "I forgot my bank password",
    "Does the tablet help against migraine?",
    "my laptop is slow",
    "how to sort a python list",
)


def add(commands: Any) -> None:
    command = commands.add_parser("demo", help="search a small corpus and see why each document was found")
    command.add_argument("query", nargs="?", default=_QUERY)
    add_result_arguments(command)
    add_model_arguments(command)
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    from rich.console import Console

    from rag_explain.faiss import FaissRetriever

    documents = corpus()
    with make_explainer(arguments) as explainer:
        with working("embedding"):
            retriever = FaissRetriever.from_texts(
                [document["text"] for document in documents],
                explainer,
                ids=[document["id"] for document in documents],
                metadata=[{"topic": document["topic"]} for document in documents],
                unit=arguments.by,
            )
        write(found(retriever, arguments), arguments)
    if not arguments.json:
        others = " | ".join(f'"{query}"' for query in _OTHERS if query != arguments.query)
        text = f"{len(documents)} paragraphs were searched. Try: rag-explain demo {others}"
        Console(highlight=False).print(text, markup=False)


def corpus() -> list[dict[str, str]]:
    """The paragraphs of the demo: id, topic, text."""
    lines = files("rag_explain.cli").joinpath("corpus.jsonl").read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line]
