"""What if, asked of a hit: by the Explainer and the index of its own search."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from rag_explain.errors import InvalidInput
from rag_explain.results.what_if import WhatIf
from rag_explain.retrieval.corpus import Corpus, EngineCorpus
from rag_explain.retrieval.places import Places, placed
from rag_explain.retrieval.search import Moment, RetrievedDocument, Search
from rag_explain.texts.passage import Passage

if TYPE_CHECKING:
    from rag_explain.explainer import Explainer


logger = logging.getLogger("rag_explain.retrieval")


_NOT_ONE = "the index does not tell one entry by its id"


class HitQuery(Protocol):
    """The query that a hit was found for, as the hits of one search share it."""

    text: str
    moment: Moment

    @property
    def explainer(self) -> Explainer: ...


def what_ifs(query: HitQuery, texts: Sequence[str | Passage], ids: Sequence[str | None]) -> list[WhatIf]:
    """The parts that matter of each document, left out; the rankings of edited queries are shared."""
    places = places_of(query.moment.search, query.explainer)
    return [_asked(query, text, name, places) for text, name in zip(texts, ids, strict=True)]


def asked_of(query: HitQuery, document: RetrievedDocument, **options: Any) -> WhatIf:
    """What a caller asks of one hit."""
    if document.text is None:
        raise InvalidInput("this hit has no text that could be changed")
    name = document.vector_id or document.id
    found = _asked(query, document.text, name, places_of(query.moment.search, query.explainer), **options)
    return found if document.whole is None or document.start is None else _within(found, document.whole, document.start)


def _asked(query: HitQuery, text: str | Passage, name: str | None, places: Places | None, **options: Any) -> WhatIf:
    try:
        key = None if places is None or name is None else _key(places.corpus, name)
    except Exception as error:  # a store that does not answer must not take the scores away
        logger.warning("ranks are not known: %s: %s", type(error).__name__, error)
        key = None
    found = placed(query.explainer, query.text, text, None if key is None else places, key, **options)
    return found if places is None or key is not None else replace(found, unknown_rank=_NOT_ONE)


def _key(corpus: Corpus, name: str) -> Hashable:
    found = corpus.named(name)
    return found[0].key if len(found) == 1 else None


def places_of(search: Search, explainer: Explainer) -> Places | None:
    """What tells ranks in the index that was searched; None where it cannot."""
    if search.corpus is not None:
        places: Places | None = search.corpus()
        return places
    return None if search.engine is None else Places(EngineCorpus(search.engine), explainer)


def _within(found: WhatIf, whole: str, start: int) -> WhatIf:
    """The same, of a chunk that stands at this character of a document, with places in the document."""
    changes = tuple(
        replace(one, spans=tuple((a + start, b + start) for a, b in one.spans)) if one.role == "document" else one
        for one in found.changes
    )
    return replace(found, document=whole, changes=changes)
