"""A view is a function of a result that says what is shown of it, as blocks."""

from collections.abc import Callable
from typing import Any

from rag_explain.render.blocks import View
from rag_explain.render.views.calibration import calibration_view
from rag_explain.render.views.comparison import comparison_view
from rag_explain.render.views.contrast import contrast_view
from rag_explain.render.views.documents import documents_view
from rag_explain.render.views.evidence import evidence_view
from rag_explain.render.views.explanation import explanation_view
from rag_explain.render.views.highlights import highlights_view
from rag_explain.render.views.hits import hits_view
from rag_explain.render.views.overview import overview_view
from rag_explain.render.views.what_if import what_if_view
from rag_explain.render.views.why_not import why_not_view
from rag_explain.render.views.x_ray import x_ray_view
from rag_explain.results.calibration import Calibration
from rag_explain.results.comparison import Comparison
from rag_explain.results.contrast import Contrast
from rag_explain.results.documents import Documents
from rag_explain.results.evidence import Evidence
from rag_explain.results.explanation import Explanation
from rag_explain.results.highlights import Highlights
from rag_explain.results.hits import Hit, Hits
from rag_explain.results.overview import Overview
from rag_explain.results.what_if import WhatIf
from rag_explain.results.why_not import WhyNot
from rag_explain.results.x_ray import XRay

_VIEWS: dict[type[Any], Callable[..., View]] = {
    Explanation: explanation_view,
    Hit: lambda hit, **options: hits_view((hit,), **options),
    Hits: hits_view,
    Contrast: contrast_view,
    Comparison: comparison_view,
    Evidence: evidence_view,
    Highlights: highlights_view,
    Overview: overview_view,
    Documents: documents_view,
    Calibration: calibration_view,
    WhatIf: what_if_view,
    WhyNot: why_not_view,
    XRay: x_ray_view,
}


def view_of(result: object, **options: Any) -> View:
    """The view of a result; options are those of the function that makes it."""
    return next(view(result, **options) for kind, view in _VIEWS.items() if isinstance(result, kind))
