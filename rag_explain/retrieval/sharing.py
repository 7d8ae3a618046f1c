"""Wrappers that use one model object in one way share one Explainer: one check when it is made, one cache of factors.

The registries below keep nothing alive. An entry that held an Explainer, which shares its model's modules, could hold
its own key for ever. Both ends are therefore weak: a shared Explainer lives as long as a wrapper, or a hit, of
which more may be asked, holds it. To keep one for longer, make it yourself and give it to every wrapper.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast
from weakref import ReferenceType, WeakKeyDictionary, WeakValueDictionary, ref

from rag_explain.errors import InvalidInput, ModelChanged
from rag_explain.retrieval.usage import Embedder, Usage, model_as_used

if TYPE_CHECKING:
    from sentence_transformers import MultiVectorEncoder, SentenceTransformer

    from rag_explain.encoder.watch import Glance
    from rag_explain.explainer import Explainer

ExplainerSource: TypeAlias = (
    "Explainer | SentenceTransformer | MultiVectorEncoder | str | Path | Callable[[], Explainer]"
)

_shared: WeakKeyDictionary[object, dict[Usage | None, ReferenceType[Explainer]]] = WeakKeyDictionary()
# By the embedding object, which its Explainer holds, so that no other one has its id; and by what it says it asks.
_asking: WeakValueDictionary[tuple[int, str, str], Explainer] = WeakValueDictionary()
_glances: WeakKeyDictionary[object, Glance] = WeakKeyDictionary()
# An Explainer takes long to make, and a search must not wait; one that asks a service may take longer than that.
_lock, _glancing, _sending = threading.Lock(), threading.Lock(), threading.Lock()


def explainer_of(source: ExplainerSource, usage: Usage | None = None) -> Explainer:
    """The Explainer that this is, or that is made from it: shared where it is a loaded model.

    `usage` is how a framework uses the model; None: as the model's own `encode_query` and `encode_document` do.
    """
    from torch import nn

    from rag_explain.explainer import Explainer
    from rag_explain.scorers.sources import embeds_strings

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
    if embeds_strings(source):
        return asking_explainer(Embedder(source, {}))
    return source() if makes_explainer(source) else Explainer(source)


def asking_explainer(embedder: Embedder, measure: str = "cosine") -> Explainer:
    """The Explainer of an embedding object that holds no model: making it sends the probes. Shared like the others."""
    from rag_explain.explainer import Explainer
    from rag_explain.scorers import BlackBox

    key = id(embedder.holder), embedder.asked_model or "", measure
    with _sending:
        explainer = _asking.get(key)
        if explainer is None or has_changed(explainer):
            box = BlackBox(embedder.uncached(embedder.holder), measure=cast("Any", measure))
            box.made_for = embedder.holder
            explainer = _asking[key] = Explainer(box)
        return explainer


def makes_explainer(source: Callable[..., Any]) -> bool:
    """Whether a function can be called without arguments: one that takes texts embeds them."""
    try:
        inspect.signature(source).bind()
    except TypeError:
        return False
    except ValueError:  # a builtin says nothing of its arguments
        pass
    return True


def check_source(source: object) -> None:
    """Refuse what is no Explainer and what none can be made from. No model is loaded, and nothing is asked."""
    from rag_explain.scorers.sources import embeds_strings

    is_known = isinstance(source, (str, Path)) or hasattr(source, "scorer") or callable(source)
    if not (is_known or embeds_strings(source)):
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
