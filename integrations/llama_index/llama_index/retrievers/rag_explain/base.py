"""ExplainingRetriever: any LlamaIndex retriever whose nodes say why they were found."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.indices.base import BaseIndex
from llama_index.core.indices.vector_store import VectorStoreIndex
from llama_index.core.indices.vector_store.retrievers import VectorIndexRetriever
from llama_index.core.schema import BaseNode, NodeWithScore, QueryBundle
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores.types import VectorStoreQueryMode
from llama_index.retrievers.rag_explain._internals import fuses_inside, query_mode, retriever_index, search_options
from llama_index.retrievers.rag_explain.hidden import hidden_legs
from llama_index.retrievers.rag_explain.nested import (
    loose_encoders,
    retriever_encoder,
    retrievers_inside,
    returned_nodes,
)
from llama_index.retrievers.rag_explain.nodes import (
    ExplainedNode,
    announce,
    carried,
    embedded,
    found,
    query_string,
    score_of,
)
from llama_index.retrievers.rag_explain.questions import Questions
from llama_index.retrievers.rag_explain.stores import (
    embedder_of,
    engine_of_retriever,
    other_search,
    score_metric,
    stored_nodes,
)
from llama_index.retrievers.rag_explain.trace import Told, listening

from rag_explain.errors import InvalidInput
from rag_explain.results.hits import Hit, Hits
from rag_explain.results.metric import UNKNOWN, Metric
from rag_explain.results.precomputed import Precomputed
from rag_explain.retrieval import (
    MAX_CALLS,
    Diversity,
    Encoder,
    Encoders,
    Engine,
    ExplainerSource,
    ExplainMode,
    HitExplainer,
    InnerHits,
    Legs,
    Run,
    Search,
    check_mode,
    check_source,
    collecting,
    readable,
    report,
    retriever_reason,
    scored,
)
from rag_explain.types import Unit

_LED_BY = "the IndexNode that led to it"  # LlamaIndex gives a node that it found in this way the IndexNode's score


class ExplainingRetriever(Questions, BaseRetriever):
    """The same nodes in the same order with the same scores, each with its explanation.

        retriever = ExplainingRetriever(index.as_retriever())

    Args:
        base: any retriever.
        explainer: an Explainer, or a model or embedding model to make one from; None: the SentenceTransformer of the
            base's embedding model, however deep in the base that is, which then reads texts as that does: its
            instructions, length and dimensions. Where that holds none, its own vectors of edited texts explain:
            nothing is sent before an explanation is looked at.
        explain, top, time_limit, unit, max_calls: see `rag_explain.retrieval.HitExplainer`.
        metric: what the base's scores are, by the name of a `rag_explain.results.metric.Metric`; None: found out, for
            the stores that tell.
        surrogate: why the nodes were not chosen by this encoder's similarity alone; False: they were; None: found out.
        ask_legs: whether a store that fuses inside itself and tells nothing of its legs (a QdrantVectorStore in hybrid
            mode) is asked for each of them again when the stages of a node are looked at.
    """

    def __init__(
        self,
        base: BaseRetriever,
        explainer: ExplainerSource | BaseEmbedding | None = None,
        *,
        explain: ExplainMode = "lazy",
        top: int | None = None,
        time_limit: float | None = None,
        unit: Unit | None = None,
        metric: str | None = None,
        surrogate: str | bool | None = None,
        max_calls: int | None = MAX_CALLS,
        ask_legs: bool = False,
    ) -> None:
        _check(base, explainer, surrogate)
        super().__init__(callback_manager=base.callback_manager)
        self.base, self._explainer, self._surrogate = base, explainer, surrogate
        self._metric, self._encoders = None if metric is None else Metric.named(metric), Encoders()
        self._told, self._ask_legs = Told(Legs()), ask_legs
        self._engine: Engine | None = None  # as it was in the last search: it may have asked a server
        search = self._search()
        if search.source is None:
            self._encoders.refuse(self._encoders_inside(), base, "nodes")
        self._set_mode(explain, top)
        self._hit_explainer = HitExplainer(explain=explain, time_limit=time_limit, unit=unit, max_calls=max_calls)
        self._hit_explainer.prepare(search)

    def _search(self) -> Search:
        """What searches, embeds and scores at the moment: attributes, which people may set at any time."""
        base = self.base
        given = embedder_of(self._explainer) if isinstance(self._explainer, BaseEmbedding) else self._explainer
        source, embedder = self._encoders.chosen(self._encoders_inside(), given)
        self._engine = engine = engine_of_retriever(base, self._engine)
        metric = score_metric(engine) if self._metric is None else self._metric
        is_plain = query_mode(base) == VectorStoreQueryMode.DEFAULT and other_search(base) is None
        return Search(
            source=source,
            embedder=embedder,
            engine=engine,
            # Scores are no similarities in another mode, whatever the metric is.
            metric=metric if is_plain else UNKNOWN,
            surrogate=retriever_reason(self._surrogate, _surrogate(base)),
            name=type(base).__name__,
            diversity=_diversity(base),
        )

    def _read(self) -> Search:
        return readable(self._search, None if isinstance(self._explainer, BaseEmbedding) else self._explainer)

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
        with collecting() as inner, self._listening() as runs:
            nodes = self.base.retrieve(query_bundle)
        query, options = self._options(query_bundle, nodes, inner, runs)
        hits = self._hit_explainer.hits(query, found(nodes, self._is_followed), self._explain, **options)
        return self._beside(query, nodes, hits)

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        with collecting() as inner, self._listening() as runs:
            nodes = await self.base.aretrieve(query_bundle)
        query, options = self._options(query_bundle, nodes, inner, runs)
        hits = await self._hit_explainer.ahits(query, found(nodes, self._is_followed), self._explain, **options)
        return self._beside(query, nodes, hits)

    def _listening(self) -> AbstractContextManager[list[Run]]:
        return nullcontext([]) if self._explain == "off" else listening(self.base)

    def _options(
        self, bundle: QueryBundle, nodes: list[NodeWithScore], inner: InnerHits, runs: list[Run]
    ) -> tuple[str, dict[str, Any]]:
        query, reason = query_string(bundle)
        known = [_known(node, inner) for node in nodes]
        search = self._read()
        stages = self._told(runs, bundle.query_str, nodes, search)
        if self._ask_legs and type(self.base) is VectorIndexRetriever:
            stages = hidden_legs(self.base, bundle, nodes, search) or stages
        return query, {"top": self._top, "surrogate": reason, "search": search, "known": known, "stages": stages}

    def _beside(self, query: str, nodes: list[NodeWithScore], hits: Hits) -> list[NodeWithScore]:
        pairs = list(zip(nodes, hits, strict=True))
        hits = Hits(scored(hit, _LED_BY, score_of(node)) if self._is_followed(node) else hit for node, hit in pairs)
        announce(query, hits)
        report(((node.node.hash,), hit) for node, hit in zip(nodes, hits, strict=True))
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

        None: the indexes that the wrapped retriever searches. Options and result are those of `Explainer.precompute`.
        """
        if nodes is None:
            nodes = self._returned_nodes()
        elif isinstance(nodes, BaseIndex):
            nodes = stored_nodes(nodes)
        nodes = list(nodes) if isinstance(nodes, Iterable) else [nodes]
        if not all(isinstance(node, BaseNode) for node in nodes):
            raise InvalidInput("precompute takes a list of nodes, or an index")
        texts = {node.node_id: text for node in nodes if (text := embedded(node)) is not None}
        return self._hit_explainer.precompute(list(texts.values()), self._search(), ids=list(texts), **options)

    def _inside(self) -> list[Any]:
        return retrievers_inside(self.base, ExplainingRetriever)

    def _returned_nodes(self) -> list[BaseNode]:
        inside = self._inside()
        wrapped = [one for one in inside if isinstance(one, ExplainingRetriever)]
        indexes = {id(index): index for one in inside if (index := retriever_index(one)) is not None}
        if not wrapped and not indexes:
            raise InvalidInput(f"{type(self.base).__name__} has no index: pass the nodes to precompute")
        inner = [node for one in wrapped for node in one._returned_nodes()]
        return returned_nodes(self.base, list(indexes.values())) + inner

    def _encoders_inside(self) -> Iterator[Encoder]:
        """Each with what explains its nodes: a wrapped retriever inside knows its own."""
        is_any = False
        for one in self._inside():
            search = one._search() if isinstance(one, ExplainingRetriever) else None
            encoder = retriever_encoder(one) if search is None else (search.source, search.embedder)
            is_any |= encoder[0] is not None
            yield encoder
        if not is_any:
            yield from loose_encoders(self.base)

    def _searching(self) -> list[BaseRetriever]:
        inside = self._inside()
        wrapped = [found for one in inside if isinstance(one, ExplainingRetriever) for found in one._searching()]
        own = [one for one in inside if not isinstance(one, ExplainingRetriever) and retriever_index(one) is not None]
        return own + wrapped

    def _nodes(self, query: str) -> list[NodeWithScore]:
        return self.with_explain("lazy").retrieve(query)


