"""Whatever ranks nodes after the wrapped retriever is named: in the node's hit, in its explanation and in the log."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.llms import CompletionResponse, CustomLLM, LLMMetadata, MockLLM
from llama_index.core.llms.callbacks import llm_completion_callback
from llama_index.core.node_parser import HierarchicalNodeParser, get_leaf_nodes
from llama_index.core.postprocessor import (
    LLMRerank,
    LongContextReorder,
    SentenceTransformerRerank,
    SimilarityPostprocessor,
)
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import AutoMergingRetriever, QueryFusionRetriever, RecursiveRetriever
from llama_index.core.schema import Document, IndexNode, NodeWithScore, QueryBundle, TextNode
from llama_index.core.vector_stores.types import VectorStoreQueryMode
from llama_index.retrievers.rag_explain import (
    ExplainedNode,
    ExplainingRetriever,
    ExplanationPostprocessor,
    log_queries,
)

from integrations.llama_index.tests.conftest import LocalEmbedding
from rag_explain import Explainer
from rag_explain.log import ExplanationLog, Record
from rag_explain.types import Hit, Stage
from tests.support.models import CORPUS, cross_encoder_folder, tiny

QUERY = "why did the dog look at the moon?"


class Grades(CustomLLM):
    """A language model that finds the last document the most relevant one."""

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata()

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **options: Any) -> CompletionResponse:
        return CompletionResponse(text="\n".join(f"Doc: {number}, Relevance: {number}" for number in (4, 3, 2, 1)))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **options: Any) -> Any:
        raise NotImplementedError


class Drops(BaseNodePostprocessor):
    """Leaves the first node out."""

    def _postprocess_nodes(self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None) -> Any:
        return nodes[1:]


class Reverses(BaseNodePostprocessor):
    """Plain copies in another order with the scores they had, as RankGPT makes them."""

    def _postprocess_nodes(self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None) -> Any:
        return [NodeWithScore(node=node.node, score=node.score) for node in reversed(nodes)]


class OnlyAsync(Reverses):
    """A postprocessor that LlamaIndex's instrumentation does not see at work."""

    async def _apostprocess_nodes(self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None) -> Any:
        return [NodeWithScore(node=node.node, score=7.0 - rank) for rank, node in enumerate(reversed(nodes))]


def wrapped(index: VectorStoreIndex, k: int = 4) -> ExplainingRetriever:
    return ExplainingRetriever(index.as_retriever(similarity_top_k=k))


def cross_encoder(top_n: int = 4) -> SentenceTransformerRerank:
    return SentenceTransformerRerank(model=str(cross_encoder_folder()), top_n=top_n, device="cpu")


def ask(retriever: BaseRetriever, *postprocessors: BaseNodePostprocessor, is_async: bool = False) -> Any:
    engine = RetrieverQueryEngine.from_args(retriever, llm=MockLLM(), node_postprocessors=list(postprocessors))
    return asyncio.run(engine.aquery(QUERY)) if is_async else engine.query(QUERY)


def only(log: ExplanationLog) -> Record:
    (record,) = log.records()
    return record


def names(hit: Hit) -> list[tuple[str, str]]:
    return [(stage.name, stage.kind) for stage in hit.stages]


def check_record(record: Record, sources: list[NodeWithScore], searched: list[NodeWithScore]) -> None:
    """A record has the order and the scores of the sources, and each hit begins where the search left it."""
    before = {node.node_id: (rank, node.score) for rank, node in enumerate(searched, 1)}
    assert [hit.id for hit in record.hits] == [node.node_id for node in sources]
    assert [hit.rank for hit in record.hits] == list(range(1, len(sources) + 1))
    for hit, node in zip(record.hits, sources, strict=True):
        assert hit.score == pytest.approx(node.score)
        first, *_, last = hit.stages
        assert (first.name, first.kind, first.metric) == ("VectorIndexRetriever", "search", "cosine")
        assert (first.rank, first.score) == (before[hit.id][0], pytest.approx(before[hit.id][1]))
        assert (last.rank, last.rank_before) == (hit.rank, hit.stages[-2].rank)
        assert hit.gap == pytest.approx(0.0, abs=1e-5)  # between the search's cosine and the encoder's, always


