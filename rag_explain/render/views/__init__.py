"""A view is a function of a result that says what is shown of it, as blocks."""

from __future__ import annotations

from rag_explain.render.blocks import View
from rag_explain.render.views.comparison import comparison_view
from rag_explain.render.views.contrast import contrast_view
from rag_explain.render.views.explanation import explanation_view
from rag_explain.render.views.hits import hits_view
from rag_explain.results.comparison import Comparison
from rag_explain.results.contrast import Contrast
from rag_explain.results.explanation import Explanation
from rag_explain.results.hits import Hit, Hits


def view_of(result: object) -> View:
    """The view of any result, with its defaults."""
    match result:
        case Explanation():
            return explanation_view(result)
        case Hits():
            return hits_view(result)
        case Hit():
            return hits_view((result,))
        case Contrast():
            return contrast_view(result)
        case Comparison():
            return comparison_view(result)
    raise TypeError(f"there is no view of {type(result).__name__}")
