"""A black box in a wrapper: what embeds the documents holds no model, so each look sends edited texts to it.

That may cost money. So nothing is sent before an explanation is looked at, no more than a limit for each query, and
never because something is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np

from rag_explain.budget import Budget
from rag_explain.errors import BudgetSpent, EmbeddingFailed, ModelChanged
from rag_explain.probes import Probes
from rag_explain.results.notices import BLACK_BOX, Notice
from rag_explain.retrieval.engines import TOLERANCE, Engine
from rag_explain.retrieval.search import Moment, RetrievedDocument
from rag_explain.retrieval.sharing import makes_explainer
from rag_explain.texts.passage import Passage, as_passage

if TYPE_CHECKING:
    from rag_explain.explainer import Explainer

logger = logging.getLogger("rag_explain.retrieval")

# Texts that are sent for one query at most, unless told otherwise: those that an embedder is known by are among them.
MAX_CALLS = 64
_UNLOGGED = (
    "explaining it would send texts to {}, which a log alone never does: look at the hit before it is logged, or "
    'search with explain="eager"'
)


class IndexVectors:
    """The vectors that an index keeps, in place of paying for them: after one of them was compared, for each index."""

    def __init__(self) -> None:
        self._compared: tuple[object, object, bool] | None = None  # an explainer, an index, and whether they agree

    def give(self, explainer: Explainer, engine: Engine | None, documents: Sequence[RetrievedDocument]) -> None:
        """Tell the embedder what is kept for documents that it would have to embed."""
        if not explainer.scorer.is_metered:
            return
        try:
            texts = [document.text or "" for document in documents]
            both = zip(documents, explainer.vectors_at_hand(texts), strict=True)
            kept = _kept([document for document, known in both if known is None], engine)
            if kept and self._is_same(explainer, engine, *kept[0]):
                explainer.scorer.take(*zip(*kept, strict=True))
        except Exception as error:
            # A service that fails would fail again; where no more may be sent, some may be explained without.
            if isinstance(error, (EmbeddingFailed, ModelChanged)) and not isinstance(error, BudgetSpent):
                raise
            logger.debug("the index's vectors are of no use: %s: %s", type(error).__name__, error)

    def _is_same(self, explainer: Explainer, engine: Engine | None, passage: Passage, vector: Any) -> bool:
        """Whether the index keeps the embedding of the very text: known for this index, or of this one paid for."""
        scorer, index = explainer.scorer, None if engine is None else engine.handle
        known = self._compared
        if known is None or known[0] != ref(explainer) or known[1] is not index:
            own, theirs = Probes.of(scorer.embed([passage], "document")), Probes.of([np.asarray(vector)])
            if scorer.measure == "cosine":
                own, theirs = own.directions(), theirs.directions()
            known = self._compared = ref(explainer), index, own.distance(theirs) <= scorer.tolerance
        return known[2]


def _kept(documents: Sequence[RetrievedDocument], engine: Engine | None) -> list[tuple[Passage, Any]]:
    """The documents whose vectors came with them, or are kept as they were given."""
    is_exact = engine is not None and (engine.tolerance <= TOLERANCE or engine.gives_originals)
    ids = [name for document in documents if document.vector is None and (name := document.engine_id)]
    known = engine.vectors(ids) if engine is not None and is_exact and ids else {}
    both = [(one, known.get(one.engine_id) if one.vector is None else one.vector) for one in documents]
    return [(as_passage(one.text), vector) for one, vector in both if one.text is not None and vector is not None]


def told(moment: Moment, budget: Budget) -> tuple[Notice, ...]:
    """That an embedding object was asked, where a wrapper chose that by itself, and how often."""
    embedder = moment.search.embedder
    if moment.asked is None or embedder is None:
        return ()
    limit = "" if budget.max_calls is None else f", of at most {budget.max_calls}"
    text = (
        f"{embedder.name} holds no model that can be looked into: this is explained by the vectors that it "
        f"gives for edited texts ({budget.sent} were sent for this query{limit})."
    )
    return (Notice(BLACK_BOX, text, "note"),)


def unlogged(moment: Moment) -> str | None:
    """Why a log must not explain what was not looked at; None where that costs nothing, as far as is known.

    What a function makes is not known before it is called: a log lets it send nothing.
    """
    source: Any = moment.search.source
    embedder = moment.search.embedder
    if moment.asked is not None and embedder is not None:
        return _UNLOGGED.format(embedder.name)
    explainer = source if hasattr(source, "scorer") else moment.made
    if explainer is not None:
        return _UNLOGGED.format(explainer.scorer.name) if explainer.scorer.is_metered else None
    if isinstance(source, str):
        return _UNLOGGED.format(source.partition("#")[2] or "a service") if "://" in source else None
    is_embedding = callable(source) and not hasattr(source, "named_modules") and not makes_explainer(source)
    return _UNLOGGED.format(getattr(source, "__qualname__", type(source).__name__)) if is_embedding else None
