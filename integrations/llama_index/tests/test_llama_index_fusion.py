"""What each leg adds to a fused score, heard while LlamaIndex's retrievers run: exact, and nothing is changed by it."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from llama_index.core import StorageContext, VectorStoreIndex, instrumentation
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.base_selector import BaseSelector, MultiSelection, SelectorResult, SingleSelection
from llama_index.core.llms import MockLLM
from llama_index.core.node_parser import HierarchicalNodeParser, get_leaf_nodes
from llama_index.core.retrievers import AutoMergingRetriever, QueryFusionRetriever, RouterRetriever
from llama_index.core.retrievers.fusion_retriever import FUSION_MODES
from llama_index.core.schema import Document, NodeWithScore, QueryBundle, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.tools import RetrieverTool
from llama_index.core.vector_stores.types import VectorStoreQueryMode
from llama_index.retrievers.bm25 import BM25Retriever
from llama_index.retrievers.rag_explain import ExplainedNode, ExplainingRetriever

from integrations.llama_index.tests.conftest import LocalEmbedding
from rag_explain.results.stages import Stage, expanded, fused, legs_of
from tests.support.models import CORPUS, tiny

QUERY = "why did the dog look at the moon?"
MODES = list(FUSION_MODES)


class Generating(QueryFusionRetriever):
    """Asks these queries too, as one with a language model does."""

    def _get_queries(self, original_query: str) -> list[QueryBundle]:
        return [QueryBundle(text) for text in ("the moon", "bees", "the moon")]

    async def _aget_queries(self, original_query: str) -> list[QueryBundle]:
        return self._get_queries(original_query)


class Counts(BaseRetriever):
    """Counts how often it is asked."""

    def __init__(self, inner: BaseRetriever) -> None:
        super().__init__()
        self.inner, self.asked = inner, 0

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        self.asked += 1
        return self.inner.retrieve(query_bundle)


class Fails(BaseRetriever):
    """A leg that is down."""

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        raise ConnectionError("the leg is down")


class Tolerant(BaseRetriever):
    """A retriever of one's own that goes on without a leg."""

    def __init__(self, *legs: BaseRetriever) -> None:
        super().__init__()
        self.legs = legs

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        found: list[NodeWithScore] = []
        for leg in self.legs:
            try:
                found += leg.retrieve(query_bundle)
            except ConnectionError:
                continue
        return found


class Same(BaseRetriever):
    """Returns the very same objects each time, to which a fusion writes."""

    def __init__(self) -> None:
        super().__init__()
        self.found = [NodeWithScore(node=node, score=1.0 + rank) for rank, node in enumerate(nodes())]

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return self.found


class Chooses(BaseSelector):
    """Chooses these."""

    chosen: Any = (0,)

    def __init__(self, *chosen: int) -> None:
        self.chosen = chosen

    def _get_prompts(self) -> dict[str, Any]:
        return {}

    def _update_prompts(self, prompts: Any) -> None:
        pass

    def _select(self, choices: Sequence[Any], query: QueryBundle) -> SelectorResult:
        return MultiSelection(selections=[SingleSelection(index=one, reason="it") for one in self.chosen])

    async def _aselect(self, choices: Sequence[Any], query: QueryBundle) -> SelectorResult:
        return self._select(choices, query)


def nodes() -> list[TextNode]:
    return [TextNode(text=text, id_=f"id-{number}") for number, text in enumerate(CORPUS)]


@pytest.fixture(scope="module")
def vectors() -> BaseRetriever:
    index = VectorStoreIndex(nodes(), embed_model=LocalEmbedding(tiny("bert")))
    return index.as_retriever(similarity_top_k=4)


@pytest.fixture(scope="module")
def words() -> BaseRetriever:
    return BM25Retriever.from_defaults(nodes=nodes(), similarity_top_k=4)  # type: ignore[arg-type]


def fusion(
    mode: FUSION_MODES, *legs: BaseRetriever, kind: type[QueryFusionRetriever] = QueryFusionRetriever, **more: Any
):
    options = {"num_queries": 1, "use_async": False, "similarity_top_k": 5, "llm": MockLLM()} | more
    return kind(list(legs), mode=mode, **options)


