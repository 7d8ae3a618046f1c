"""Explanations on traces: one small span per logged answer, in OpenInference's words plus one family of ours.

    log = ExplanationLog("rag-log", export=TraceExport())

The span is a child of the span that was current when the answer was recorded, and is made in the background from the
record as it was written: what was redacted or not kept is not on the trace either. docs/log-format.md lists its
attributes. At most 20 documents go on a span: five attributes each, under the 128 that an SDK allows by default.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rag_explain.errors import MissingExtra
from rag_explain.log.record import LoggedHit, Record

try:
    from opentelemetry import context as otel_context
    from opentelemetry import trace
except ImportError as error:
    raise MissingExtra("opentelemetry-api", "otel") from error

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import TracerProvider
    from opentelemetry.util.types import AttributeValue

_MOST_DOCUMENTS = 20
_HIDDEN = ("INPUTS", "INPUT_TEXT", "OUTPUTS", "OUTPUT_TEXT", "RETRIEVAL_DOCUMENTS")
_CAPTURING = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
_NOT_CAPTURING = ("false", "0", "no_content", "event_only")


def content_is_captured(environment: Mapping[str, str] = os.environ) -> bool:
    """What the environment says: on, unless OpenInference hides something or OpenTelemetry's GenAI switch is off."""
    hidden = any(environment.get(f"OPENINFERENCE_HIDE_{name}", "").lower() in ("true", "1") for name in _HIDDEN)
    return not hidden and environment.get(_CAPTURING, "").lower() not in _NOT_CAPTURING


class TraceExport:
    """Puts every record of a log on the trace it belongs to. Extra: `otel`.

    Args:
        tracer_provider: where spans go; None: the process's own.
        capture_content: whether texts and words are exported; None: what the environment says at each record.
        pairs: how many word pairs per document.
        content_characters: how much of each document's text.
    """

    def __init__(
        self,
        tracer_provider: TracerProvider | None = None,
        *,
        capture_content: bool | None = None,
        pairs: int = 5,
        content_characters: int = 500,
    ) -> None:
        self._tracer = trace.get_tracer("rag_explain", tracer_provider=tracer_provider)
        self._capture = capture_content
        self._pairs = pairs
        self._characters = content_characters

    def context(self) -> Context:
        return otel_context.get_current()

    def export(self, record: Record, context: Context) -> None:
        content = content_is_captured() if self._capture is None else self._capture
        attributes, start = dict(self._attributes(record, content)), int(record.time.timestamp() * 1e9)
        self._tracer.start_span("rag_explain.explanation", context, attributes=attributes, start_time=start).end()

    def _attributes(self, record: Record, content: bool) -> Iterator[tuple[str, AttributeValue]]:
        yield "openinference.span.kind", "RETRIEVER"
        yield "rag_explain.record.id", record.id
        yield "rag_explain.library", record.library
        yield "rag_explain.documents", len(record.logged_hits)
        yield "rag_explain.explained", record.explained
        if content and record.query is not None:
            yield "input.value", record.query[: self._characters]
        why = next((hit.explanation.outline for hit in record.logged_hits if hit.explanation is not None), None)
        for name in ("method", "model", "fingerprint") if why is not None else ():
            yield f"rag_explain.{name}", getattr(why, name)
        for index, hit in enumerate(record.logged_hits[:_MOST_DOCUMENTS]):
            yield from self._document(f"retrieval.documents.{index}.document", hit, content)
            yield f"rag_explain.documents.{index}.explanation", _json(self._explanation(hit, content))

    def _document(self, prefix: str, hit: LoggedHit, content: bool) -> Iterator[tuple[str, AttributeValue]]:
        yield f"{prefix}.id", hit.id
        if hit.score is not None:
            yield f"{prefix}.score", hit.score
        if content and hit.text is not None:
            yield f"{prefix}.content", hit.text[: self._characters]
        metadata = _json(hit.metadata)
        if content and hit.metadata and len(metadata) <= self._characters:  # half an object would be no JSON
            yield f"{prefix}.metadata", metadata

    def _explanation(self, hit: LoggedHit, content: bool) -> dict[str, Any]:
        why = hit.explanation
        if why is None:
            return {"status": hit.status}
        score = why.outline.score
        found: dict[str, Any] = {"status": hit.status, "score": score, "gap": why.gap, "unattributed": why.unattributed}
        if content and why.outline.query is not None and why.outline.document is not None:
            top = why.pairs[: self._pairs]
            found["pairs"] = [[pair.query.text[:40], pair.document.text[:40], pair.value] for pair in top]
        return found


def _json(data: Any) -> str:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace").decode()
