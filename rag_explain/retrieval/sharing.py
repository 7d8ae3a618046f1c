"""Wrappers around one model object share one Explainer: one check when it is made, one cache of factors.

The registry below keeps nothing alive. An Explainer holds its model, so an entry that held the Explainer would hold its
own key for ever. Both ends are therefore weak: a shared Explainer lives as long as a wrapper, or a hit that is still
pending, holds it. To keep one for longer, make it yourself and give it to every wrapper.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias
from weakref import ReferenceType, WeakKeyDictionary, ref

from rag_explain.errors import InvalidInput

if TYPE_CHECKING:
    from sentence_transformers import MultiVectorEncoder, SentenceTransformer

    from rag_explain.explainer import Explainer

ExplainerSource: TypeAlias = (
    "Explainer | SentenceTransformer | MultiVectorEncoder | str | Path | Callable[[], Explainer]"
)

_shared: WeakKeyDictionary[object, ReferenceType[Explainer]] = WeakKeyDictionary()
_lock = threading.Lock()
_DEPTH = 4  # the holder itself, what it keeps, and two steps further


def explainer_of(source: ExplainerSource) -> Explainer:
    """The Explainer that this is, or that is made from it: shared where it is a loaded model."""
    from torch import nn

    from rag_explain.explainer import Explainer

    if isinstance(source, Explainer):
        return source
    if isinstance(source, (str, Path)):
        return Explainer(source)
    if isinstance(source, nn.Module):
        with _lock:
            known = _shared.get(source)
            explainer = None if known is None else known()
            if explainer is None:
                explainer = Explainer(source)  # type: ignore[arg-type]  # a Module of another kind is refused there
                _shared[source] = ref(explainer)
            return explainer
    if callable(source):
        return source()
    raise InvalidInput(f"explainer must be an Explainer or a model to make one from, not {type(source).__name__}")


def held_model(*holders: object) -> SentenceTransformer | None:
    """The SentenceTransformer that one of these is, or holds in an attribute, so that the user need not name it again.

    Frameworks and people's own classes call the attribute `client`, `_client`, `_model` and so on: the class of its
    value decides, and no name can go out of date. An object around such a holder is looked into too. None where there
    is none, or more than one at the same depth.
    """
    module = sys.modules.get("sentence_transformers")
    if module is None:  # a model cannot be held before its library is loaded
        return None
    level = list(holders)
    for _ in range(_DEPTH):
        found = {id(value): value for value in level if isinstance(value, module.SentenceTransformer)}
        if found:
            return next(iter(found.values())) if len(found) == 1 else None
        level = [value for holder in level for value in _attributes(holder)]
    return None


def _attributes(holder: object) -> list[object]:
    """What an object keeps in itself: of plain data, classes and modules nothing."""
    if isinstance(holder, (type, ModuleType, str, bytes, int, float, list, tuple, dict, set)):
        return []
    slots = [getattr(holder, name, None) for kind in type(holder).__mro__ for name in getattr(kind, "__slots__", ())]
    private = getattr(holder, "__pydantic_private__", None) or {}
    return [*getattr(holder, "__dict__", {}).values(), *private.values(), *slots]
