"""Wrappers that use one model object in one way share one Explainer: one check when it is made, one cache of factors.

The registries below keep nothing alive. An entry that held an Explainer, which shares its model's modules, could hold
its own key for ever. Both ends are therefore weak: a shared Explainer lives as long as a wrapper, or a hit, of
which more may be asked, holds it. To keep one for longer, make it yourself and give it to every wrapper.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast
from weakref import ReferenceType, WeakKeyDictionary, ref

from rag_explain.errors import InvalidInput, ModelChanged
from rag_explain.retrieval.usage import Usage, model_as_used

if TYPE_CHECKING:
    from sentence_transformers import MultiVectorEncoder, SentenceTransformer

    from rag_explain.encoder.watch import Glance
    from rag_explain.explainer import Explainer

ExplainerSource: TypeAlias = (
    "Explainer | SentenceTransformer | MultiVectorEncoder | str | Path | Callable[[], Explainer]"
)

_shared: WeakKeyDictionary[object, dict[Usage | None, ReferenceType[Explainer]]] = WeakKeyDictionary()
_glances: WeakKeyDictionary[object, Glance] = WeakKeyDictionary()
_lock, _glancing = threading.Lock(), threading.Lock()  # an Explainer takes long to make, and a search must not wait


def explainer_of(source: ExplainerSource, usage: Usage | None = None) -> Explainer:
    """The Explainer that this is, or that is made from it: shared where it is a loaded model.

    `usage` is how a framework uses the model; None: as the model's own `encode_query` and `encode_document` do.
    """
    from torch import nn

    from rag_explain.explainer import Explainer

    if isinstance(source, Explainer):
        return source
    if isinstance(source, (str, Path)):
        return Explainer(source)
    if isinstance(source, nn.Module):
        with _lock:
            known = _shared.setdefault(source, {})
            explainer = known[usage]() if usage in known else None
            if explainer is None or has_changed(explainer):
                used: Any = source if usage is None else model_as_used(cast("SentenceTransformer", source), usage)
                explainer = Explainer(used)  # a Module of another kind is refused there
                known[usage] = ref(explainer)
                if explainer.scorer.watch is not None:
                    glance(source, explainer.scorer.watch.fleeting)
            return explainer
    check_source(source)
    return source()


def check_source(source: object) -> None:
    """Refuse what is no Explainer and what none can be made from. Nothing is loaded."""
    if not (isinstance(source, (str, Path)) or hasattr(source, "scorer") or callable(source)):
        raise InvalidInput(f"explainer must be an Explainer or a model to make one from, not {type(source).__name__}")


def glance(model: object, fleeting: frozenset[str] = frozenset()) -> tuple[int, int]:
    """How often this model was seen to be written to, and to be changed otherwise, by all glances so far.

    A fraction of a millisecond, but for the first: two that are equal say that nothing happened between them.
    `fleeting` are paths that decide nothing.
    """
    from rag_explain.encoder.watch import Glance

    with _glancing:
        if model not in _glances:
            _glances[model] = Glance(model)
        _glances[model].leave_out(fleeting)
        return _glances[model].state()


def has_changed(explainer: Explainer) -> bool:
    """Whether the model is not the one any more that this Explainer was made of."""
    try:
        explainer.scorer.fingerprint  # noqa: B018  # reading it looks at the model
    except ModelChanged:
        return True
    return False
