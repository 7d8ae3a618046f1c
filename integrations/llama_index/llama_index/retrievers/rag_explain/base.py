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
from llama_index.retrievers.rag_explain._internals import (
    embedding_model,
    faiss_index,
    query_mode,
    retriever_index,
    retriever_store,
)
from llama_index.retrievers.rag_explain.nodes import ExplainedNode, announce, embedded, found, query_string

from rag_explain.errors import InvalidInput
from rag_explain.results.metric import UNKNOWN, Metric
from rag_explain.retrieval import (
    ExplainerSource,
    ExplainMode,
    HitExplainer,
    check_mode,
    faiss_metric,
    held_model,
    retriever_reason,
)


class ExplainingRetriever(BaseRetriever):
    """The same nodes in the same order with the same scores, each with its explanation.

        retriever = ExplainingRetriever(index.as_retriever())

    Args:
        base: any retriever.
        explainer: an Explainer, or a model to make one from; None: the SentenceTransformer of the base's embedding
            model.
        explain, top, time_limit: see `rag_explain.retrieval.HitExplainer`.
        metric: what the base's scores are, by the name of a `rag_explain.results.metric.Metric`; None: found out, for
            the stores that tell.
        surrogate: why the nodes were not chosen by this encoder's similarity alone; False: they were; None: found out.
    """

    def __init__(
        self,
        base: BaseRetriever,
        explainer: ExplainerSource | None = None,
        *,
        explain: ExplainMode = "lazy",
        top: int | None = None,
        time_limit: float | None = None,
        metric: str | None = None,
        surrogate: str | bool | None = None,
    ) -> None:
        super().__init__(callback_manager=base.callback_manager)
        self.base = base
        model = held_model(base, embedding_model(base))
        source = model if explainer is None else explainer
        if source is None:
            raise InvalidInput(
                f"no SentenceTransformer was found in {type(base).__name__}: "
                "pass explainer=Explainer(model) with the model that embeds its nodes"
            )
        found_metric = _metric(base) if metric is None else Metric.named(metric)
        # Where there is a score to compare with, every explanation is checked against it: nothing need be assumed.
        known = model is not None or found_metric != UNKNOWN
        self._hit_explainer = HitExplainer(
            source,
            time_limit=time_limit,
            metric=found_metric,
            surrogate=retriever_reason(surrogate, _surrogate(base, known=known)),
        )
        self._set_mode(explain, top)

    def with_explain(self, explain: ExplainMode, *, top: int | None = None) -> ExplainingRetriever:
        """The same retriever in another mode, for one caller."""
        other = copy.copy(self)
        other._set_mode(explain, top)
        return other

    def _set_mode(self, explain: ExplainMode, top: int | None) -> None:
        check_mode(explain, top)
        self._explain = explain
        self._top = top

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        nodes = self.base.retrieve(query_bundle)
        query, reason = query_string(query_bundle)
        hits = self._hit_explainer.hits(query, found(nodes), self._explain, top=self._top, surrogate=reason)
        announce(query, hits)
        return [ExplainedNode.beside(node, hit) for node, hit in zip(nodes, hits, strict=True)]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        nodes = await self.base.aretrieve(query_bundle)
        query, reason = query_string(query_bundle)
        hits = await self._hit_explainer.ahits(query, found(nodes), self._explain, top=self._top, surrogate=reason)
        announce(query, hits)
        return [ExplainedNode.beside(node, hit) for node, hit in zip(nodes, hits, strict=True)]

    def precompute(self, nodes: Iterable[BaseNode] | BaseIndex[Any] | None = None, **options: Any) -> int:
        """Fill the explainer's store with the factors of these nodes, or of all in an index.

        None: the index of the wrapped retriever. Options are those of `Explainer.precompute`.
        """
        if nodes is None:
            nodes = retriever_index(self.base)
        if nodes is None:
            raise InvalidInput(f"{type(self.base).__name__} has no index: pass the nodes to precompute")
        if isinstance(nodes, BaseIndex):
            nodes = [node for node in nodes.docstore.docs.values() if isinstance(node, BaseNode)]
            if not nodes:
                raise InvalidInput("the index keeps its texts in the vector store: pass the nodes to precompute")
        texts = {node.node_id: text for node in nodes if (text := embedded(node)) is not None}
        return self._hit_explainer.precompute(list(texts.values()), ids=list(texts), **options)


def _metric(base: BaseRetriever) -> Metric:
    """What the scores are, for the stores that tell. In other modes than the default they are no similarities."""
    if query_mode(base) != VectorStoreQueryMode.DEFAULT:
        return UNKNOWN
    store = retriever_store(base)
    if isinstance(store, SimpleVectorStore):
        return Metric("cosine")
    return faiss_metric(faiss_index(store))  # its "similarities" are the raw distances of the index


def _surrogate(base: BaseRetriever, *, known: bool) -> str | None:
    """Why the nodes were not chosen by this encoder's similarity alone, or None when they were."""
    if not isinstance(base, VectorIndexRetriever):
        return f"the nodes were chosen by {type(base).__name__}, not by this encoder's similarity alone"
    mode = query_mode(base)
    if mode != VectorStoreQueryMode.DEFAULT:
        return f"the index was asked in {mode.value} mode, not by this encoder's similarity alone"
    if not known:
        model = type(embedding_model(base)).__name__
        return f"the nodes were scored by {model}, which is not known to be this encoder"
    return None
