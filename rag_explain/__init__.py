"""Why did the retriever return this document?

`import rag_explain` loads neither torch nor a framework: names are loaded when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rag_explain.explainer import Explainer
    from rag_explain.shifted import ShiftedEncoder
    from rag_explain.types import Comparison, Contrast, Explanation, Factors, Highlights, Hit, Hits, Pair, Token

__version__ = "0.1.0"
__all__ = ["Explainer", "ShiftedEncoder", "__version__"]
__all__ += ["Comparison", "Contrast", "Explanation", "Factors", "Highlights", "Hit", "Hits", "Pair", "Token"]

_HOME = {"Explainer": "rag_explain.explainer", "ShiftedEncoder": "rag_explain.shifted"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME.get(name, "rag_explain.types")), name)


def __dir__() -> list[str]:
    return __all__
