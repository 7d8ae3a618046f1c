"""The explanation methods, found by name."""

from __future__ import annotations

import inspect
from importlib.metadata import entry_points
from typing import Any

from rag_explain.encoder import Encoder
from rag_explain.errors import InvalidInput
from rag_explain.methods.alignment import Alignment
from rag_explain.methods.base import ColdDocument, Method, PairMethod
from rag_explain.methods.baselines import Gradient, IntegratedGradients, Random, TokenEmbeddings
from rag_explain.methods.bilrp import BiLRP, HessianProduct
from rag_explain.methods.bti import BTI
from rag_explain.methods.jacobian import ExactJacobians, IntegratedJacobians
from rag_explain.methods.pooled import Pooled

DEFAULT = BiLRP.name
GROUP = "rag_explain.methods"
METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        BiLRP,
        HessianProduct,
        IntegratedJacobians,
        ExactJacobians,
        Pooled,
        Alignment,
        BTI,
        TokenEmbeddings,
        Gradient,
        IntegratedGradients,
        Random,
    )
}


def find(name: str) -> type[Method]:
    """The method called `name`: one of ours, or one that an installed package registers as an entry point."""
    if name in METHODS:
        return METHODS[name]
    found = tuple(entry_points(group=GROUP, name=name))
    if not found:
        theirs = entry_points(group=GROUP).names
        raise InvalidInput(f"there is no method {name!r}: choose one of {', '.join(sorted({*METHODS, *theirs}))}")
    try:
        method = found[0].load()
    except Exception as error:  # whatever another package does when it is imported, the caller asked for a method
        raise InvalidInput(f"the method {name!r} ({found[0].value}) could not be loaded: {error}") from error
    if not (isinstance(method, type) and issubclass(method, Method)):
        raise InvalidInput(f"the method {name!r} ({found[0].value}) is no subclass of rag_explain.methods.Method")
    return method


def applicable(encoder: Encoder) -> list[str]:
    """The names of our methods that explain an encoder of this kind by its own similarity; chance is left out."""
    if encoder.is_multivector:
        return [Alignment.name]
    left_out = {Random.name, (IntegratedJacobians if encoder.is_shifted else ExactJacobians).name}
    return [name for name in METHODS if name not in left_out]


def make(name: str | None, encoder: Encoder, layer: int | None, options: dict[str, Any]) -> Method:
    """The method called `name`, bound to an encoder; one clear error for an unknown name or option."""
    if name is None:
        name = Alignment.name if encoder.is_multivector else DEFAULT
    method = find(name)
    if encoder.is_multivector and method is not Alignment:
        raise InvalidInput(
            f"{name} explains one embedding per text, and {encoder.name} gives one vector per token: use alignment"
        )
    known = [option for option in inspect.signature(method).parameters if option not in ("encoder", "layer")]
    for option in options:
        if option not in known:
            raise InvalidInput(f"{name} has no option {option!r}; its options are: {', '.join(known) or 'none'}")
    return method(encoder, layer, **options)


__all__ = ["DEFAULT", "GROUP", "METHODS", "ColdDocument", "Method", "PairMethod", "applicable", "find", "make"]