@pytest.mark.parametrize("is_async", [False, True])
def test_a_reranker_that_scores_in_place_is_named_in_every_hit_and_in_the_log(index, log, is_async):
    searched = index.as_retriever(similarity_top_k=4).retrieve(QUERY)
    with log_queries(log):
        response = ask(wrapped(index), cross_encoder(), is_async=is_async)
    assert [node.node_id for node in response.source_nodes] != [node.node_id for node in searched]
    for node in response.source_nodes:
        assert isinstance(node, ExplainedNode)
        assert node.hit.score == pytest.approx(node.score)
        assert node.hit.metric == "unknown"
        assert names(node.hit) == [("VectorIndexRetriever", "search"), ("SentenceTransformerRerank", "rerank")]
        assert "ranked by SentenceTransformerRerank" in node.explanation.surrogate
        assert node.hit.gap == pytest.approx(0.0, abs=1e-5)
        assert pickle.loads(pickle.dumps(node)).hit.stages == node.hit.stages
    record = only(log)
    check_record(record, response.source_nodes, searched)
    for hit in record.hits:
        assert names(hit) == [("VectorIndexRetriever", "search"), ("SentenceTransformerRerank", "rerank")]
        assert hit.metric == "unknown"
        assert hit.stages[-1].score == pytest.approx(hit.score)
        assert "ranked by SentenceTransformerRerank" in hit.explanation.surrogate


def test_a_postprocessor_that_explains_after_a_reranker_knows_rank_and_score(index):
    explains = ExplanationPostprocessor(explainer=Explainer(tiny("bert")))
    response = ask(wrapped(index), cross_encoder(), explains)
    for rank, node in enumerate(response.source_nodes, 1):
        assert (node.hit.rank, node.hit.score) == (rank, pytest.approx(node.score))
        assert names(node.hit)[-1] == ("SentenceTransformerRerank", "rerank")
        assert "ranked by SentenceTransformerRerank" in node.explanation.surrogate
    plain = ask(index.as_retriever(similarity_top_k=4), cross_encoder(), explains)
    assert [node.hit.score for node in plain.source_nodes] == pytest.approx([node.score for node in plain.source_nodes])
    assert {node.hit.metric for node in plain.source_nodes} == {"unknown"}
    assert "does not see what scored" in plain.source_nodes[0].explanation.surrogate


def test_a_reranker_that_makes_new_nodes_is_named_in_the_log(index, log):
    searched = index.as_retriever(similarity_top_k=4).retrieve(QUERY)
    with log_queries(log):
        response = ask(wrapped(index), LLMRerank(llm=Grades(), top_n=3))
    record = only(log)
    assert [hit.score for hit in record.hits] == [4.0, 3.0, 2.0]
    check_record(record, response.source_nodes, searched)
    assert {hit.metric for hit in record.hits} == {"unknown"}
    assert all(names(hit)[1:] == [("LLMRerank", "rerank")] for hit in record.hits)
    assert all("ranked by LLMRerank" in hit.explanation.surrogate for hit in record.hits)


def test_what_only_reorders_is_named_and_gives_no_score(index, log):
    searched = index.as_retriever(similarity_top_k=4).retrieve(QUERY)
    with log_queries(log):
        response = ask(wrapped(index), LongContextReorder())
    record = only(log)
    check_record(record, response.source_nodes, searched)
    for hit in record.hits:
        assert names(hit)[1:] == [("LongContextReorder", "rerank")]
        assert hit.stages[-1].score is None
        assert "ranked by LongContextReorder" in hit.explanation.surrogate


@pytest.mark.parametrize("drops", [Drops(), None])
def test_what_only_leaves_nodes_out_is_named_and_is_no_other_ranking(index, log, drops):
    searched = index.as_retriever(similarity_top_k=4).retrieve(QUERY)
    cut = drops or SimilarityPostprocessor(similarity_cutoff=(searched[1].score + searched[2].score) / 2)
    with log_queries(log):
        response = ask(wrapped(index), cut)
    record = only(log)
    assert len(record.hits) == (2 if drops is None else 3)
    check_record(record, response.source_nodes, searched)
    assert all(names(hit)[1:] == [(type(cut).__name__, "filter")] for hit in record.hits)
    assert {hit.metric for hit in record.hits} == {"cosine"}
    assert all(hit.explanation.surrogate is None for hit in record.hits)


