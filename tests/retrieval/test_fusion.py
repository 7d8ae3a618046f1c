"""Fusion rules against the frameworks' own functions, and against what their papers write."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_classic.retrievers import EnsembleRetriever
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever as LangChainRetriever
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.llms import MockLLM
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.retrievers.fusion_retriever import FUSION_MODES
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from rag_explain.retrieval import fusion
from rag_explain.retrieval.fusion import Leg

LISTS = st.lists(
    st.lists(st.tuples(st.integers(0, 8), st.floats(-5, 5)), unique_by=lambda one: one[0], max_size=8),
    min_size=1,
    max_size=4,
)


class Fixed(BaseRetriever):
    """Returns these nodes with these scores."""

    def __init__(self, found: Sequence[tuple[int, float]]) -> None:
        super().__init__()
        self._found = found

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [NodeWithScore(node=TextNode(text=f"t{n}", id_=f"id-{n}"), score=score) for n, score in self._found]


class FixedDocuments(LangChainRetriever):
    """Returns these documents."""

    found: list[int]

    def _get_relevant_documents(self, query: str, *, run_manager: object) -> list[Document]:
        return [Document(f"t{number}") for number in self.found]


def fused(mode: FUSION_MODES, lists: Sequence[Sequence[tuple[int, float]]], weights: list[float]) -> dict[str, float]:
    """What LlamaIndex gives."""
    retriever = QueryFusionRetriever(
        [Fixed(one) for one in lists],
        llm=MockLLM(),
        mode=mode,
        num_queries=1,
        use_async=False,
        similarity_top_k=99,
        retriever_weights=weights,
    )
    return {node.node.get_content(): node.score or 0.0 for node in retriever.retrieve("q")}


def legs_of(lists: Sequence[Sequence[tuple[int, float]]], weights: Sequence[float]) -> list[Leg]:
    return [
        Leg([(f"t{number}", score) for number, score in one], weight)
        for one, weight in zip(lists, weights, strict=True)
    ]


RULES = {
    FUSION_MODES.RELATIVE_SCORE: fusion.relative,
    FUSION_MODES.DIST_BASED_SCORE: fusion.distribution,
    FUSION_MODES.SIMPLE: fusion.highest,
}


@pytest.mark.parametrize("mode", RULES)
@settings(max_examples=60, deadline=None)
@given(lists=LISTS, seed=st.integers(0, 99))
def test_legs_of_a_score_fusion_sum_to_what_llama_index_gives(mode, lists, seed):
    weights = [random.Random(seed + n).random() + 0.1 for n in range(len(lists))]
    shares = RULES[mode](legs_of(lists, [one / sum(weights) for one in weights]))
    theirs, ours = fused(mode, lists, weights), fusion.totals(shares)
    assert ours.keys() == theirs.keys()
    assert [ours[key] for key in theirs] == pytest.approx(list(theirs.values()), rel=1e-9, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(lists=LISTS)
def test_legs_of_llama_indexs_rank_fusion_sum_to_its_scores(lists):
    theirs = fused(FUSION_MODES.RECIPROCAL_RANK, lists, [1.0] * len(lists))
    ranked = [sorted(one, key=lambda both: both[1], reverse=True) for one in lists]
    ours = fusion.totals(fusion.reciprocal_rank(legs_of(ranked, [1.0] * len(lists)), first=0))
    assert ours == pytest.approx(theirs, rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(lists=LISTS, constant=st.integers(1, 90), seed=st.integers(0, 99))
def test_legs_of_langchains_ensemble_give_its_order(lists, constant, seed):
    weights = [random.Random(seed + n).random() + 0.1 for n in range(len(lists))]
    ensemble = EnsembleRetriever(
        retrievers=[FixedDocuments(found=[number for number, _ in one]) for one in lists], weights=weights, c=constant
    )
    found = [document.page_content for document in ensemble.invoke("q")]
    ours = fusion.totals(fusion.reciprocal_rank(legs_of(lists, weights), constant))
    assert found == sorted(ours, key=lambda key: ours[key], reverse=True)  # which keeps equal ones, as theirs does


def test_the_rules_are_what_their_equations_say():
    legs = [Leg([("a", 0.9), ("b", 0.3)], 0.25), Leg([("b", 12.0), ("c", 4.0), ("a", 2.0)], 0.75)]
    rrf: list[dict[Hashable, float]] = fusion.reciprocal_rank(legs)
    assert rrf == [{"a": 0.25 / 61, "b": 0.25 / 62}, {"b": 0.75 / 61, "c": 0.75 / 62, "a": 0.75 / 63}]
    assert fusion.weighted(legs)[1] == {"b": 9.0, "c": 3.0, "a": 1.5}
    relative = fusion.relative(legs, queries=2)
    assert relative[0] == {"a": 0.125, "b": 0.0}
    assert relative[1] == pytest.approx({"b": 0.375, "c": 0.75 * 0.2 / 2, "a": 0.0})
    assert fusion.highest(legs) == [{"a": 0.0, "b": 0.0}, {"b": 12.0, "c": 4.0, "a": 2.0}]
    mean, deviation = 6.0, (56 / 3) ** 0.5
    low, high = mean - 3 * deviation, mean + 3 * deviation
    assert fusion.distribution(legs)[1]["c"] == pytest.approx(0.75 * (4 - low) / (high - low))


def test_a_leg_that_found_nothing_and_one_whose_scores_are_all_alike():
    legs = [Leg([]), Leg([("a", 2.0), ("b", 2.0)]), Leg([("a", -1.0)])]
    assert fusion.relative(legs) == [{}, {"a": 1.0, "b": 1.0}, {"a": 0.0}]
    assert fusion.distribution(legs) == [{}, {"a": 1.0, "b": 1.0}, {"a": 0.0}]
    assert fusion.totals(fusion.highest(legs)) == {"a": 2.0, "b": 2.0}


def test_a_document_that_a_leg_returns_twice_counts_twice():
    (share,) = fusion.reciprocal_rank([Leg([("a", None), ("a", None)])])
    assert share == {"a": 1 / 61 + 1 / 62}
