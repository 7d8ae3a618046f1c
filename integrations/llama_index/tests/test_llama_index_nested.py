"""Retrievers around retrievers: the encoder inside is found, what wrapped ones inside explained is kept."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
from llama_index.core import QueryBundle, StorageContext, SummaryIndex, VectorStoreIndex
from llama_index.core.base.base_selector import BaseSelector, SelectorResult, SingleSelection
from llama_index.core.indices.query.query_transform import HyDEQueryTransform
from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import (
    AutoMergingRetriever,
    BaseRetriever,
    QueryFusionRetriever,
    RecursiveRetriever,
    RouterRetriever,
    TransformRetriever,
)
from llama_index.core.retrievers.fusion_retriever import FUSION_MODES
from llama_index.core.schema import IndexNode, NodeRelationship, NodeWithScore, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.tools import RetrieverTool
from llama_index.retrievers.rag_explain import ExplainedNode, ExplainingRetriever, ExplanationPostprocessor

from integrations.llama_index.tests.conftest import LocalEmbedding
from rag_explain import Explainer
from rag_explain.errors import InvalidInput
from tests.support.models import CORPUS, tiny

QUERY = "why did the dog look at the moon?"


class Prompting(LocalEmbedding):
    """Puts an instruction in front of queries, as embedding models for some encoders do."""

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._model.encode("where: " + query).tolist()  # type: ignore[no-any-return]


class Words(BaseRetriever):
    """A keyword search over the same nodes: its copies of them are not explained."""

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [NodeWithScore(node=node, score=2.0 - rank / 10) for rank, node in enumerate(nodes())]


class First(BaseSelector):
    """Chooses the first."""

    def _get_prompts(self) -> dict[str, Any]:
        return {}

    def _update_prompts(self, prompts: Any) -> None:
        pass

    def _select(self, choices: Sequence[Any], query: QueryBundle) -> SelectorResult:
        return SelectorResult(selections=[SingleSelection(index=0, reason="it is the first")])

    async def _aselect(self, choices: Sequence[Any], query: QueryBundle) -> SelectorResult:
        return self._select(choices, query)


def nodes() -> list[TextNode]:
    return [TextNode(text=text, id_=f"id-{number}") for number, text in enumerate(CORPUS)]


@cache
def embedding(kind: type[LocalEmbedding] = LocalEmbedding, model: str = "bert") -> LocalEmbedding:
    return kind(tiny(model))


def index(embed_model: Any = None) -> VectorStoreIndex:
    return VectorStoreIndex(nodes(), embed_model=embed_model or embedding())


def fused(*retrievers: Any, **options: Any) -> QueryFusionRetriever:
    return QueryFusionRetriever(
        list(retrievers), llm=MockLLM(), **{"num_queries": 1, "use_async": False, "similarity_top_k": 5} | options
    )


def merging(base: BaseRetriever) -> AutoMergingRetriever:
    return AutoMergingRetriever(base, StorageContext.from_defaults())  # type: ignore[arg-type]


def tools(*retrievers: BaseRetriever) -> list[RetrieverTool]:
    return [RetrieverTool.from_defaults(one, description="notes") for one in retrievers]


AROUND: dict[str, Callable[[BaseRetriever], BaseRetriever]] = {
    "fusion": lambda one: fused(Words(), one),
    "router": lambda one: RouterRetriever(First(), tools(one, Words()), llm=MockLLM()),
    "merging": merging,
    "recursive": lambda one: RecursiveRetriever("root", retriever_dict={"root": one}),
    "engine": lambda one: RecursiveRetriever(
        "root",
        retriever_dict={"root": Words()},
        query_engine_dict={"engine": RetrieverQueryEngine.from_args(one, MockLLM())},
    ),
    "transform": lambda one: TransformRetriever(one, HyDEQueryTransform(llm=MockLLM())),
    "deep": lambda one: fused(Words(), TransformRetriever(merging(one), HyDEQueryTransform(llm=MockLLM()))),
    "many": lambda one: RecursiveRetriever(
        "0", retriever_dict={str(number): one if number == 39 else Words() for number in range(40)}
    ),
}


def plain(found: Sequence[NodeWithScore]) -> list[tuple[Any, ...]]:
    return [(node.node.node_id, node.node.hash, node.score) for node in found]


@pytest.mark.parametrize("name", AROUND)
def test_the_encoder_inside_is_found_with_the_way_in_which_it_is_used(name: str) -> None:
    base = AROUND[name](index(embedding(Prompting)).as_retriever(similarity_top_k=3))
    wrapped = ExplainingRetriever(base, unit="token")
    for found in (wrapped.retrieve(QUERY), asyncio.run(wrapped.aretrieve(QUERY))):
        assert plain(found) == plain(base.retrieve(QUERY))
        for node in found:
            assert isinstance(node, ExplainedNode)
            assert node.explanation is not None, node.hit.reason
            assert "prompt" in {token.part for token in node.explanation.query_tokens}
            assert f"chosen by {type(base).__name__}" in (node.explanation.surrogate or "")
            assert "mismatch" not in {notice.code for notice in node.explanation.notices}


def test_several_encoders_are_named_and_one_of_them_can_be_passed() -> None:
    both = fused(index().as_retriever(), index(embedding(model="roberta")).as_retriever())
    with pytest.raises(InvalidInput) as refused:
        ExplainingRetriever(both)
    assert str(refused.value).startswith(
        "QueryFusionRetriever holds several encoders (LocalEmbedding with BertModel and LocalEmbedding with Roberta"
    )
    found = ExplainingRetriever(both, embedding(Prompting), unit="token").retrieve(QUERY)
    for node in found:
        assert "prompt" in {token.part for token in node.explanation.query_tokens}  # type: ignore[attr-defined]


def test_the_embedding_model_of_a_retriever_stands_before_that_of_its_index() -> None:
    base = index().as_retriever(embed_model=embedding(Prompting))
    (node, *_) = ExplainingRetriever(fused(base), unit="token").retrieve(QUERY)
    assert "prompt" in {token.part for token in node.explanation.query_tokens}  # type: ignore[attr-defined]


def test_an_encoder_that_is_added_later_is_said_and_the_retrieval_goes_on() -> None:
    both = fused(index().as_retriever(), Words())
    wrapped = ExplainingRetriever(both)
    both._retrievers[1] = index(embedding(model="roberta")).as_retriever()
    found = wrapped.retrieve(QUERY)
    assert plain(found) == plain(both.retrieve(QUERY))
    assert found[0].explanation is None  # type: ignore[attr-defined]
    assert "or several" in found[0].hit.reason  # type: ignore[attr-defined]


def test_all_nodes_that_are_searched_are_precomputed() -> None:
    with Explainer(tiny("bert")) as explainer:
        other = VectorStoreIndex([TextNode(text=text.upper()) for text in CORPUS], embed_model=embedding())
        base = fused(Words(), index().as_retriever(), merging(ExplainingRetriever(other.as_retriever())))
        assert ExplainingRetriever(base, explainer).precompute(progress=False).built == 2 * len(CORPUS)


def test_of_an_index_node_the_node_to_which_it_leads_is_precomputed_and_explained() -> None:
    whole = TextNode(text=". ".join(CORPUS), id_="whole")
    small = [IndexNode(text=text, index_id="whole", obj=whole) for text in CORPUS]
    objects = VectorStoreIndex(objects=small, embed_model=embedding()).as_retriever()
    recursive = RecursiveRetriever(
        "root",
        retriever_dict={
            "root": VectorStoreIndex(
                [IndexNode(text=text, index_id="whole") for text in CORPUS], embed_model=embedding()
            ).as_retriever()
        },
        node_dict={"whole": whole},
    )
    for base, said in (
        (objects, "ranked by the IndexNode that led to it"),
        (recursive, "chosen by RecursiveRetriever"),
    ):
        with Explainer(tiny("bert")) as explainer:
            wrapped = ExplainingRetriever(base, explainer, explain="eager")
            assert wrapped.precompute(progress=False).built == 1
            (node,) = wrapped.retrieve(QUERY)
            assert node.explanation.provenance["path"] == "memory"  # type: ignore[attr-defined]
            assert said in node.explanation.surrogate  # type: ignore[attr-defined]
            assert node.hit.gap is None  # type: ignore[attr-defined]


def test_a_node_that_was_merged_says_that_it_was() -> None:
    parent = TextNode(text=". ".join(CORPUS[:2]), id_="parent")
    leaves = nodes()
    for leaf in leaves[:2]:
        leaf.relationships[NodeRelationship.PARENT] = parent.as_related_node_info()
    parent.relationships[NodeRelationship.CHILD] = [leaf.as_related_node_info() for leaf in leaves[:2]]
    docstore = SimpleDocumentStore()
    docstore.add_documents([parent, *leaves])
    context = StorageContext.from_defaults(docstore=docstore)
    made = VectorStoreIndex(leaves, storage_context=context, embed_model=embedding())
    base = AutoMergingRetriever(made.as_retriever(similarity_top_k=5), context)
    inner = AutoMergingRetriever(ExplainingRetriever(made.as_retriever(similarity_top_k=5)), context)  # type: ignore[arg-type]
    expected = plain(base.retrieve(QUERY))
    assert "parent" in {name for name, *_ in expected}
    for retriever in (base, inner):
        found = ExplainingRetriever(retriever).retrieve(QUERY)
        assert plain(found) == expected
        for node in found:
            assert isinstance(node, ExplainedNode)
            assert node.explanation is not None
            if node.node.node_id == "parent" or retriever is base:
                assert "chosen by AutoMergingRetriever" in (node.explanation.surrogate or "")
            else:
                assert node.hit.stages[0].name == "VectorIndexRetriever"
                assert node.hit.gap == pytest.approx(0.0, abs=1e-5)


# ---------------------------------------------------------------------- wrapped ones inside


@pytest.mark.parametrize("mode", [FUSION_MODES.RECIPROCAL_RANK, FUSION_MODES.SIMPLE, FUSION_MODES.RELATIVE_SCORE])
@pytest.mark.parametrize("use_async", [False, True])
def test_fusion_that_keeps_the_other_copy_keeps_the_explanation_inside_a_wrapper(mode: Any, use_async: bool) -> None:
    def build(vectors: BaseRetriever) -> list[BaseRetriever]:
        legs = [[Words(), vectors], [vectors, Words()]]  # some modes keep the first copy, others the last one
        return [fused(*both, mode=mode, use_async=use_async) for both in legs]

    vectors = index().as_retriever(similarity_top_k=3)
    searched = {node.node.node_id: node.score for node in vectors.retrieve(QUERY)}
    for base, bare in zip(build(ExplainingRetriever(vectors)), build(vectors), strict=True):
        outer = ExplainingRetriever(base)
        expected = plain(bare.retrieve(QUERY))
        for found in (outer.retrieve(QUERY), asyncio.run(outer.aretrieve(QUERY))):
            assert plain(found) == expected
            for rank, node in enumerate(found, 1):
                assert isinstance(node, ExplainedNode)
                assert node.explanation is not None
                assert (node.hit.rank, node.hit.score) == (rank, node.score)
                told = {stage.name: stage for stage in node.hit.stages}
                assert node.hit.stages[-1].name == "QueryFusionRetriever"
                if node.node.node_id in searched:
                    assert told["VectorIndexRetriever"].score == searched[node.node.node_id]
                    assert node.hit.gap == pytest.approx(0.0, abs=1e-5)
                    assert "ranked by QueryFusionRetriever" in (node.explanation.surrogate or "")
                else:
                    assert told["VectorIndexRetriever"].is_missed
                    assert "chosen by QueryFusionRetriever" in (node.explanation.surrogate or "")


def test_hits_of_one_call_are_not_seen_by_another() -> None:
    ExplainingRetriever(index().as_retriever()).retrieve(QUERY)
    for node in ExplainingRetriever(fused(Words()), tiny("bert")).retrieve(QUERY):
        assert [stage.name for stage in node.hit.stages] == ["Words", "QueryFusionRetriever"]  # type: ignore[attr-defined]


def test_what_was_kept_goes_through_a_pickle() -> None:
    found = ExplainingRetriever(fused(Words(), ExplainingRetriever(index().as_retriever())), explain="eager").retrieve(
        QUERY
    )
    again = pickle.loads(pickle.dumps(found))
    assert [node.hit.stages for node in again] == [node.hit.stages for node in found]  # type: ignore[attr-defined]
    assert all(node.explanation is not None for node in again)


# ---------------------------------------------------------------------- what is refused


def test_what_is_of_no_use_is_refused_in_one_sentence() -> None:
    made, none = index(), "nothing that embeds was found in "
    base = made.as_retriever()
    for arguments, message in (
        ({"base": 3}, "base must be a LlamaIndex retriever, not int"),
        ({"base": None}, "base must be a LlamaIndex retriever, not NoneType"),
        ({"base": made}, "base must be a LlamaIndex retriever, not VectorStoreIndex: pass index.as_retriever()"),
        ({"base": Words()}, none + "Words: pass explainer=Explainer(model)"),
        ({"base": fused(Words(), Words())}, none + "QueryFusionRetriever: pass explainer="),
        ({"base": base, "explainer": 3}, "explainer must be an Explainer or a model to make one from, not int"),
        ({"base": base, "metric": 3}, "there is no metric 3: use one of cosine"),
        ({"base": base, "surrogate": 3}, "surrogate must be a sentence, False or None, not 3"),
        ({"base": base, "time_limit": "x"}, "time_limit must be a number of seconds, not 'x'"),
        ({"base": base, "unit": "x"}, "unit must be 'token', 'word' or 'sentence', not 'x'"),
        ({"base": base, "top": "x"}, "top must be a whole number, not 'x'"),
    ):
        with pytest.raises(InvalidInput) as refused:
            ExplainingRetriever(**arguments)
        assert message in str(refused.value)
        assert "\n" not in str(refused.value)
    for given in (3, "text", [3]):
        with pytest.raises(InvalidInput, match="precompute takes a list of nodes, or an index"):
            ExplainingRetriever(base).precompute(given)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="Words has no index: pass the nodes to precompute"):
        ExplainingRetriever(Words(), tiny("bert")).precompute()
    with pytest.raises(InvalidInput, match="SummaryIndex cannot list its nodes: pass them to precompute"):
        ExplainingRetriever(SummaryIndex([]).as_retriever(), tiny("bert")).precompute()


def test_a_postprocessor_refuses_in_one_sentence_too() -> None:
    for fields, message in (
        ({}, "explainer must be an Explainer or a model to make one from, not NoneType"),
        ({"explainer": 3}, "explainer must be an Explainer or a model to make one from, not int"),
        ({"explainer": embedding(), "topp": 3}, "ExplanationPostprocessor has no field 'topp': use explainer, explain"),
        ({"explainer": embedding(), "top": "x"}, "top should be a valid integer"),
        ({"explainer": embedding(), "metric": 3}, "metric should be a valid string, not 3"),
        ({"explainer": embedding(), "surrogate": 3}, "surrogate should be a valid string, not 3"),
    ):
        with pytest.raises(InvalidInput) as refused:
            ExplanationPostprocessor(**fields)
        assert message in str(refused.value)
        assert "\n" not in str(refused.value)