def test_every_stage_of_several_is_kept_in_the_order_in_which_they_ran(index, log):
    searched = index.as_retriever(similarity_top_k=5).retrieve(QUERY)
    with log_queries(log):
        response = ask(wrapped(index, 5), cross_encoder(5), Reverses(), Drops(), LLMRerank(llm=Grades(), top_n=4))
    record = only(log)
    check_record(record, response.source_nodes, searched)
    for hit in record.hits:
        assert [stage.name for stage in hit.stages[1:]] == [
            "SentenceTransformerRerank",
            "Reverses",
            "Drops",
            "LLMRerank",
        ]
        assert [stage.kind for stage in hit.stages[1:]] == ["rerank", "rerank", "filter", "rerank"]
        for one, next_one in zip(hit.stages, hit.stages[1:], strict=False):
            assert next_one.rank_before == one.rank
        text = "ranked by SentenceTransformerRerank and then Reverses and then LLMRerank, not by"
        assert text in hit.explanation.surrogate


def test_a_stage_that_cannot_be_seen_is_a_later_stage(index, log):
    searched = index.as_retriever(similarity_top_k=4).retrieve(QUERY)
    with log_queries(log):
        response = ask(wrapped(index), OnlyAsync(), is_async=True)
    record = only(log)
    check_record(record, response.source_nodes, searched)
    assert all(names(hit)[1:] == [("a later stage", "rerank")] for hit in record.hits)
    node = wrapped(index).retrieve(QUERY)[0]
    node.score = 3.5
    assert node.hit.stages[-1] == Stage("a later stage", "rerank", None, 1, 3.5)


def test_two_searches_of_one_retriever_do_not_mix_their_ranks(index, log):
    fused = QueryFusionRetriever(
        [wrapped(index, 3), wrapped(index, 5)], llm=MockLLM(), similarity_top_k=5, num_queries=1, use_async=False
    )
    with log_queries(log):
        fused.retrieve(QUERY)
    searched = [node.node_id for node in index.as_retriever(similarity_top_k=5).retrieve(QUERY)]
    for hit in only(log).hits:
        assert [name for name, _ in names(hit)] == ["VectorIndexRetriever", "QueryFusionRetriever"]
        assert hit.stages[0].rank == searched.index(hit.id) + 1


FUSIONS = ["simple", "reciprocal_rerank", "relative_score", "dist_based_score"]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("mode", FUSIONS)
def test_fusion_over_wrapped_retrievers_is_named(index, log, mode, is_async):
    other = VectorStoreIndex(
        [TextNode(text=text.upper(), id_=text) for text in CORPUS], embed_model=LocalEmbedding(tiny("bert"))
    )
    legs = [wrapped(index, 3), wrapped(other, 3)]
    fused = QueryFusionRetriever(legs, llm=MockLLM(), mode=mode, similarity_top_k=5, num_queries=1, use_async=is_async)
    with log_queries(log):
        found = asyncio.run(fused.aretrieve(QUERY)) if is_async else fused.retrieve(QUERY)
    record = only(log)
    assert [hit.score for hit in record.hits] == pytest.approx([node.score for node in found])
    assert [hit.rank for hit in record.hits] == [1, 2, 3, 4, 5]
    for node, hit in zip(found, record.hits, strict=True):
        assert node.hit.score == pytest.approx(node.score)
        assert names(hit) == [("VectorIndexRetriever", "search"), ("QueryFusionRetriever", "rerank")]
        assert hit.stages[0].rank in (1, 2, 3)
        assert "ranked by QueryFusionRetriever" in hit.explanation.surrogate
        if mode != "simple":  # which keeps the legs' scores
            assert hit.metric == node.hit.metric == "unknown"
            assert node.hit.stages[-1].name == "QueryFusionRetriever"


