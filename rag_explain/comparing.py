"""One pair under several methods: what is asked of each, and its answer or its refusal with the time it took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rag_explain.errors import InvalidInput, RagExplainError
from rag_explain.results.comparison import Compared
from rag_explain.texts.passage import Passage

Options = dict[str, Any]


def asked_methods(methods: Sequence[str | Mapping[str, Any]], layers: Iterable[int] | None) -> list[Options]:
    """Each method with its options, at each of the layers where there are some."""
    if isinstance(methods, str) or not methods:
        raise InvalidInput("compare takes a list of at least one method")
    asked = [dict(one) if isinstance(one, Mapping) else {"method": one} for one in methods]
    return asked if layers is None else [one | {"layer": layer} for layer in layers for one in asked]


def answer_of(make: Callable[..., Any], query: str, document: str | Passage, options: Options) -> Compared:
    """What one method says. `make` makes an Explainer of the scorer with these options."""
    named = {key: getattr(value, "name", value) for key, value in options.items()}
    label = " ".join(str(value) if key == "method" else f"{key}={value}" for key, value in named.items())
    start = time.perf_counter()
    try:
        with make(**options) as other:
            start = time.perf_counter()
            explanation = other.explain(query, document, unit="word" if other.method.edits else None)
    except RagExplainError as error:
        return Compared(label, None, time.perf_counter() - start, str(error))
    return Compared(label, explanation, time.perf_counter() - start)
