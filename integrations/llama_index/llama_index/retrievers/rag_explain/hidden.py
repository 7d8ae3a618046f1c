"""The legs of a QdrantVectorStore in hybrid mode, which fuses what its server finds and returns no score of either."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.core.vector_stores.types import VectorStoreQueryMode
from llama_index.retrievers.rag_explain._internals import found_in_mode, fuses_inside, retriever_store, vector_share
from llama_index.retrievers.rag_explain.stores import score_metric
from llama_index.retrievers.rag_explain.trace import found_of

from rag_explain.results.deferred import Deferred
from rag_explain.results.explanation import Explanation
from rag_explain.results.stages import Stage
from rag_explain.retrieval import Combination, Run, Search, asked_again, fusion

_MODES = {"dense": VectorStoreQueryMode.DEFAULT, "sparse": VectorStoreQueryMode.SPARSE}


def hidden_legs(
    base: BaseRetriever, bundle: QueryBundle, nodes: Sequence[NodeWithScore], search: Search
) -> Callable[[int, Deferred[Explanation]], tuple[Stage, ...]] | None:
    """What tells the stages of what this retriever found, by asking it again for each leg; None for other stores."""
    if not fuses_inside(base):
        return None
    found = [found_of(node) for node in nodes]
    asked = QueryBundle(bundle.query_str, custom_embedding_strs=bundle.embedding_strs, embedding=bundle.embedding)
    metric = score_metric(search.engine).name
    return asked_again(search.name, bundle.query_str, found, metric, partial(_combined, base, asked))


def _combined(base: BaseRetriever, bundle: QueryBundle) -> Combination:
    store, share = type(retriever_store(base)).__name__, vector_share(base)
    runs = [
        Run(
            f"{store} {name}",
            base,
            bundle.query_str,
            found=[found_of(one) for one in found_in_mode(base, mode, bundle)],
        )
        for name, mode in _MODES.items()
    ]
    weights = [share, 1 - share]
    legs = [
        fusion.Leg([(one.keys[0], one.score) for one in run.found or ()], weight)
        for run, weight in zip(runs, weights, strict=True)
    ]
    return Combination(runs, "fusion", "relative score", fusion.relative(legs), weights)
