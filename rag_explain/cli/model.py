"""The arguments that choose an encoder and a method, shared by the commands that explain."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rag_explain.encoder.loading import DEFAULT_MODEL

if TYPE_CHECKING:
    from rag_explain.explainer import Explainer


def add_model_arguments(command: argparse.ArgumentParser) -> None:
    """--model, --method, --layer, --device, --store."""
    command.add_argument("--model", default=DEFAULT_MODEL, help="name or folder of a sentence-transformers model")
    command.add_argument("--method", default=None, help="explanation method (default: bilrp)")
    command.add_argument("--layer", type=int, default=None, help="attribute to the input of this encoder block")
    command.add_argument("--device", default=None, help="where to compute, for example cpu or cuda")
    command.add_argument("--store", default=None, help="folder in which documents' factors are kept")


def make_explainer(arguments: argparse.Namespace) -> Explainer:
    """The Explainer that the arguments ask for, loaded without progress bars."""
    from transformers.utils import logging

    from rag_explain.explainer import Explainer

    logging.disable_progress_bar()
    return Explainer(
        arguments.model, arguments.method, layer=arguments.layer, device=arguments.device, store=arguments.store
    )
