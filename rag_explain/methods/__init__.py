"""The explanation methods, found by name."""

from __future__ import annotations

import inspect
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


def make(name: str | None, encoder: Encoder, layer: int | None, options: dict[str, Any]) -> Method:
    """The method called `name`, bound to an encoder; one clear error for an unknown name or option."""
    if name is None:
        name = Alignment.name if encoder.is_multivector else DEFAULT
    if name not in METHODS:
        raise InvalidInput(f"there is no method {name!r}: choose one of {', '.join(sorted(METHODS))}")
    method = METHODS[name]
    if encoder.is_multivector and method is not Alignment:
        raise InvalidInput(
            f"{name} explains one embedding per text, and {encoder.name} gives one vector per token: use alignment"
        )
    known = [option for option in inspect.signature(method).parameters if option not in ("encoder", "layer")]
    for option in options:
        if option not in known:
            raise InvalidInput(f"{name} has no option {option!r}; its options are: {', '.join(known) or 'none'}")
    return method(encoder, layer, **options)


__all__ = ["DEFAULT", "METHODS", "ColdDocument", "Method", "PairMethod", "make"]
