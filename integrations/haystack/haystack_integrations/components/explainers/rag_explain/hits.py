"""Hits as they go through a pipeline: copied for each component, traced, and kept in its snapshots."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Self

from rag_explain import Hit, Hits
from rag_explain.results.deferred import Deferred
from rag_explain.results.explanation import Explanation
from rag_explain.results.stages import Stage

_UNSAVED = "it was not computed before the pipeline's snapshot was written"


class PipelineHit(Hit):
    """A hit that a snapshot of a pipeline can keep: what was computed is there again when the pipeline is resumed."""

    @classmethod
    def of(cls, hit: Hit) -> Self:
        """The same hit. It shares its explanation with all of its copies."""
        return cls(**{field.name: getattr(hit, field.name) for field in fields(hit)})

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """What `to_dict` wrote."""
        kept = None if data["explanation"] is None else Explanation.from_dict(data["explanation"])
        handle = Deferred[Explanation].skipped(data["reason"] or _UNSAVED) if kept is None else Deferred.ready(kept)
        plain = {name: data[name] for name in ("id", "text", "rank", "score", "metric", "metadata")}
        return cls(**plain, stages=tuple(Stage.from_dict(stage) for stage in data["stages"]), handle=handle)


class PipelineHits(Hits):
    """What a `DocumentExplainer` returns: hits that a tracer can write, too."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for tracers. Never computes."""
        return {"hits": [hit.to_dict() for hit in self]}
