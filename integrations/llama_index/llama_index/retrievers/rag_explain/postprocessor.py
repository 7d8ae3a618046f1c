"""ExplanationPostprocessor: explanations for nodes that something else retrieved, filtered or reranked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import Field, PrivateAttr, ValidationError
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.retrievers.rag_explain.nodes import (
    ExplainedNode,
    announce,
    carried,
    found,
    last_stage,
    query_string,
    score_of,
)
from llama_index.retrievers.rag_explain.stores import embedder_of

from rag_explain import Hit
from rag_explain.errors import InvalidInput
from rag_explain.results.metric import UNKNOWN, Metric
from rag_explain.retrieval import MAX_CALLS, HitExplainer, Search, after, check_source, retriever_reason

_UNSEEN = "a postprocessor does not see what scored the nodes; this encoder's similarity is explained"


class ExplanationPostprocessor(BaseNodePostprocessor):
    """The same nodes in the same order with the same scores, each with its explanation.

    Nodes that have one keep it; what changed their scores or their order since is named in `hit.stages`.
    """

    explainer: Any = Field(exclude=True, description="An Explainer, or a model or embedding model to make one from.")
    explain: Any = Field(default="lazy", description='"lazy", "eager" or "off".')
    top: int | None = Field(default=None, description="Only the first `top` nodes get an explanation; None: all.")
    time_limit: float | None = Field(default=None, description="Seconds that eager explanations of a query may take.")
    unit: Any = Field(default=None, description="What explanations are by; None: words, or sentences where eager.")
    metric: str = Field(default="unknown", description="What the nodes' scores are, when they are the index's own.")
    max_calls: int | None = Field(
        default=MAX_CALLS, description="Texts that are sent at most for a query where what embeds holds no model."
    )
    surrogate: str | bool | None = Field(
        default=None, description="Why the scores are not this encoder's similarity; False: they are."
    )

    _hit_explainer: HitExplainer = PrivateAttr()

    def __init__(self, **fields: Any) -> None:
        """Make what explains."""
        # Not in model_post_init: pydantic would hide what is refused there behind an error of its own.
        _check(type(self), fields)
        try:
            super().__init__(**fields)
        except ValidationError as error:
            wrong = error.errors()[0]
            name, said = wrong["loc"][0], wrong["msg"].removeprefix("Input ")
            raise InvalidInput(f"{name} {said}, not {fields.get(str(name))!r}") from None
        limits: dict[str, Any] = {name: getattr(self, name) for name in ("top", "time_limit", "unit", "max_calls")}
        self._hit_explainer = HitExplainer(explain=self.explain, **limits)
        self._hit_explainer.prepare(self._search())

    def _search(self) -> Search:
        """What the fields say at the moment."""
        metric = Metric.named(self.metric)
        # An embedding model of LlamaIndex reads texts in its own way: an explainer is made that does the same.
        embedder = embedder_of(self.explainer) if isinstance(self.explainer, BaseEmbedding) else None
        return Search(
            source=embedder or self.explainer,
            embedder=embedder,
            metric=metric,
            surrogate=retriever_reason(self.surrogate, _UNSEEN if metric == UNKNOWN else None),
            name="the retriever",
        )

    def __getstate__(self) -> NoReturn:
        """LlamaIndex would leave out what explains, and the copy would fail on its first nodes."""
        raise InvalidInput("ExplanationPostprocessor cannot be pickled: make a new one where it is unpickled")

    @classmethod
    def class_name(cls) -> str:
        """The name in serialised pipelines."""
        return "ExplanationPostprocessor"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        fresh = [node for node in nodes if carried(node) is None]
        if query_bundle is None:  # without a query there is nothing to explain
            hits = self._hit_explainer.hits("", found(fresh), "off")
        else:
            query, reason = query_string(query_bundle)
            hits = self._hit_explainer.hits(query, found(fresh), surrogate=reason, search=self._search())
            announce(query, hits)
        made = iter(hits)
        known = [carried(node) or _at(rank, next(made)) for rank, node in enumerate(nodes, 1)]
        final = after(last_stage(nodes, known), known, [score_of(node) for node in nodes])
        both = zip(nodes, final, strict=True)
        return [node if carried(node) is hit else ExplainedNode.beside(node, hit) for node, hit in both]


def _check(kind: type[BaseNodePostprocessor], fields: Mapping[str, Any]) -> None:
    """Refuse what explains nothing, and names that are no fields, which pydantic would pass over."""
    unknown = [name for name in fields if name not in kind.model_fields]
    if unknown:
        own = ", ".join(name for name in kind.model_fields if name not in BaseNodePostprocessor.model_fields)
        raise InvalidInput(f"{kind.__name__} has no field {unknown[0]!r}: use {own}")
    check_source(fields.get("explainer"))


def _at(rank: int, hit: Hit) -> Hit:
    """A fresh hit at its place among all nodes."""
    return replace(hit, rank=rank, stages=tuple(replace(stage, rank=rank) for stage in hit.stages))
