"""rag-explain search QUERY"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rag_explain.cli.explain import add_model_arguments, make_explainer
from rag_explain.cli.index import DEFAULT_FOLDER
from rag_explain.cli.output import add_output_arguments, write
from rag_explain.errors import InvalidInput, in_words

if TYPE_CHECKING:
    from rag_explain.faiss import FaissRetriever
    from rag_explain.results.hits import Hits
    from rag_explain.retrieval.hybrid import HybridRetriever


def add(commands: Any) -> None:
    command = commands.add_parser("search", help="search an index and say why each document was found")
    command.add_argument("query")
    command.add_argument("--index", type=Path, default=DEFAULT_FOLDER, help=f"the index (default {DEFAULT_FOLDER})")
    add_result_arguments(command)
    add_model_arguments(command)
    command.set_defaults(run=run, model=None)


def add_result_arguments(command: argparse.ArgumentParser) -> None:
    """-k, --explain, and how to show what was found."""
    command.add_argument("-k", type=int, default=3, help="how many documents (default 3)")
    command.add_argument("--explain", type=int, default=None, metavar="N", help="explain only the first N")
    add_stage_arguments(command)
    add_output_arguments(command, top=3)


def add_stage_arguments(command: argparse.ArgumentParser) -> None:
    """--hybrid, --rerank."""
    command.add_argument("--hybrid", action="store_true", help="search by words (BM25) and by vectors, and fuse both")
    command.add_argument("--rerank", metavar="FOLDER", help="rank what was found by this cross-encoder: name or folder")


def run(arguments: argparse.Namespace) -> None:
    from rag_explain.faiss import FaissRetriever, read_manifest

    arguments.model = arguments.model or read_manifest(arguments.index)["model"]
    with make_explainer(arguments) as explainer:
        retriever = FaissRetriever.load(arguments.index, explainer, unit=arguments.by)
        write(found(retriever, arguments), arguments)


def found(retriever: FaissRetriever, arguments: argparse.Namespace) -> Hits:
    """What a retriever finds, or the stages that are asked for over it."""
    asked = hybrid(retriever, arguments, unit=arguments.by) or retriever
    return asked.search(arguments.query, arguments.k, top=arguments.explain)


def hybrid(retriever: FaissRetriever, arguments: argparse.Namespace, **options: Any) -> HybridRetriever | None:
    """The stages that are asked for; None where none are."""
    if not arguments.hybrid:
        if arguments.rerank is not None:
            raise InvalidInput("--rerank ranks what --hybrid finds: give both")
        return None
    from rag_explain.retrieval.hybrid import HybridRetriever

    reranker = None if arguments.rerank is None else _cross_encoder(arguments.rerank, arguments.device)
    return HybridRetriever(retriever, reranker=reranker, **options)


def _cross_encoder(name: str, device: str | None) -> Any:
    from sentence_transformers import CrossEncoder

    with in_words(InvalidInput, f"{name} cannot be loaded as a cross-encoder"):
        return CrossEncoder(name, device=device)
