"""ExplainingRetriever: any LlamaIndex retriever whose nodes say why they were found."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.indices.base import BaseIndex
from llama_index.core.indices.vector_store.retrievers import VectorIndexRetriever
from llama_index.core.schema import BaseNode, NodeWithScore, QueryBundle
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.types import VectorStoreQueryMode
from llama_index.retrievers.rag_explain.nodes import ExplainedNode, announce, embedded, found, query_string

from rag_explain.errors import InvalidInput
from rag_explain.retrieval import Explain, ExplainerSource, HitExplainer, check_explain, find_model, surrogate_reason


class ExplainingRetriever(BaseRetriever):
    """The same nodes in the same order with the same scores, each with its explanation.

        retriever = ExplainingRetriever(index.as_retriever())

    Args:
        base: any retriever.
        explainer: an Explainer, or a model to make one from; None: the SentenceTransformer of the base's embedding
            model.
        explain: True or "lazy", "eager", False, or how many nodes to explain.
        budget: seconds that eager explanations of one query may take.
        metric: what the base's scores are: "cosine", "inner product", "squared L2", "cosine distance"; None: found
            out, for the stores that tell.
        surrogate: why the nodes were not chosen by this encoder's similarity alone; False: they were; None: found out.
    """

    def __init__(
        self,
        base: BaseRetriever,
        explainer: ExplainerSource | None = None,
        *,
        explain: Explain = "lazy",
        budget: float | None = None,
        metric: str | None = None,
        surrogate: str | bool | None = None,
    ) -> None:
        super().__init__(callback_manager=base.callback_manager)
        self.base = base
        model = find_model(base)
        source = model if explainer is None else explainer
        if source is None:
            raise InvalidInput(
                f"no SentenceTransformer was found in {type(base).__name__}: "
                "pass explainer=Explainer(model) with the model that embeds its nodes"
            )
        metric = metric or _metric(base)
        known = model is not None or metric != "unknown"  # a score to compare with is better than any assumption
        self._retrieval = HitExplainer(
            source,
            explain=explain,
            budget=budget,
            metric=metric,
            surrogate=surrogate_reason(surrogate, _surrogate(base, known=known)),
        )
        self._explain = explain

    def with_explain(self, explain: Explain) -> ExplainingRetriever:
        """The same retriever in another mode, for one caller."""
        check_explain(explain)
        other = copy.copy(self)
        other._explain = explain
        return other

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        nodes = self.base.retrieve(query_bundle)
        query, surrogate = query_string(query_bundle)
        hits = self._retrieval.hits(query, found(nodes), self._explain, surrogate=surrogate)
        announce(query, hits)
        return [ExplainedNode.beside(node, hit) for node, hit in zip(nodes, hits, strict=True)]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        nodes = await self.base.aretrieve(query_bundle)
        query, surrogate = query_string(query_bundle)
        hits = await self._retrieval.ahits(query, found(nodes), self._explain, surrogate=surrogate)
        announce(query, hits)
        return [ExplainedNode.beside(node, hit) for node, hit in zip(nodes, hits, strict=True)]

    def precompute(self, nodes: Iterable[BaseNode] | BaseIndex[Any] | None = None, **options: Any) -> int:
        """Fill the explainer's store with the factors of these nodes, or of all in an index.

        None: the index behind the wrapped retriever. Options are those of `Explainer.precompute`.
        """
        if nodes is None:
            nodes = getattr(self.base, "_index", None)
        if nodes is None:
            raise InvalidInput(f"{type(self.base).__name__} has no index: pass the nodes to precompute")
        if isinstance(nodes, BaseIndex):
            nodes = [node for node in nodes.docstore.docs.values() if isinstance(node, BaseNode)]
            if not nodes:
                raise InvalidInput("the index keeps its texts in the vector store: pass the nodes to precompute")
        texts = {node.node_id: text for node in nodes if (text := embedded(node)) is not None}
        return self._retrieval.precompute(list(texts.values()), ids=list(texts), **options)


def _metric(base: BaseRetriever) -> str:
    """What the scores are, for the stores that tell."""
    store = getattr(base, "_vector_store", None)
    if isinstance(store, SimpleVectorStore):
        return "cosine"
    index = getattr(store, "_faiss_index", None)  # its "similarities" are the raw distances of the index
    return {0: "inner product", 1: "squared L2"}.get(getattr(index, "metric_type", -1), "unknown")


def _surrogate(base: BaseRetriever, *, known: bool) -> str | None:
    """Why the nodes were not chosen by this encoder's similarity alone, or None when they were."""
    if not isinstance(base, VectorIndexRetriever):
        return f"the nodes were chosen by {type(base).__name__}, not by this encoder's similarity alone"
    if base._vector_store_query_mode != VectorStoreQueryMode.DEFAULT:
        return (
            f"the index was asked in {base._vector_store_query_mode.value} mode, not by this encoder's similarity alone"
        )
    if not known:
        return f"the nodes were scored by {type(base._embed_model).__name__}, which is not known to be this encoder"
    return None
