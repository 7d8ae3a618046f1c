"""The trace export by its short name: `rag_explain.log.otel.TraceExport`."""

from rag_explain.log.sinks.otel import TraceExport, content_is_captured

__all__ = ["TraceExport", "content_is_captured"]
