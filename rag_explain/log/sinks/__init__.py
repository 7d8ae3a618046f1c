"""Where records go beside the log: a sink is a module here with a class that has these two methods."""

from typing import Any, Protocol

from rag_explain.log.record import Record


class Sink(Protocol):
    """Takes records once they are written, for example `rag_explain.log.otel.TraceExport`."""

    def context(self) -> Any:
        """What must be taken from the caller's thread. Must be fast."""

    def export(self, record: Record, context: Any) -> None:
        """Called in the background with the record as it was written."""
