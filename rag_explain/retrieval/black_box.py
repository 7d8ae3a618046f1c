"""A black box in a wrapper: what embeds the documents holds no model, so each look sends edited texts to it.

That may cost money. So nothing is sent before an explanation is looked at, no more than a limit for each query, and
never because something is logged.
"""

from __future__ import annotations

from typing import Any

from rag_explain.budget import Budget
from rag_explain.results.notices import BLACK_BOX, Notice
from rag_explain.retrieval.search import Moment

# Texts that are sent for one query at most, unless told otherwise: those that an embedder is known by are among them.
MAX_CALLS = 64
_UNLOGGED = (
    "explaining it would send texts to {}, which a log alone never does: look at the hit before it is logged, or "
    'search with explain="eager"'
)


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
    is_address = isinstance(source, str) and "://" in source
    return _UNLOGGED.format(source) if is_address else None
