"""get_explanation for nodes that were read back: from the log, from kept factors, or it says what is gone."""

from __future__ import annotations

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.retrievers.rag_explain import ExplainedNode, ExplainingRetriever, get_explanation, log_queries

from integrations.llama_index.tests.conftest import LocalEmbedding
from rag_explain import Explainer
from rag_explain.errors import InvalidInput, LogError
from rag_explain.log import ExplanationLog
from rag_explain.results.notices import UNCHECKED
from tests.support.encodes import encodes
from tests.support.models import CORPUS, tiny

QUESTION = "why did the dog look at the moon?"


@pytest.fixture(scope="module")
def index() -> VectorStoreIndex:
    nodes = [TextNode(text=text, id_=f"id-{n}", metadata={"file": f"{n}.md"}) for n, text in enumerate(CORPUS)]
    return VectorStoreIndex(nodes, embed_model=LocalEmbedding(tiny("bert")))


def answered(index: VectorStoreIndex, log: ExplanationLog) -> list[NodeWithScore]:
    """The sources of an answer that was logged, made anew of their fields."""
    retriever = ExplainingRetriever(index.as_retriever(similarity_top_k=2))
    with log_queries(log):
        response = RetrieverQueryEngine.from_args(retriever, llm=MockLLM()).query(QUESTION)
    return [
        NodeWithScore(node=TextNode.from_json(one.node.to_json()), score=one.score) for one in response.source_nodes
    ]


def test_a_node_with_an_explanation_beside_it_needs_nothing_else(index: VectorStoreIndex) -> None:
    node, *_ = ExplainingRetriever(index.as_retriever()).retrieve(QUESTION)
    assert isinstance(node, ExplainedNode)
    assert get_explanation(node) is node.explanation is not None
    (off, *_) = ExplainingRetriever(index.as_retriever(), explain="off").retrieve(QUESTION)
    assert get_explanation(off) is None


def test_the_logged_explanation_of_a_node_that_was_read_back(index: VectorStoreIndex, log: ExplanationLog) -> None:
    nodes = answered(index, log)
    (record,) = log.records()
    for node, hit in zip(nodes, record.hits, strict=True):
        assert get_explanation(node) is None
        found = get_explanation(node, query=QUESTION, log=log)
        assert found is not None
        assert hit.explanation is not None
        assert found.to_dict() == hit.explanation.to_dict()
        nameless = NodeWithScore(node=TextNode(text=node.node.get_content(), metadata=node.node.metadata))
        assert get_explanation(nameless, query=QUESTION, log=log.folder.path).to_dict() == found.to_dict()  # type: ignore[union-attr]
        nameless.node.metadata = {"file": "another.md"}
        assert "is another text now" in get_explanation(nameless, query=QUESTION, log=log).surrogate  # type: ignore[union-attr, operator]
    with pytest.raises(LogError, match="has this question without this document"):
        get_explanation(NodeWithScore(node=TextNode(text="never found")), query=QUESTION, log=log)
    with pytest.raises(InvalidInput, match="pass query= and, with it, log= or explainer="):
        get_explanation(nodes[0], log=log)
    with pytest.raises(InvalidInput, match=r"takes a NodeWithScore, not TextNode: NodeWithScore\(node=node\)"):
        get_explanation(TextNode(text="alone"), query=QUESTION, log=log)  # type: ignore[arg-type]  # the mistake


def test_from_kept_factors_it_is_computed_again_without_encoding_a_node(index: VectorStoreIndex) -> None:
    with Explainer(tiny("bert")) as explainer:
        retriever = ExplainingRetriever(index.as_retriever(), explainer=explainer)
        assert retriever.precompute(progress=False).built == len(CORPUS)
        node, *_ = index.as_retriever().retrieve(QUESTION)
        with encodes() as seen:
            found = get_explanation(node, query=QUESTION, explainer=explainer, unit="sentence")
    assert found is not None
    assert seen.documents == []
    assert (found.document, found.provenance["path"]) == (node.node.get_content(), "memory")
    assert UNCHECKED in [notice.code for notice in found.notices]


def test_a_node_says_of_itself_only_what_is_true(index: VectorStoreIndex) -> None:
    node, *_ = ExplainingRetriever(index.as_retriever()).retrieve(QUESTION)
    for alone in (ExplainedNode(node=node.node, score=node.score), ExplainedNode.model_construct(node=node.node)):
        assert get_explanation(alone) is None
        for name in ("hit", "explanation"):
            with pytest.raises(AttributeError, match="no explanation stands beside this node: it was made from fields"):
                getattr(alone, name)
