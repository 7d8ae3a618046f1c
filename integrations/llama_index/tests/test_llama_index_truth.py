"""What LlamaIndex's embedding models and stores really computed is explained, or the explanation says what differs."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import torch
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.schema import MetadataMode, TextNode
from llama_index.embeddings.huggingface import HuggingFaceEmbedding
from llama_index.retrievers.rag_explain import ExplainedNode, ExplainingRetriever, ExplanationPostprocessor
from sentence_transformers.sentence_transformer.modules import Normalize

from integrations.llama_index.tests.conftest import LocalEmbedding
from integrations.llama_index.tests.test_llama_index_retrievers import events
from rag_explain import Explainer
from rag_explain.results.explanation import Explanation
from rag_explain.results.notices import UNCHECKED
from tests.support.models import CORPUS, routed, tiny

QUERY = "why did the dog\nlook at the moon?"
PROMPTS = {"query": "the old bridge: ", "document": "a cat: ", "text": "honeybees, "}


@cache
def saved(normalize: bool = True, **settings: Any) -> str:
    """Where a model with prompts is kept, for embedding models that load it by name."""
    folder = tempfile.mkdtemp(prefix="tiny-prompts-")
    after = [Normalize()] if normalize else []
    made = tiny("roberta", after=lambda: after, dtype=torch.float32, prompts=PROMPTS, **settings)
    made.save(folder, create_model_card=False)
    return folder


def nodes() -> list[TextNode]:
    return [
        TextNode(text=text.replace(" ", "\n", 1), id_=f"id-{n}", metadata={"title": "moon"} if n % 2 else {})
        for n, text in enumerate(CORPUS)
    ]


def explained(retriever: BaseRetriever, query: str = QUERY) -> list[tuple[ExplainedNode, Explanation]]:
    found = []
    for node in retriever.retrieve(query):
        assert isinstance(node, ExplainedNode)
        assert node.explanation is not None, node.hit.reason
        found.append((node, node.explanation))
    assert found
    return found


USAGES: list[dict[str, Any]] = [
    {},
    {"query_instruction": "where: "},
    {"query_instruction": "where: ", "text_instruction": "the capital: "},
    {"query_instruction": "where: ", "max_length": 12},
    {"normalize": False},
    {"truncate_dim": 8},
    {"default_prompt_name": "text", "text_instruction": "paris "},
]


@pytest.mark.parametrize("options", USAGES, ids=str)
def test_what_the_embedding_model_does_is_what_is_explained(options: dict[str, Any]) -> None:
    model = HuggingFaceEmbedding(saved(include_prompt=False), device="cpu", **options)
    index = VectorStoreIndex(nodes(), embed_model=model)
    query = np.array(model.get_query_embedding(QUERY))
    for node, explanation in explained(ExplainingRetriever(index.as_retriever(), unit="token")):
        assert explanation.surrogate is None
        assert UNCHECKED not in [notice.code for notice in explanation.notices]
        stored = np.array(model.get_text_embedding(node.node.get_content(MetadataMode.EMBED)))
        cosine = query @ stored / np.linalg.norm(query) / np.linalg.norm(stored)
        assert explanation.score == pytest.approx(cosine, abs=1e-5)
        assert explanation.score == pytest.approx(node.score, abs=1e-5)
        assert explanation.gap == pytest.approx(0.0, abs=1e-4)
        for text, tokens in ((QUERY, explanation.query_tokens), (node.text, explanation.document_tokens)):
            assert all(text[one.start : one.end] == one.text for one in tokens if one.part == "text")
        parts = {token.part for token in explanation.query_tokens}
        assert ("prompt" in parts) == ("query_instruction" in options)
        assert ("metadata" in {token.part for token in explanation.document_tokens}) == bool(node.metadata)


@pytest.mark.parametrize("is_told", [False, True])
def test_the_tower_that_the_embedding_model_takes_is_the_one_that_is_explained(is_told: bool, tmp_path: Path) -> None:
    query, document = tiny("bert", dtype=torch.float32), tiny("roberta", dtype=torch.float32)
    towers = routed(query, document, Normalize())
    towers.save(str(tmp_path), create_model_card=False)
    model: BaseEmbedding = LocalEmbedding(towers) if is_told else HuggingFaceEmbedding(str(tmp_path), device="cpu")
    index = VectorStoreIndex(nodes(), embed_model=model)
    asked = np.array(model.get_query_embedding(QUERY))
    reader = (query if is_told else document).tokenizer  # told no task, the model takes its default route for both
    for node, explanation in explained(ExplainingRetriever(index.as_retriever(), unit="token")):
        stored = np.array(model.get_text_embedding(node.node.get_content(MetadataMode.EMBED)))
        assert explanation.surrogate is None
        assert explanation.score == pytest.approx(float(asked @ stored), abs=1e-5)
        assert explanation.gap == pytest.approx(0.0, abs=1e-4)
        pieces = reader.convert_ids_to_tokens(reader(QUERY)["input_ids"])
        assert [token.piece for token in explanation.query_tokens] == pieces


def test_asking_leaves_no_trace_and_touches_no_cache() -> None:
    model = HuggingFaceEmbedding(saved(), device="cpu")
    base = VectorStoreIndex(nodes(), embed_model=model).as_retriever()
    (found, *_) = ExplainingRetriever(base).retrieve(QUERY)
    prompts = dict(model._model.prompts)
    with events() as seen:
        assert found.explanation is not None  # type: ignore[attr-defined]
    assert seen == []
    assert (model._model.prompts, type(model._model).__mro__[0].__module__) == (
        prompts,
        "sentence_transformers.sentence_transformer.model",
    )


def test_an_explainer_that_embeds_otherwise_is_told_what_to_pass() -> None:
    model = HuggingFaceEmbedding(saved(), device="cpu", query_instruction="where: ")
    base = VectorStoreIndex(nodes(), embed_model=model).as_retriever()
    wrong = Explainer(tiny("roberta", after=lambda: [Normalize()], dtype=torch.float32))
    for _, explanation in explained(ExplainingRetriever(base, wrong, surrogate=False)):
        assert "HuggingFaceEmbedding gives the query another vector" in (explanation.surrogate or "")
        assert "prompts={'query': 'where: ', 'document': ''}" in (explanation.surrogate or "")
    right = tiny("roberta", after=lambda: [Normalize()], dtype=torch.float32, prompts={"query": "where: "})
    for _, explanation in explained(ExplainingRetriever(base, Explainer(right))):
        assert explanation.surrogate is None


def test_an_embedding_model_that_was_changed_is_noticed() -> None:
    model: Any = HuggingFaceEmbedding(saved(), device="cpu")
    wrapped = ExplainingRetriever(VectorStoreIndex(nodes(), embed_model=model).as_retriever(), unit="token")
    assert {one.surrogate for _, one in explained(wrapped)} == {None}
    model._model.prompts = {"query": "where: ", "text": ""}
    for node, explanation in explained(wrapped):
        assert explanation.surrogate is None
        assert explanation.score == pytest.approx(node.score, abs=1e-5)
        assert "prompt" in {token.part for token in explanation.query_tokens}


def test_the_postprocessor_takes_the_embedding_model() -> None:
    model = HuggingFaceEmbedding(saved(), device="cpu", query_instruction="where: ")
    found = VectorStoreIndex(nodes(), embed_model=model).as_retriever().retrieve(QUERY)
    postprocessor = ExplanationPostprocessor(explainer=model, metric="cosine")
    for node in postprocessor.postprocess_nodes(found, query_str=QUERY):
        assert node.explanation.surrogate is None  # type: ignore[attr-defined]
        assert node.explanation.score == pytest.approx(node.score, abs=1e-5)  # type: ignore[attr-defined]


class Header(BaseEmbedding):
    """Embeds nodes with a header that they do not have."""

    inner: Any

    def _get_query_embedding(self, query: str) -> list[float]:
        return self.inner._get_query_embedding(query)  # type: ignore[no-any-return]

    def _get_text_embedding(self, text: str) -> list[float]:
        return self.inner._get_text_embedding(f"the {text}")  # type: ignore[no-any-return]

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_query_embedding(query)


def stored(kind: str, space: str = "cosine") -> StorageContext:
    """A context with an empty vector store of this kind."""
    store: Any = None
    if kind == "chroma":
        chromadb = pytest.importorskip("chromadb")
        stores = pytest.importorskip("llama_index.vector_stores.chroma")
        made = chromadb.EphemeralClient().create_collection(uuid4().hex, metadata={"hnsw:space": space})
        store = stores.ChromaVectorStore(chroma_collection=made)
    elif kind == "faiss":
        stores = pytest.importorskip("llama_index.vector_stores.faiss")
        store = stores.FaissVectorStore(faiss_index=pytest.importorskip("faiss").IndexFlatIP(16))
    return StorageContext.from_defaults(vector_store=store)


@pytest.mark.parametrize("kind", ["simple", "chroma", "faiss"])
@pytest.mark.parametrize("contents", ["own", "random", "header"])
def test_an_index_of_other_vectors_is_not_exact(kind: str, contents: str) -> None:
    model = LocalEmbedding(tiny("roberta", after=lambda: [Normalize()], dtype=torch.float32))
    made = nodes()
    if contents == "random":
        for node, vector in zip(made, np.random.default_rng(0).normal(size=(len(made), 16)), strict=True):
            node.embedding = vector.tolist()
    built = VectorStoreIndex(
        made, storage_context=stored(kind), embed_model=Header(inner=model) if contents == "header" else model
    )
    wrapped = ExplainingRetriever(built.as_retriever(embed_model=model), surrogate=False)
    for _ in range(2):
        for _, explanation in explained(wrapped):
            if contents == "own":
                assert explanation.notices == ()
            else:
                assert "the index's vector of this document is not the one" in (explanation.surrogate or "")
        assert wrapped.precompute(unit="token", progress=False).failed == 0  # then without encoding the nodes


def test_an_instruction_that_only_the_code_knows_is_seen() -> None:
    inner = LocalEmbedding(tiny("roberta", after=lambda: [Normalize()], dtype=torch.float32))
    index = VectorStoreIndex(nodes(), embed_model=Header(inner=inner))
    for node, explanation in explained(ExplainingRetriever(index.as_retriever(), unit="token")):
        assert explanation.surrogate is None
        assert explanation.score == pytest.approx(node.score, abs=1e-5)
        assert "prompt" in {token.part for token in explanation.document_tokens}


@pytest.mark.parametrize("space", ["l2", "cosine", "ip"])
def test_chroma_tells_its_metric_its_vectors_and_its_nodes(space: str) -> None:
    model = LocalEmbedding(tiny("roberta", after=lambda: [Normalize()], dtype=torch.float32))
    context = stored("chroma", space)
    VectorStoreIndex(nodes(), storage_context=context, embed_model=model)
    index = VectorStoreIndex.from_vector_store(context.vector_store, embed_model=model)
    wrapped = ExplainingRetriever(index.as_retriever())
    names = {"l2": "exp(-squared L2)", "cosine": "exp(-cosine distance)", "ip": "exp(-(1 - inner product))"}
    for node, explanation in explained(wrapped):
        assert explanation.notices == ()
        assert node.hit.metric == names[space]
        assert node.hit.gap == pytest.approx(0.0, abs=1e-5)
    assert wrapped.precompute(unit="token", progress=False).kept == len(CORPUS)
    assert {one.provenance["path"] for _, one in explained(wrapped)} == {"memory"}
