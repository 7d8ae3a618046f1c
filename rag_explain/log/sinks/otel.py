"""Explanations on traces: one small span per logged answer, in OpenInference's words plus one family of ours.

    log = ExplanationLog("rag-log", export=TraceExport())

The span is a child of the span that was current when the answer was recorded, and is made in the background from the
record as it was written: what was redacted or not kept is not on the trace either. docs/log-format.md lists its
attributes. At most 20 documents go on a span: five attributes each, under the 128 that an SDK allows by default.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from rag_explain.errors import import_extra
from rag_explain.log.record import LoggedHit, Record
from rag_explain.results.notices import READING
from rag_explain.results.serialization import to_json

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider
    from opentelemetry.util.types import AttributeValue

otel_context = import_extra("opentelemetry.context", "opentelemetry-api", "otel")
trace = import_extra("opentelemetry.trace", "opentelemetry-api", "otel")
_MOST_DOCUMENTS = 20
_HIDDEN = ("INPUTS", "INPUT_TEXT", "OUTPUTS", "OUTPUT_TEXT", "RETRIEVAL_DOCUMENTS")
_CAPTURING = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
_NOT_CAPTURING = ("false", "0", "no_content", "event_only")


def content_is_captured(environment: Mapping[str, str] = os.environ) -> bool:
    """What the environment says: on, unless OpenInference hides something or OpenTelemetry's GenAI switch is off."""
    hidden = any(environment.get(f"OPENINFERENCE_HIDE_{name}", "").lower() in ("true", "1") for name in _HIDDEN)
    return not hidden and environment.get(_CAPTURING, "").lower() not in _NOT_CAPTURING


@dataclass(eq=False)
class TraceExport:
    """Puts every record of a log on the trace it belongs to. Extra: `otel`."""

    tracer_provider: TracerProvider | None = None  # where spans go; None: the process's own
    _: KW_ONLY
    capture_content: bool | None = None  # whether texts and words are exported; None: as the environment says
    pairs: int = 5  # word pairs per document
    content_characters: int = 500  # of each document's text

    def __post_init__(self) -> None:
        self._tracer = trace.get_tracer("rag_explain", tracer_provider=self.tracer_provider)

    def context(self) -> Any:
        return otel_context.get_current()

    def export(self, record: Record, context: Any) -> None:
        content = content_is_captured() if self.capture_content is None else self.capture_content
        attributes, start = dict(self._attributes(record, content)), int(record.time.timestamp() * 1e9)
        self._tracer.start_span("rag_explain.explanation", context, attributes=attributes, start_time=start).end()

    def _attributes(self, record: Record, content: bool) -> Iterator[tuple[str, AttributeValue]]:
        yield "openinference.span.kind", "RETRIEVER"
        yield "rag_explain.record.id", record.id
        yield "rag_explain.library", record.library
        yield "rag_explain.documents", len(record.logged_hits)
        yield "rag_explain.explained", record.explained
        if content and record.query is not None:
            yield "input.value", record.query[: self.content_characters]
        why = next((hit.explanation.outline for hit in record.logged_hits if hit.explanation is not None), None)
        for name in ("method", "model", "fingerprint") if why is not None else ():
            yield f"rag_explain.{name}", getattr(why, name)
        for index, hit in enumerate(record.logged_hits[:_MOST_DOCUMENTS]):
            yield from self._document(f"retrieval.documents.{index}.document", hit, content)
            yield f"rag_explain.documents.{index}.explanation", to_json(self._explanation(hit, content), compact=True)

    def _document(self, prefix: str, hit: LoggedHit, content: bool) -> Iterator[tuple[str, AttributeValue]]:
        yield f"{prefix}.id", hit.id
        if hit.score is not None:
            yield f"{prefix}.score", hit.score
        if content and hit.text is not None:
            yield f"{prefix}.content", hit.text[: self.content_characters]
        metadata = to_json(hit.metadata, compact=True)
        if content and hit.metadata and len(metadata) <= self.content_characters:  # half an object would be no JSON
            yield f"{prefix}.metadata", metadata

    def _explanation(self, hit: LoggedHit, content: bool) -> dict[str, Any]:
        why = hit.explanation
        if why is None:
            return {"status": hit.status}
        score = why.outline.score
        found: dict[str, Any] = {"status": hit.status, "score": score, "gap": why.gap, "unattributed": why.unattributed}
        if unread := [notice.text for notice in why.outline.notices if notice.code in READING]:  # they quote no text
            found["unread"] = unread
        if content and why.outline.query is not None and why.outline.document is not None:
            top = why.pairs[: self.pairs]
            found["pairs"] = [[pair.query.text[:40], pair.document.text[:40], pair.value] for pair in top]
        return found