def test_what_auto_merging_adds_has_no_hit_and_what_it_keeps_is_explained(log):
    document = Document(text=" ".join(CORPUS), id_="all")
    nodes = HierarchicalNodeParser.from_defaults(chunk_sizes=[128, 32], chunk_overlap=0).get_nodes_from_documents(
        [document]
    )
    context = StorageContext.from_defaults()
    context.docstore.add_documents(nodes)
    index = VectorStoreIndex(get_leaf_nodes(nodes), storage_context=context, embed_model=LocalEmbedding(tiny("bert")))
    merging = AutoMergingRetriever(wrapped(index, 2), context, simple_ratio_thresh=0.3)
    with log_queries(log):
        found = merging.retrieve(QUERY)
    record = only(log)
    assert [hit.score for hit in record.hits] == pytest.approx([node.score for node in found])
    assert [hit.rank for hit in record.hits] == list(range(1, len(found) + 1))
    merged = [hit for hit in record.hits if hit.explanation is None]
    assert merged
    assert {hit.metric for hit in merged} == {"unknown"}


@pytest.mark.parametrize("how", ["recursive", "object"])
def test_a_node_that_was_reached_through_another_one_does_not_carry_that_ones_similarity(log, how):
    target = TextNode(text=CORPUS[3], id_="target")
    if how == "object":
        made = [IndexNode(text=CORPUS[0], index_id="other", obj=target, id_="pointer")]
        retriever: BaseRetriever = wrapped(VectorStoreIndex(made, embed_model=LocalEmbedding(tiny("bert"))))
    else:
        made = [IndexNode(text=CORPUS[0], index_id="target", id_="pointer")]
        inner = wrapped(VectorStoreIndex(made, embed_model=LocalEmbedding(tiny("bert"))))
        retriever = RecursiveRetriever("root", retriever_dict={"root": inner}, node_dict={"target": target})
    with log_queries(log):
        (found,) = retriever.retrieve(QUERY)
    (hit,) = only(log).hits
    assert found.node_id == hit.id == "target"
    assert hit.score == pytest.approx(found.score)
    assert hit.metric == "unknown"
    assert hit.gap is None
    if how == "object":
        assert found.hit.explanation.document == CORPUS[3]
        assert "the IndexNode that led to it" in found.hit.explanation.surrogate


@pytest.mark.parametrize("mode", ["mmr", "svm", "linear_regression", "logistic_regression"])
@pytest.mark.parametrize("options", [{}, {"metric": "cosine"}, {"surrogate": False, "metric": "cosine"}])
def test_scores_of_other_modes_are_no_similarities(index, mode, options):
    if mode != "mmr":
        pytest.importorskip("sklearn")
    if mode == "mmr":
        options_of_store: dict[str, Any] = {"vector_store_kwargs": {"mmr_threshold": 0.3}}
    else:
        options_of_store = {}
    bases: list[Callable[[], BaseRetriever]] = [
        lambda: index.as_retriever(vector_store_query_mode=mode, similarity_top_k=4, **options_of_store),
        lambda: (
            index.as_query_engine(
                llm=MockLLM(),
                vector_store_query_mode=VectorStoreQueryMode(mode),
                similarity_top_k=4,
                **options_of_store,
            ).retriever
        ),
    ]
    for make in bases:
        found = ExplainingRetriever(make(), **options).retrieve(QUERY)
        assert {node.node_id for node in found} == {node.node_id for node in make().retrieve(QUERY)}
        for node in found:
            assert node.hit.metric == "unknown"
            assert node.explanation is not None
            assert node.hit.gap is None
            assert "implies a similarity" not in (node.explanation.surrogate or "")
            if "surrogate" not in options:
                assert f"{mode} mode" in node.explanation.surrogate


def test_the_nodes_the_metadata_and_the_prompt_are_untouched_by_naming_stages(index, log):
    expected = ask(index.as_retriever(similarity_top_k=4), cross_encoder(), LongContextReorder())
    with log_queries(log):
        response = ask(wrapped(index), cross_encoder(), LongContextReorder())
    assert str(response) == str(expected)
    assert response.source_nodes == expected.source_nodes
    assert [repr(node) for node in response.source_nodes] == [repr(node) for node in expected.source_nodes]
