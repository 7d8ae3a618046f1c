"""ExplanationPostprocessor: explanations for nodes that something else retrieved, filtered or reranked."""

from __future__ import annotations

from typing import Any

from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.retrievers.rag_explain.nodes import ExplainedNode, announce, found, query_string

from rag_explain.retrieval import HitExplainer, surrogate_reason

_UNSEEN = "a postprocessor does not see what scored the nodes; this encoder's similarity is explained"


class ExplanationPostprocessor(BaseNodePostprocessor):
    """The same nodes in the same order with the same scores, each with its explanation. Nodes that have one keep it."""

    explainer: Any = Field(exclude=True, description="An Explainer, or a model to make one from.")
    explain: Any = Field(default="lazy", description='"lazy", "eager", False, or how many nodes to explain.')
    budget: float | None = Field(default=None, description="Seconds that eager explanations of a query may take.")
    metric: str = Field(default="unknown", description="What the nodes' scores are, when they are the index's own.")
    surrogate: str | bool | None = Field(
        default=None, description="Why the scores are not this encoder's similarity; False: they are."
    )

    _retrieval: HitExplainer = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """Make what explains."""
        self._retrieval = HitExplainer(
            self.explainer,
            explain=self.explain,
            budget=self.budget,
            metric=self.metric,
            surrogate=surrogate_reason(self.surrogate, _UNSEEN if self.metric == "unknown" else None),
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
            hits = self._retrieval.hits("", found(fresh), False)
        else:
            query, surrogate = query_string(query_bundle)
            hits = self._retrieval.hits(query, found(fresh), surrogate=surrogate)
            announce(query, hits)
        explained = iter([ExplainedNode.beside(node, hit) for node, hit in zip(fresh, hits, strict=True)])
        return [node if isinstance(node, ExplainedNode) else next(explained) for node in nodes]
