"""The nouns of the library in one place, for those who import them from here."""

from __future__ import annotations

from rag_explain.factors import Array as Array
from rag_explain.factors import Factors as Factors
from rag_explain.results.deferred import Deferred as Deferred
from rag_explain.results.deferred import Status as Status
from rag_explain.results.explanation import Explanation as Explanation
from rag_explain.results.explanation import Highlight as Highlight
from rag_explain.results.explanation import Pair as Pair
from rag_explain.results.hits import Hit as Hit
from rag_explain.results.hits import Hits as Hits
from rag_explain.results.metric import Metric as Metric
from rag_explain.results.notices import Notice as Notice
from rag_explain.texts.passage import Passage as Passage
from rag_explain.texts.tokens import Part as Part
from rag_explain.texts.tokens import Role as Role
from rag_explain.texts.tokens import Token as Token
from rag_explain.texts.tokens import Unit as Unit