def ways(base: BaseRetriever) -> Iterator[list[NodeWithScore]]:
    yield base.retrieve(QUERY)
    yield asyncio.run(base.aretrieve(QUERY))


def plain(found: Sequence[NodeWithScore]) -> list[tuple[str, float | None]]:
    return [(node.node.node_id, node.score) for node in found]


def stages(node: NodeWithScore) -> tuple[Stage, ...]:
    assert isinstance(node, ExplainedNode)
    return node.hit.stages


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [QueryFusionRetriever, Generating])
@pytest.mark.parametrize("use_async", [False, True])
def test_what_the_legs_add_sums_to_the_fused_score(mode, kind, use_async, vectors, words):
    weights = {"retriever_weights": [0.3, 0.7], "num_queries": 1 if kind is QueryFusionRetriever else 4}
    base = fusion(mode, vectors, words, kind=kind, use_async=use_async, **weights)
    bare = plain(base.retrieve(QUERY))
    legs = 2 if kind is QueryFusionRetriever else 6  # two of its queries are the same, and count once
    for found in ways(ExplainingRetriever(base)):
        assert plain(found) == bare
        for rank, node in enumerate(found, 1):
            told = stages(node)
            last = told[-1]
            assert (last.name, last.kind, last.rank, last.score) == (kind.__name__, "fusion", rank, node.score)
            assert len(legs_of(told, len(told) - 1)) == last.legs == legs
            assert fused(told, len(told) - 1) == pytest.approx(node.score, rel=1e-9, abs=1e-12)
            assert {one.query for one in told} <= {None, "the moon", "bees"}


def test_ranks_and_scores_of_the_legs_are_those_that_the_legs_return(vectors, words):
    (node, *_) = ExplainingRetriever(fusion(FUSION_MODES.RELATIVE_SCORE, vectors, words)).retrieve(QUERY)
    for leg, base in zip(stages(node), (vectors, words), strict=False):
        searched = [(one.node.node_id, one.score) for one in base.retrieve(QUERY)]
        assert searched[leg.rank - 1] == (node.node.node_id, pytest.approx(leg.score, abs=1e-12))
    assert [one.metric for one in stages(node)] == ["cosine", "bm25", "relative score"]


def test_every_leg_is_explained_by_what_scored_in_it(vectors, words):
    for node in ExplainingRetriever(fusion(FUSION_MODES.RECIPROCAL_RANK, vectors, words)).retrieve(QUERY):
        vector, word, _ = stages(node)
        assert vector.explanation is None or vector.handle is node.hit.handle
        assert word.is_missed or word.explanation.score == pytest.approx(word.score, rel=1e-6)
        assert node.hit.gap is None or node.hit.gap == pytest.approx(0.0, abs=1e-5)
        json.dumps(node.hit.to_dict())
        assert pickle.loads(pickle.dumps(node)).hit.stages == node.hit.stages


def test_a_generated_query_is_explained_for_itself(vectors):
    base = fusion(FUSION_MODES.SIMPLE, vectors, kind=Generating, num_queries=4)
    (node, *_) = ExplainingRetriever(base).retrieve(QUERY)
    for leg in stages(node)[:-1]:
        if not leg.is_missed:
            assert leg.explanation.query == (leg.query or QUERY)
            assert leg.explanation.score == pytest.approx(leg.score, abs=1e-5)


def test_nothing_is_asked_twice_and_no_handler_stays(vectors, words):
    leg = Counts(words)
    wrapped = ExplainingRetriever(fusion(FUSION_MODES.SIMPLE, vectors, leg))
    before = list(instrumentation.get_dispatcher().span_handlers)
    explained = [stage.explanation for node in wrapped.retrieve(QUERY) for stage in stages(node)]
    assert any(explained)
    assert leg.asked == 1
    assert instrumentation.get_dispatcher().span_handlers == before
    with pytest.raises(ConnectionError):
        ExplainingRetriever(fusion(FUSION_MODES.SIMPLE, vectors, Fails())).retrieve(QUERY)
    assert instrumentation.get_dispatcher().span_handlers == before


