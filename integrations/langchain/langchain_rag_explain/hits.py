"""What the retrievers here share: how explanations are asked for, and documents that leave with their hits."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from langchain_core.callbacks import (
    AsyncCallbackManagerForRetrieverRun,
    CallbackManagerForRetrieverRun,
    adispatch_custom_event,
    dispatch_custom_event,
)
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever

from langchain_rag_explain.documents import ExplainedDocument, keys
from langchain_rag_explain.trace import is_heard
from rag_explain.results.hits import Hits
from rag_explain.retrieval import MAX_CALLS, report

logger = logging.getLogger("langchain_rag_explain")

EVENT = "rag_explain.explanation"
NAME = "rag_explain"
"""What tracing calls a retriever that explains."""


class HitRetriever(BaseRetriever):
    """A retriever whose documents have their hits beside them."""

    explain: Any = "lazy"
    """"lazy", "eager" or "off"; also `invoke(query, explain=...)`."""
    top: int | None = None
    """Only the first `top` documents get an explanation; None: all. Also `invoke(query, top=...)`."""
    time_limit: float | None = None
    """Seconds that eager explanations of one query may take."""
    unit: Any = None
    """"token", "word" or "sentence"; None: by words when looked at, by sentences where explanations are eager."""
    max_calls: int | None = MAX_CALLS
    """How many texts are sent at most for one query where what embeds holds no model; None: as many as it takes."""
    metadata_key: str | None = None
    """Where eager explanations also go into the documents' metadata, as plain data; None: nowhere."""

    def _modes(self) -> dict[str, Any]:
        """How explanations are asked for, as a `HitExplainer` takes it."""
        names = ("explain", "top", "time_limit", "unit", "max_calls")
        return {name: getattr(self, name) for name in names}

    def _delivered(
        self, query: str, documents: Sequence[Document], hits: Hits, run_manager: CallbackManagerForRetrieverRun
    ) -> list[Document]:
        """Copies of the documents with their hits beside them, which an event tells of."""
        if is_heard(run_manager):
            try:
                dispatch_custom_event(EVENT, _event(query, hits), config={"callbacks": run_manager.get_child()})
            except Exception as error:
                _log_unsent(error)
        return self._beside(documents, hits)

    async def _adelivered(
        self, query: str, documents: Sequence[Document], hits: Hits, run_manager: AsyncCallbackManagerForRetrieverRun
    ) -> list[Document]:
        if is_heard(run_manager):
            try:
                await adispatch_custom_event(EVENT, _event(query, hits), config={"callbacks": run_manager.get_child()})
            except Exception as error:
                _log_unsent(error)
        return self._beside(documents, hits)

    def _beside(self, documents: Sequence[Document], hits: Hits) -> list[Document]:
        report((keys(document), hit) for document, hit in zip(documents, hits, strict=True))
        both = zip(documents, hits, strict=True)
        return [ExplainedDocument.beside(document, hit, self.metadata_key) for document, hit in both]


def _event(query: str, hits: Hits) -> dict[str, Any]:
    return {"query": query, "hits": [hit.to_dict() for hit in hits]}


def _log_unsent(error: Exception) -> None:
    logger.warning("the explanation event was not sent: %s: %s", type(error).__name__, error)
