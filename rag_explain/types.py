"""The nouns of the library in one place, for those who import them from here."""

from rag_explain.factors import Array, Factors
from rag_explain.results.calibration import Calibration
from rag_explain.results.comparison import Comparison
from rag_explain.results.contrast import Contrast
from rag_explain.results.deferred import Deferred, Status
from rag_explain.results.evidence import Evidence
from rag_explain.results.explanation import Explanation, Pair
from rag_explain.results.highlights import Highlights
from rag_explain.results.hits import Hit, Hits
from rag_explain.results.links import Link
from rag_explain.results.metric import Metric
from rag_explain.results.notices import Notice
from rag_explain.results.precomputed import Precomputed
from rag_explain.results.spans import ValuedSpan
from rag_explain.results.stages import Stage
from rag_explain.results.terms import Term
from rag_explain.results.what_if import Change, WhatIf
from rag_explain.results.why_not import Rung, Suggestion, WhyNot
from rag_explain.results.x_ray import XRay
from rag_explain.texts.passage import Passage
from rag_explain.texts.tokens import Part, Role, Token, Unit

__all__ = ["Array", "Calibration", "Change", "Comparison", "Contrast", "Deferred", "Evidence", "Explanation"]
__all__ += ["Factors", "Highlights", "Hit", "Hits", "Link", "Metric", "Notice", "Pair", "Part", "Passage"]
__all__ += ["Precomputed", "Role", "Rung", "Stage", "Status", "Suggestion", "Term", "Token", "Unit", "ValuedSpan"]
__all__ += ["WhatIf", "WhyNot", "XRay"]