def test_searches_in_threads_and_tasks_do_not_hear_one_another(vectors, words):
    wrapped = [ExplainingRetriever(fusion(mode, vectors, words, use_async=True)) for mode in MODES * 3]
    before = list(instrumentation.get_dispatcher().span_handlers)

    async def together() -> list[list[NodeWithScore]]:
        return await asyncio.gather(*(one.aretrieve(QUERY) for one in wrapped))

    with ThreadPoolExecutor(6) as pool:
        threaded = list(pool.map(lambda one: one.retrieve(QUERY), wrapped))
    for found in (*threaded, *asyncio.run(together())):
        for node in found:
            told = stages(node)
            assert [one.kind for one in told] == ["search", "search", "fusion"]
            assert fused(told, 2) == pytest.approx(node.score, rel=1e-9, abs=1e-12)
    assert instrumentation.get_dispatcher().span_handlers == before


def test_a_fusion_inside_a_fusion_sums_at_both_places(vectors, words):
    inner = fusion(FUSION_MODES.RECIPROCAL_RANK, vectors, words)
    outer = fusion(FUSION_MODES.RELATIVE_SCORE, words, inner)
    for node in ExplainingRetriever(outer).retrieve(QUERY):
        told = stages(node)
        assert [one.kind for one in told] in (["search"] * 3 + ["fusion"] * 2, ["search"] * 2 + ["fusion"])
        if len(told) == 5:
            assert [legs_of(told, 3), legs_of(told, 4)] == [[1, 2], [0, 3]]
            assert fused(told, 3) == pytest.approx(told[3].score, rel=1e-9)
        assert fused(told, len(told) - 1) == pytest.approx(node.score, rel=1e-9, abs=1e-12)


def test_a_wrapped_leg_tells_its_own_stages(vectors, words):
    base = fusion(FUSION_MODES.RECIPROCAL_RANK, ExplainingRetriever(vectors), words)
    for node in ExplainingRetriever(base).retrieve(QUERY):
        assert [one.name for one in stages(node)] == ["VectorIndexRetriever", "BM25Retriever", "QueryFusionRetriever"]
        assert fused(stages(node), 2) == pytest.approx(node.score, rel=1e-9)


def test_what_cannot_be_followed_is_said_and_not_shown():
    same = Same()
    base = fusion(FUSION_MODES.RELATIVE_SCORE, same, same)  # it scales the same objects twice
    bare = plain(fusion(FUSION_MODES.RELATIVE_SCORE, *[other := Same()] * 2).retrieve(QUERY))
    assert other.found
    found = ExplainingRetriever(base, tiny("bert")).retrieve(QUERY)
    assert plain(found) == bare
    for node in found:
        assert stages(node)[-1].kind == "merge"
        assert "does not sum to the scores" in stages(node)[-1].note
        assert {one.contribution for one in stages(node)} == {None}


def test_a_leg_that_failed_and_was_passed_over_is_no_leg(vectors, words):
    for node in ExplainingRetriever(Tolerant(Fails(), vectors, words)).retrieve(QUERY):
        assert [one.name for one in stages(node)] == ["VectorIndexRetriever", "BM25Retriever", "Tolerant"]
        assert stages(node)[-1].kind == "merge"


def test_a_router_names_what_it_chose(vectors, words):
    tools = [RetrieverTool.from_defaults(one, description="notes") for one in (vectors, words)]
    (node, *_) = ExplainingRetriever(RouterRetriever(Chooses(1), tools, llm=MockLLM()), tiny("bert")).retrieve(QUERY)
    assert [(one.name, one.kind) for one in stages(node)] == [
        ("BM25Retriever", "search"),
        ("RouterRetriever", "filter"),
    ]
    for node in ExplainingRetriever(RouterRetriever(Chooses(0, 1), tools, llm=MockLLM())).retrieve(QUERY):
        assert [one.name for one in stages(node)] == ["VectorIndexRetriever", "BM25Retriever", "RouterRetriever"]
        assert (stages(node)[-1].kind, stages(node)[-1].legs) == ("merge", 2)