def _check(base: object, explainer: object, surrogate: object) -> None:
    """Refuse what a retriever cannot be made with."""
    if isinstance(base, BaseIndex):
        raise InvalidInput(f"base must be a LlamaIndex retriever, not {type(base).__name__}: pass index.as_retriever()")
    if not hasattr(base, "retrieve") or not hasattr(base, "callback_manager"):
        raise InvalidInput(f"base must be a LlamaIndex retriever, not {type(base).__name__}")
    if explainer is not None:
        check_source(explainer)
    if not (surrogate is None or isinstance(surrogate, (str, bool))):
        raise InvalidInput(f"surrogate must be a sentence, False or None, not {surrogate!r}")


def _known(node: NodeWithScore, inner: InnerHits) -> Hit | None:
    """The hit of a wrapped retriever inside the base: the node's own, or that of an equal node."""
    own = carried(node)
    if own is not None and own.status != "skipped":
        return own
    return inner.find((node.node.hash,)) if inner else None


def _diversity(base: BaseRetriever) -> Diversity | None:
    """How a retriever over vectors weighs relevance against redundancy, where it does."""
    if type(base) is not VectorIndexRetriever or query_mode(base) != VectorStoreQueryMode.MMR:
        return None
    told = search_options(base).get("mmr_threshold")
    return Diversity(0.5 if told is None else float(told), "last")


def _surrogate(base: BaseRetriever) -> str | None:
    """Why the nodes were not chosen by this encoder's similarity alone, or None when they were."""
    if type(base) is not VectorIndexRetriever:  # a class of its own may do anything with the query
        return f"the nodes were chosen by {type(base).__name__}, not by this encoder's similarity alone"
    mode, by_settings = query_mode(base), other_search(base)
    if mode != VectorStoreQueryMode.DEFAULT or by_settings is not None:
        told = f"the index was asked in {by_settings or mode.value} mode, not by this encoder's similarity alone"
        return told + "; its legs are not told: ask_legs=True asks for them too" * fuses_inside(base)
    return None
