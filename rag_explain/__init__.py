"""Why did the retriever return this document?

`import rag_explain` loads neither torch nor a framework: names are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rag_explain.explainer import Explainer as Explainer
    from rag_explain.factors import Factors as Factors
    from rag_explain.results.comparison import Comparison as Comparison
    from rag_explain.results.contrast import Contrast as Contrast
    from rag_explain.results.explanation import Explanation as Explanation
    from rag_explain.results.explanation import Highlight as Highlight
    from rag_explain.results.explanation import Pair as Pair
    from rag_explain.results.hits import Hit as Hit
    from rag_explain.results.hits import Hits as Hits
    from rag_explain.shifted import ShiftedEncoder as ShiftedEncoder
    from rag_explain.texts.tokens import Token as Token

__version__ = "0.1.0"

_HOME = {
    "Comparison": "rag_explain.results.comparison",
    "Contrast": "rag_explain.results.contrast",
    "Explainer": "rag_explain.explainer",
    "Explanation": "rag_explain.results.explanation",
    "Factors": "rag_explain.factors",
    "Highlight": "rag_explain.results.explanation",
    "Hit": "rag_explain.results.hits",
    "Hits": "rag_explain.results.hits",
    "Pair": "rag_explain.results.explanation",
    "ShiftedEncoder": "rag_explain.shifted",
    "Token": "rag_explain.texts.tokens",
}

__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
