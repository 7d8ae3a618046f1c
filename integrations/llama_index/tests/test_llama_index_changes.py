"""What is changed before a retrieval is followed; what is changed between it and a look is explained or said."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from llama_index.core import VectorStoreIndex
from llama_index.core.schema import TextNode
from llama_index.core.vector_stores.types import VectorStoreQueryMode
from llama_index.embeddings.huggingface import HuggingFaceEmbedding
from llama_index.retrievers.rag_explain import ExplainingRetriever
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize

from integrations.llama_index.tests.conftest import LocalEmbedding
from integrations.llama_index.tests.test_llama_index_truth import explained, saved
from tests.support.models import CORPUS, tiny

QUERY = "why did the dog look at the moon?"


def model(name: str = "roberta") -> SentenceTransformer:
    return tiny(name, after=lambda: [Normalize()], dtype=torch.float32)


def index_of(embed_model: Any) -> VectorStoreIndex:
    nodes = [TextNode(text=text, id_=f"id-{number}") for number, text in enumerate(CORPUS)]
    return VectorStoreIndex(nodes, embed_model=embed_model)


def cosine(embed_model: Any, text: str) -> float:
    one, other = np.array(embed_model.get_query_embedding(QUERY)), np.array(embed_model.get_text_embedding(text))
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


def _base(wrapped: ExplainingRetriever) -> None:
    wrapped.base = index_of(LocalEmbedding(model("bert"))).as_retriever()


def _parts(wrapped: ExplainingRetriever) -> None:
    wrapped.base.__dict__.update(vars(index_of(LocalEmbedding(model("bert"))).as_retriever()))


@pytest.mark.parametrize("change", [_base, _parts])
@pytest.mark.parametrize("is_looked_at", [True, False])
def test_what_was_exchanged_before_the_retrieval_is_what_is_explained(change: Any, is_looked_at: bool) -> None:
    wrapped = ExplainingRetriever(index_of(LocalEmbedding(model())).as_retriever())
    if is_looked_at:
        assert {one.surrogate for _, one in explained(wrapped, QUERY)} == {None}
    change(wrapped)
    base: Any = wrapped.base
    for node, explanation in explained(wrapped, QUERY):
        assert explanation.notices == ()
        assert explanation.score == pytest.approx(cosine(base._embed_model, node.text), abs=1e-5)
        assert explanation.score == pytest.approx(node.score, abs=1e-5)


def test_another_query_mode_is_no_search_by_similarity() -> None:
    base: Any = index_of(LocalEmbedding(model())).as_retriever()
    wrapped = ExplainingRetriever(base)
    assert {one.surrogate for _, one in explained(wrapped, QUERY)} == {None}
    base._vector_store_query_mode = VectorStoreQueryMode.MMR
    for node, explanation in explained(wrapped, QUERY):
        assert "in mmr mode" in (explanation.surrogate or "")
        assert (node.hit.metric, node.hit.gap) == ("unknown", None)


def test_a_node_is_explained_by_the_instruction_of_its_retrieval() -> None:
    mine: Any = HuggingFaceEmbedding(saved(), device="cpu", query_instruction="where: ")
    index = index_of(mine)
    wrapped = ExplainingRetriever(index.as_retriever())
    nodes: Any = wrapped.retrieve(QUERY)
    scores = [cosine(mine, node.text) for node in nodes]
    mine.query_instruction = "the old bridge: "
    for node, score in zip(nodes, scores, strict=True):
        assert node.explanation.score == pytest.approx(score, abs=1e-5)
        assert node.explanation.surrogate is None
    for node, explanation in explained(wrapped, QUERY):
        assert explanation.score == pytest.approx(cosine(mine, node.text), abs=1e-5)
        assert explanation.notices == ()


@pytest.mark.parametrize("metric", [None, "unknown"])
def test_a_model_that_changed_between_retrieval_and_look_is_a_stand_in(metric: str | None) -> None:
    encoder = model()
    wrapped = ExplainingRetriever(index_of(LocalEmbedding(encoder)).as_retriever(), metric=metric)
    nodes: Any = wrapped.retrieve(QUERY)
    with torch.no_grad():
        next(encoder.parameters()).mul_(1.5)
    for node in nodes:
        assert "the model was changed between the search and this explanation" in node.explanation.surrogate


def test_a_copy_in_another_mode_follows_its_own_base() -> None:
    wrapped = ExplainingRetriever(index_of(LocalEmbedding(model())).as_retriever())
    other = wrapped.with_explain("eager")
    other.base = index_of(LocalEmbedding(model("bert"))).as_retriever()
    for retriever in (wrapped, other):
        for node, explanation in explained(retriever, QUERY):
            assert explanation.surrogate is None
            assert explanation.score == pytest.approx(node.score, abs=1e-5)
