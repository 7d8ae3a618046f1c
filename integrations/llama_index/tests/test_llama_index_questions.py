"""Why not that one, what if and how sure, of indexes that LlamaIndex wraps."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import pytest
import torch
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.schema import NodeRelationship, RelatedNodeInfo, TextNode
from llama_index.core.vector_stores import ExactMatchFilter, MetadataFilters
from llama_index.retrievers.rag_explain import ExplainingRetriever
from llama_index.retrievers.rag_explain.nodes import embedded

from integrations.llama_index.tests.conftest import LocalEmbedding
from rag_explain.errors import InvalidInput
from rag_explain.explainer import Explainer
from rag_explain.results.why_not import WhyNot
from tests.support.models import CORPUS, tiny

QUERY = "why did the dog bark at the moon?"
TEXTS = [f"{text} {other}" for text in CORPUS for other in CORPUS]
NAMES = [f"{number:08d}-0000-0000-0000-000000000000" for number in range(len(TEXTS))]


@cache
def model() -> Any:
    return tiny("bert", dtype=torch.float32)


def nodes() -> list[TextNode]:
    found = []
    for number, (name, text) in enumerate(zip(NAMES, TEXTS, strict=True)):
        node = TextNode(text=text, id_=name, metadata={"lang": "de" if number % 5 == 1 else "en"})
        node.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id=f"book-{number // 5}")
        found.append(node)
    return found


@cache
def order() -> list[str]:
    """All ids by exact search: LlamaIndex embeds metadata with the text."""
    texts = [embedded(node) for node in nodes()]
    scores = Explainer(model()).scorer.score(QUERY, [text for text in texts if text is not None])
    return [NAMES[at] for at in sorted(range(len(TEXTS)), key=lambda at: -scores[at])]


def simple() -> VectorStoreIndex:
    return VectorStoreIndex(nodes(), embed_model=LocalEmbedding(model()))


def chroma() -> VectorStoreIndex:
    chromadb = pytest.importorskip("chromadb")
    wrapper = pytest.importorskip("llama_index.vector_stores.chroma")
    client = chromadb.EphemeralClient()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Chroma's own
        if any(one.name == "asked" for one in client.list_collections()):
            client.delete_collection("asked")
        collection = client.create_collection("asked", configuration={"hnsw": {"space": "cosine"}})
        context = StorageContext.from_defaults(vector_store=wrapper.ChromaVectorStore(chroma_collection=collection))
        return VectorStoreIndex(nodes(), storage_context=context, embed_model=LocalEmbedding(model()))


def qdrant() -> VectorStoreIndex:
    client = pytest.importorskip("qdrant_client")
    wrapper = pytest.importorskip("llama_index.vector_stores.qdrant")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Qdrant's own: payload indexes have no effect in a local one
        store = wrapper.QdrantVectorStore("asked", client=client.QdrantClient(":memory:"))
        context = StorageContext.from_defaults(vector_store=store)
        return VectorStoreIndex(nodes(), storage_context=context, embed_model=LocalEmbedding(model()))


indexes = pytest.mark.parametrize("build", [simple, chroma, qdrant])


def names(found: WhyNot) -> list[str]:
    return [rung.name for rung in found.rungs]


@indexes
def test_every_rung_that_an_index_can_tell(build: Any) -> None:
    index = build()
    retriever = ExplainingRetriever(index.as_retriever(similarity_top_k=3))
    assert names(retriever.why_not(QUERY, "nobody")) == ["missing"]
    book = next(f"book-{NAMES.index(name) // 5}" for name in order())
    assert names(retriever.why_not(QUERY, book)) == ["chunks"]
    far = order()[-1]
    cut = retriever.why_not(QUERY, far)
    assert (cut.reason.name, cut.rank, cut.total) == ("cut", 25, 25)
    assert names(cut)[-1] == "words"
    filters = MetadataFilters(filters=[ExactMatchFilter(key="lang", value="en")])
    filtered = ExplainingRetriever(index.as_retriever(similarity_top_k=3, filters=filters))
    german = next(name for name in order() if NAMES.index(name) % 5 == 1)
    found = filtered.why_not(QUERY, german)
    assert found.reason.name in ("filter", "chunks")
    if found.reason.name == "chunks":  # another node of the same book was returned in its place
        assert "book-" in found.reason.text


@indexes
def test_a_filter_is_named_where_no_other_node_of_the_document_was_returned(build: Any) -> None:
    filters = MetadataFilters(filters=[ExactMatchFilter(key="lang", value="en")])
    filtered = ExplainingRetriever(build().as_retriever(similarity_top_k=1, filters=filters))
    returned = filtered.retrieve(QUERY)[0].node.node_id
    book = NAMES.index(returned) // 5
    german = next(name for at, name in enumerate(NAMES) if at % 5 == 1 and at // 5 != book)
    found = filtered.why_not(QUERY, german)
    assert names(found) == ["filter"]
    assert "without the retriever's metadata filters" in found.reason.text


@indexes
def test_a_what_if_has_the_rank_of_exact_search_and_hits_say_where_they_stand(build: Any) -> None:
    retriever = ExplainingRetriever(build().as_retriever(similarity_top_k=3))
    found = retriever.what_if(QUERY, order()[5], without="dog")
    assert (found.rank, found.total) == (6, 25)
    assert all(one.rank is not None for one in found.changes)
    calibration = retriever.calibrate()
    hit = retriever.retrieve(QUERY)[0].hit
    assert hit.standing == pytest.approx(calibration.standing(hit.explanation.score), abs=1e-3)


def test_what_a_retriever_does_not_take_is_refused_in_words() -> None:
    retriever = ExplainingRetriever(simple().as_retriever())
    with pytest.raises(InvalidInput, match="takes no filter="):
        retriever.why_not(QUERY, NAMES[0], filter={})
