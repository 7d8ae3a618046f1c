"""Whatever embeds strings, seen in one way: functions, and objects of frameworks, which are known by their methods."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rag_explain.budget import Budget
from rag_explain.errors import InvalidInput
from rag_explain.texts.tokens import Role

# Gives one vector per text. The budget is told of texts that are sent again; those of the call itself are counted.
Call = Callable[[list[str], Role, Budget], Any]
# What says which model an object asks for. Keys, addresses with passwords and the like are never looked at.
_MODEL_NAMES = ("model_name", "model", "model_id", "deployment", "deployment_name")
_DIMENSIONS = ("dimensions", "dimension", "output_dimensionality")


@dataclass(frozen=True)
class Source:
    """What embeds strings.

    Attributes:
        name: what to call it.
        has_roles: whether queries and documents are embedded each in their own way.
        batch_size: how many texts are given at once.
        concurrency: how many calls run at the same time.
    """

    name: str
    call: Call
    has_roles: bool
    batch_size: int = 64
    concurrency: int = 1


def source_of(model: Any) -> Source | None:
    """The way to embed strings with this object; None where it has none that is known."""
    if isinstance(model, type | str):
        return None
    if isinstance(made := getattr(model, "source", None), Source):
        return made
    for kind in (*_BY_METHODS, _by_function):
        source = kind(model)
        if source is not None:
            return source
    return None


def embeds_strings(model: Any) -> bool:
    """Whether an object is known to by its methods; nothing is asked of it, and a function is not enough."""
    if isinstance(model, type | str):
        return False
    return isinstance(getattr(model, "source", None), Source) or any(kind(model) is not None for kind in _BY_METHODS)


def _by_documents(model: Any) -> Source | None:
    """An object with LangChain's methods."""
    return _told_apart(model, "embed_query", "embed_documents")


def _by_batch(model: Any) -> Source | None:
    """An object with LlamaIndex's methods."""
    return _told_apart(model, "get_query_embedding", "get_text_embedding_batch")


def _told_apart(model: Any, for_query: str, for_documents: str) -> Source | None:
    """An object that embeds one query, or many documents."""
    one, many = getattr(model, for_query, None), getattr(model, for_documents, None)
    if not (callable(one) and callable(many)):
        return None

    def call(texts: list[str], role: Role, budget: Budget) -> Any:
        # The methods as they are now: an object may be given another model.
        if role == "document":
            return getattr(model, for_documents)(texts)
        return [getattr(model, for_query)(text) for text in texts]

    return Source(_name(model), call, has_roles=True)


def _by_role(model: Any) -> Source | None:
    """An object with sentence-transformers' `encode_query` and `encode_document`."""
    if not (callable(getattr(model, "encode_query", None)) and callable(getattr(model, "encode_document", None))):
        return None
    return Source(_name(model), lambda texts, role, _: getattr(model, f"encode_{role}")(texts), has_roles=True)


def _by_encode(model: Any) -> Source | None:
    """An object with one `encode` for all texts, as static models have."""
    if not callable(getattr(model, "encode", None)):
        return None
    return Source(_name(model), lambda texts, role, _: model.encode(texts), has_roles=False)


_BY_METHODS = (_by_documents, _by_batch, _by_role, _by_encode)


def _by_function(model: Any) -> Source | None:
    """`embed(texts)`, or `embed(texts, role=...)` where the signature takes a role."""
    if not callable(model):
        return None
    has_roles = _takes_role(model)
    name = getattr(model, "__qualname__", None) or _name(model)
    if inspect.iscoroutinefunction(model) or inspect.iscoroutinefunction(type(model).__call__):
        raise InvalidInput(f"{name} is asynchronous: give a function that returns vectors, and not a coroutine")

    def call(texts: list[str], role: Role, budget: Budget) -> Any:
        return model(texts, role=role) if has_roles else model(texts)

    return Source(name, call, has_roles=has_roles)


def _takes_role(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin says nothing of its arguments
        return False
    return "role" in parameters and parameters["role"].kind is not inspect.Parameter.POSITIONAL_ONLY


def _name(model: Any) -> str:
    """The class, and the model that it says it asks for."""
    told: Sequence[Any] = [getattr(model, name, None) for name in _MODEL_NAMES]
    named = next((value for value in told if isinstance(value, str) and value), "")
    return f"{type(model).__name__} {named}".strip()


def asked_model(model: Any) -> str:
    """Which model an object says that it asks for, and for how many dimensions: another one is another model."""
    return f"{_name(model)} {[getattr(model, name, None) for name in _DIMENSIONS]}"