def test_a_merged_parent_names_the_chunks_that_were_found():
    text = " ".join(f"{one.capitalize()}." for one in CORPUS)
    parser = HierarchicalNodeParser.from_defaults(chunk_sizes=[256, 32], chunk_overlap=0)
    parsed = parser.get_nodes_from_documents([Document(text=text, id_="all")])
    docstore = SimpleDocumentStore()
    docstore.add_documents(parsed)
    index = VectorStoreIndex(get_leaf_nodes(parsed), embed_model=LocalEmbedding(tiny("bert")))
    leaves = index.as_retriever(similarity_top_k=9)
    base = AutoMergingRetriever(leaves, StorageContext.from_defaults(docstore=docstore))  # type: ignore[arg-type]
    bare = plain(base.retrieve(QUERY))
    (node,) = ExplainingRetriever(base).retrieve(QUERY)
    assert plain([node]) == bare
    told = stages(node)
    assert (told[-1].name, told[-1].kind, told[-1].legs) == ("AutoMergingRetriever", "merge", len(told) - 1)
    assert {one.document for one in told[:-1]} == {one.node.node_id for one in leaves.retrieve(QUERY)}
    assert fused(told, len(told) - 1) == pytest.approx(node.score, rel=1e-9)


@pytest.mark.parametrize("balance", [None, 0.0, 0.4, 1.0])
def test_terms_of_mmr_sum_to_its_score_and_name_the_document(balance):
    index = VectorStoreIndex(nodes(), embed_model=LocalEmbedding(tiny("bert")))
    kwargs = {} if balance is None else {"mmr_threshold": balance}
    base = index.as_retriever(
        similarity_top_k=4, vector_store_query_mode=VectorStoreQueryMode.MMR, vector_store_kwargs=kwargs
    )
    found = ExplainingRetriever(base).retrieve(QUERY)
    assert plain(found) == plain(base.retrieve(QUERY))
    for rank, node in enumerate(found):
        (stage,) = stages(node)
        assert sum(term.contribution for term in stage.terms) == pytest.approx(node.score, abs=1e-9)
        assert [term.document for term in stage.terms] == [None, found[rank - 1].node.node_id][: 1 + bool(rank)]
        assert fused(expanded(node.hit.stages), len(stage.terms)) == pytest.approx(node.score, abs=1e-9)


def test_explanations_that_are_off_listen_to_nothing(vectors, words):
    wrapped = ExplainingRetriever(fusion(FUSION_MODES.SIMPLE, vectors, words), explain="off")
    for node in wrapped.retrieve(QUERY):
        assert [one.name for one in stages(node)] == ["QueryFusionRetriever"]


def test_why_not_tells_which_leg_found_a_node_and_what_fusion_cut(vectors, words):
    base = fusion(FUSION_MODES.RECIPROCAL_RANK, vectors, words, similarity_top_k=1)
    (returned,) = base.retrieve(QUERY)
    orders = [[node.node.node_id for node in leg.retrieve(QUERY)] for leg in (vectors, words)]
    wrapped = ExplainingRetriever(base)
    found_by_any = dict.fromkeys(name for order in orders for name in order if name != returned.node.node_id)
    for name in found_by_any:
        told = [
            f"{leg} has it at rank {order.index(name) + 1}" if name in order else f"{leg} did not find it"
            for leg, order in zip(("VectorIndexRetriever", "BM25Retriever"), orders, strict=True)
        ]
        found = wrapped.why_not(QUERY, name)
        assert found.reason.name == "stage"
        assert found.reason.text == f"{', '.join(told)}: QueryFusionRetriever, which returned 1, left it out"
    far = next(node.node_id for node in nodes() if node.node_id not in {*found_by_any, returned.node.node_id})
    nowhere = wrapped.why_not(QUERY, far)
    assert nowhere.reason.name == "cut"
    assert "no search inside found it: VectorIndexRetriever gave 4, BM25Retriever gave 4" in nowhere.reason.text
    assert wrapped.why_not(QUERY, "nobody").reason.name == "missing"
