"""ExplanationPostprocessor: explanations for nodes that something else retrieved, filtered or reranked."""

from __future__ import annotations

from typing import Any

from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.retrievers.rag_explain.nodes import ExplainedNode, announce, found, query_string

from rag_explain.results.metric import UNKNOWN, Metric
from rag_explain.retrieval import HitExplainer, retriever_reason

_UNSEEN = "a postprocessor does not see what scored the nodes; this encoder's similarity is explained"


class ExplanationPostprocessor(BaseNodePostprocessor):
    """The same nodes in the same order with the same scores, each with its explanation. Nodes that have one keep it."""

    explainer: Any = Field(exclude=True, description="An Explainer, or a model to make one from.")
    explain: Any = Field(default="lazy", description='"lazy", "eager" or "off".')
    top: int | None = Field(default=None, description="Only the first `top` nodes get an explanation; None: all.")
    time_limit: float | None = Field(default=None, description="Seconds that eager explanations of a query may take.")
    metric: str = Field(default="unknown", description="What the nodes' scores are, when they are the index's own.")
    surrogate: str | bool | None = Field(
        default=None, description="Why the scores are not this encoder's similarity; False: they are."
    )

    _hit_explainer: HitExplainer = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """Make what explains."""
        metric = Metric.named(self.metric)
        self._hit_explainer = HitExplainer(
            self.explainer,
            explain=self.explain,
            top=self.top,
            time_limit=self.time_limit,
            metric=metric,
            surrogate=retriever_reason(self.surrogate, _UNSEEN if metric == UNKNOWN else None),
        )

    @classmethod
    def class_name(cls) -> str:
        """The name in serialised pipelines."""
        return "ExplanationPostprocessor"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        fresh = [node for node in nodes if not isinstance(node, ExplainedNode)]
        if query_bundle is None:  # without a query there is nothing to explain
            hits = self._hit_explainer.hits("", found(fresh), "off")
        else:
            query, reason = query_string(query_bundle)
            hits = self._hit_explainer.hits(query, found(fresh), surrogate=reason)
            announce(query, hits)
        explained = iter([ExplainedNode.beside(node, hit) for node, hit in zip(fresh, hits, strict=True)])
        return [node if isinstance(node, ExplainedNode) else next(explained) for node in nodes]
