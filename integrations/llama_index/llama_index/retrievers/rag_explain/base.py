"""ExplainingRetriever: any LlamaIndex retriever whose nodes say why they were found."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.indices.base import BaseIndex
from llama_index.core.indices.vector_store import VectorStoreIndex
from llama_index.core.indices.vector_store.retrievers import VectorIndexRetriever
from llama_index.core.schema import BaseNode, NodeWithScore, QueryBundle
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores.types import VectorStoreQueryMode
from llama_index.retrievers.rag_explain._internals import embedding_model, query_mode, retriever_index
from llama_index.retrievers.rag_explain.nodes import ExplainedNode, announce, embedded, found, query_string, score_of
from llama_index.retrievers.rag_explain.stores import (
    embedder_of,
    engine_of_retriever,
    other_search,
    score_metric,
    stored_nodes,
)

from rag_explain.errors import InvalidInput
from rag_explain.results.hits import Hits
from rag_explain.results.metric import UNKNOWN, Metric
from rag_explain.results.precomputed import Precomputed
from rag_explain.retrieval import (
    Engine,
    ExplainerSource,
    ExplainMode,
    HitExplainer,
    Search,
    check_mode,
    has_model,
    held_model,
    retriever_reason,
    scored,
)
from rag_explain.types import Unit

_LED_BY = "the IndexNode that led to it"  # LlamaIndex gives a node that it found in this way the IndexNode's score


class ExplainingRetriever(BaseRetriever):
    """The same nodes in the same order with the same scores, each with its explanation.

        retriever = ExplainingRetriever(index.as_retriever())

    Args:
        base: any retriever.
        explainer: an Explainer, or a model to make one from; None: the SentenceTransformer of the base's embedding
            model, which then reads texts as that does: its instructions, length and dimensions.
        explain, top, time_limit, unit: see `rag_explain.retrieval.HitExplainer`.
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
        unit: Unit | None = None,
        metric: str | None = None,
        surrogate: str | bool | None = None,
    ) -> None:
        super().__init__(callback_manager=base.callback_manager)
        self.base = base
        is_found = has_model(embedder_of(embedding_model(base)))
        self._explainer, self._surrogate = explainer or (None if is_found else held_model(base)), surrogate
        self._metric = None if metric is None else Metric.named(metric)
        self._engine: Engine | None = None  # as it was in the last search: it may have asked a server
        search = self._search()
        if self._explainer is None and not is_found:
            raise InvalidInput(
                f"no SentenceTransformer was found in {type(base).__name__}: "
                "pass explainer=Explainer(model) with the model that embeds its nodes"
            )
        self._set_mode(explain, top)
        self._hit_explainer = HitExplainer(explain=explain, time_limit=time_limit, unit=unit)
        self._hit_explainer.prepare(search)

    def _search(self) -> Search:
        """What searches, embeds and scores at the moment: attributes, which people may set at any time."""
        base = self.base
        embedder = embedder_of(embedding_model(base))
        self._engine = engine = engine_of_retriever(base, self._engine)
        metric = score_metric(engine) if self._metric is None else self._metric
        is_plain = query_mode(base) == VectorStoreQueryMode.DEFAULT and other_search(base) is None
        return Search(
            source=self._explainer or embedder,
            embedder=embedder,
            engine=engine,
            # Scores are no similarities in another mode, whatever the metric is.
            metric=metric if is_plain else UNKNOWN,
            surrogate=retriever_reason(self._surrogate, _surrogate(base)),
            name=type(base).__name__,
        )

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
        documents = found(nodes, self._is_followed)
        options: dict[str, Any] = {"top": self._top, "surrogate": reason, "search": self._search()}
        hits = self._hit_explainer.hits(query, documents, self._explain, **options)
        return self._beside(query, nodes, hits)

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        nodes = await self.base.aretrieve(query_bundle)
        query, reason = query_string(query_bundle)
        documents = found(nodes, self._is_followed)
        options: dict[str, Any] = {"top": self._top, "surrogate": reason, "search": self._search()}
        hits = await self._hit_explainer.ahits(query, documents, self._explain, **options)
        return self._beside(query, nodes, hits)

    def _beside(self, query: str, nodes: list[NodeWithScore], hits: Hits) -> list[NodeWithScore]:
        pairs = list(zip(nodes, hits, strict=True))
        hits = Hits(scored(hit, _LED_BY, score_of(node)) if self._is_followed(node) else hit for node, hit in pairs)
        announce(query, hits)
        return [ExplainedNode.beside(node, hit) for node, hit in zip(nodes, hits, strict=True)]

    def _is_followed(self, node: NodeWithScore) -> bool:
        """Whether an IndexNode led to this node, which then has the score of that one."""
        index = retriever_index(self.base)
        if isinstance(index, VectorStoreIndex) and not index.vector_store.stores_text:
            docstore = index.docstore  # of all nodes that are in the index; only one in memory is asked for each node
            return isinstance(docstore, SimpleDocumentStore) and not docstore.document_exists(node.node_id)
        led_to = getattr(self.base, "object_map", {}).values()  # one that does not call the base's __init__ has none
        return any(isinstance(other, BaseNode) and other.node_id == node.node_id for other in led_to)

    def precompute(self, nodes: Iterable[BaseNode] | BaseIndex[Any] | None = None, **options: Any) -> Precomputed:
        """Fill the explainer's store with the factors of these nodes, or of all in an index.

        None: the index of the wrapped retriever. Options and result are those of `Explainer.precompute`.
        """
        if nodes is None:
            nodes = retriever_index(self.base)
        if nodes is None:
            raise InvalidInput(f"{type(self.base).__name__} has no index: pass the nodes to precompute")
        if isinstance(nodes, BaseIndex):
            nodes = stored_nodes(nodes)
        nodes = list(nodes)
        if not all(isinstance(node, BaseNode) for node in nodes):
            raise InvalidInput("precompute takes a list of nodes, or an index")
        texts = {node.node_id: text for node in nodes if (text := embedded(node)) is not None}
        return self._hit_explainer.precompute(list(texts.values()), self._search(), ids=list(texts), **options)


def _surrogate(base: BaseRetriever) -> str | None:
    """Why the nodes were not chosen by this encoder's similarity alone, or None when they were."""
    if type(base) is not VectorIndexRetriever:  # a class of its own may do anything with the query
        return f"the nodes were chosen by {type(base).__name__}, not by this encoder's similarity alone"
    mode, by_settings = query_mode(base), other_search(base)
    if mode != VectorStoreQueryMode.DEFAULT or by_settings is not None:
        return f"the index was asked in {by_settings or mode.value} mode, not by this encoder's similarity alone"
    return None
