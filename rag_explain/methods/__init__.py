"""The explanation methods: what a method is, and how one is found by name."""

import inspect
from importlib.metadata import entry_points
from typing import Any

from rag_explain.errors import InvalidInput
from rag_explain.methods.alignment import Alignment
from rag_explain.methods.base import EncoderMethod, ExplainedPair, Method, PairMethod, explained
from rag_explain.methods.baselines import Gradient, IntegratedGradients, Random, TokenEmbeddings
from rag_explain.methods.bilrp import BiLRP, HessianProduct
from rag_explain.methods.bti import BTI
from rag_explain.methods.cross_encoder import PairGradient, PairRelevance
from rag_explain.methods.jacobian import ExactJacobians, IntegratedJacobians
from rag_explain.methods.occlusion import Occlusion
from rag_explain.methods.pooled import Pooled
from rag_explain.methods.shapley import Shapley
from rag_explain.methods.static import StaticRows
from rag_explain.methods.terms import Terms
from rag_explain.scorers.base import Scorer

__all__ = ["GROUP", "METHODS", "EncoderMethod", "ExplainedPair", "Method", "PairMethod", "explained", "find", "make"]

GROUP = "rag_explain.methods"
_EXPLAIN = (
    *(BiLRP, HessianProduct, IntegratedJacobians, ExactJacobians, Pooled, StaticRows),
    *(Occlusion, Shapley, Alignment, BTI, Terms, PairRelevance),
)
_BASELINES = (TokenEmbeddings, Gradient, IntegratedGradients, Random, PairGradient)
METHODS: dict[str, type[Method]] = {method.name: method for method in (*_EXPLAIN, *_BASELINES)}


def find(name: str | type[Method]) -> type[Method]:
    """The method of this name: one of ours, or one that an installed package registers as an entry point.

    A class is its own method: a scorer may bring one along.
    """
    if isinstance(name, type) and issubclass(name, Method):
        return name
    if name in METHODS:
        return METHODS[name]
    found = tuple(entry_points(group=GROUP, name=name))
    if not found:
        theirs = entry_points(group=GROUP).names
        raise InvalidInput(f"there is no method {name!r}: choose one of {', '.join(sorted({*METHODS, *theirs}))}")
    try:
        method = found[0].load()
    except Exception as error:  # whatever another package raises when it is imported
        raise InvalidInput(f"the method {name!r} ({found[0].value}) could not be loaded: {error}") from error
    if not (isinstance(method, type) and issubclass(method, Method)):
        raise InvalidInput(f"the method {name!r} ({found[0].value}) is no subclass of rag_explain.methods.Method")
    return method


def make(name: str | type[Method] | None, scorer: Scorer, layer: int | None, options: dict[str, Any]) -> Method:
    """The method called `name`, bound to a scorer; one clear error for an unknown name or option."""
    method = find(scorer.methods[0] if name is None else name)
    own = [option for option in inspect.signature(method).parameters if option not in ("scorer", "layer", "max_bytes")]
    for option in options:
        if option not in (*own, "max_bytes"):
            known = ", ".join([*own, "max_bytes"])
            raise InvalidInput(f"{method.name} has no option {option!r}; its options are: {known}")
    bound = method(scorer, layer, **{option: options[option] for option in own if option in options})
    if options.get("max_bytes") is not None:
        bound.max_bytes = options["max_bytes"]
    return bound
