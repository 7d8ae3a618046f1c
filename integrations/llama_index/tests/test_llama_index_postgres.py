"""LlamaIndex's PGVectorStore over a real Postgres, as it is searched beside the plain way."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.schema import TextNode
from llama_index.core.vector_stores import FilterOperator, MetadataFilter, MetadataFilters
from llama_index.retrievers.rag_explain import ExplainedNode, ExplainingRetriever
from llama_index.retrievers.rag_explain._internals import connected
from llama_index.retrievers.rag_explain.stores import engine_of_retriever

from integrations.llama_index.tests.conftest import LocalEmbedding
from integrations.llama_index.tests.test_llama_index_retrievers import model
from rag_explain.results.explanation import Explanation
from rag_explain.results.notices import UNCHECKED
from tests.support import postgres
from tests.support.models import CORPUS, tiny

stores = pytest.importorskip("llama_index.vector_stores.postgres")

QUERY = "why did the dog look at the moon?"
IDS = [f'it\'s "{number}" 日本' for number in range(len(CORPUS))]


@contextmanager
def store_of(table: str | None = None, embedding: Any = None, **options: Any) -> Iterator[Any]:
    """An empty store, or the one over a table that is there."""
    size = len((embedding or LocalEmbedding(model())).get_text_embedding("a"))
    with postgres.engine("psycopg2") as engine:
        engines = {"engine": engine, "async_engine": postgres.async_engine()}
        yield stores.PGVectorStore(table_name=table or f"t{uuid4().hex}", embed_dim=size, **engines, **options)


def index_of(store: Any, embedding: Any = None) -> VectorStoreIndex:
    nodes = [
        TextNode(text=text, id_=name, metadata={"number": at})
        for at, (name, text) in enumerate(zip(IDS, CORPUS, strict=True))
    ]
    context = StorageContext.from_defaults(vector_store=store)
    return VectorStoreIndex(nodes, storage_context=context, embed_model=embedding or LocalEmbedding(model()))


def held(plain: Any) -> list[tuple[ExplainedNode, Explanation]]:
    """What the wrapped retriever finds, which is what the retriever itself finds, in a loop too."""
    wrapped = ExplainingRetriever(plain)
    found, in_loop = wrapped.retrieve(QUERY), asyncio.run(wrapped.aretrieve(QUERY))
    assert found
    for nodes, expected in ((found, plain.retrieve(QUERY)), (in_loop, asyncio.run(plain.aretrieve(QUERY)))):
        assert [(one.node_id, one.score) for one in nodes] == [(one.node_id, one.score) for one in expected]
    pairs = []
    for node in (*found, *in_loop):
        assert isinstance(node, ExplainedNode)
        assert node.explanation is not None, node.hit.reason
        pairs.append((node, node.explanation))
    return pairs


def codes(explanation: Explanation) -> set[str]:
    return {notice.code for notice in explanation.notices}


def test_filters_leave_results_as_they_are_and_scores_explained() -> None:
    with store_of() as store:
        filters = MetadataFilters(filters=[MetadataFilter(key="number", value=2, operator=FilterOperator.GTE)])
        for node, explanation in held(index_of(store).as_retriever(filters=filters)):
            assert node.node.metadata["number"] >= 2
            assert node.hit.metric == "cosine"
            assert node.hit.gap == pytest.approx(0, abs=1e-4)
            assert explanation.surrogate is None


@pytest.mark.parametrize("mode", ["hybrid", "sparse", "text_search", "mmr"])
def test_another_mode_says_so_and_vectors_are_compared(mode: str) -> None:
    with store_of(hybrid_search=True) as store:
        index = index_of(store)
        for node, explanation in held(index.as_retriever(vector_store_query_mode=mode, similarity_top_k=3)):
            assert f"{mode} mode" in (explanation.surrogate or "")
            assert node.hit.metric == "unknown"
            assert UNCHECKED not in codes(explanation)
        # A store that can mix does not, as long as it is not asked to.
        assert {node.hit.metric for node, _ in held(index.as_retriever())} == {"cosine"}


@pytest.mark.parametrize("method", ["vector_l2_ops", "vector_ip_ops", "vector_cosine_ops"])
def test_scores_are_cosines_whatever_the_index_was_made_for(method: str) -> None:
    embedding = LocalEmbedding(tiny())  # its vectors have other lengths than 1
    hnsw = {"hnsw_m": 16, "hnsw_ef_construction": 64, "hnsw_ef_search": 40, "hnsw_dist_method": method}
    with store_of(embedding=embedding, hnsw_kwargs=hnsw) as store:
        plain = index_of(store, embedding).as_retriever(similarity_top_k=len(CORPUS))
        asked = np.array(embedding.get_query_embedding(QUERY))
        for node in plain.retrieve(QUERY):
            own = np.array(embedding.get_text_embedding(node.node.get_content("embed")))  # type: ignore[arg-type]
            cosine = own @ asked / np.linalg.norm(own) / np.linalg.norm(asked)
            assert node.score == pytest.approx(cosine, abs=1e-5)
            assert abs(np.linalg.norm(own) - 1) > 0.1
        for node, explanation in held(plain):
            assert explanation.surrogate is None
            assert node.hit.gap == pytest.approx(0, abs=1e-4)


def test_nodes_are_listed_before_the_first_search_too() -> None:
    embedding = LocalEmbedding(model())
    with store_of() as store:
        index_of(store)
        there = {"connection_string": postgres.url("psycopg2"), "async_connection_string": postgres.url("asyncpg")}
        size = {"table_name": store.table_name, "embed_dim": store.embed_dim}
        later, other = (stores.PGVectorStore.from_params(**there, **size) for _ in range(2))
        index = VectorStoreIndex.from_vector_store(later, embed_model=embedding)
        assert later.client is None
        assert ExplainingRetriever(index.as_retriever()).precompute(progress=False).kept == len(CORPUS)
        assert other.client is None
        assert connected(other) is other
        assert other.client is not None
        for one in (later, other):
            asyncio.run(one.close())


def test_a_node_without_a_vector_is_found_last_and_its_score_is_not_its_similarity() -> None:
    import psycopg

    with store_of() as store:
        index = index_of(store)
        with psycopg.connect(postgres.url()) as connection:
            statement = psycopg.sql.SQL("UPDATE {} SET embedding = NULL WHERE node_id = %s")
            connection.execute(statement.format(psycopg.sql.Identifier(f"data_{store.table_name}")), [IDS[0]])
        pairs = held(index.as_retriever(similarity_top_k=len(CORPUS)))
        for node, explanation in pairs:
            is_empty = node.node_id == IDS[0]
            assert (node.score == 0) == is_empty
            assert (explanation.surrogate is not None) == is_empty


def test_a_node_that_was_added_twice_is_explained_by_its_score() -> None:
    with store_of() as store:
        index_of(store)
        index = index_of(store)
        found = held(index.as_retriever(similarity_top_k=4))
        assert len({node.node_id for node, _ in found}) == 2
        for node, explanation in found:
            assert explanation.surrogate is None
            assert node.hit.gap == pytest.approx(0, abs=1e-4)
        assert ExplainingRetriever(index.as_retriever()).precompute(progress=False).kept == len(CORPUS)


# pgvector has the type since 0.7; with it, 16 bits are kept of each number. Here another type has its name, of the very
# functions that the type of 32 bits is made of: what is asked is the same, and nothing is rounded.
HALFVEC = """
CREATE TYPE halfvec;
CREATE FUNCTION halfvec_in(cstring, oid, int) RETURNS halfvec AS '$libdir/vector', 'vector_in' LANGUAGE C STRICT;
CREATE FUNCTION halfvec_out(halfvec) RETURNS cstring AS '$libdir/vector', 'vector_out' LANGUAGE C STRICT;
CREATE FUNCTION halfvec_typmod_in(cstring[]) RETURNS int AS '$libdir/vector', 'vector_typmod_in' LANGUAGE C STRICT;
CREATE TYPE halfvec (
    INPUT = halfvec_in, OUTPUT = halfvec_out, TYPMOD_IN = halfvec_typmod_in, STORAGE = external);
CREATE FUNCTION halfvec_to_float4(halfvec, int, bool) RETURNS real[]
    AS '$libdir/vector', 'vector_to_float4' LANGUAGE C STRICT;
CREATE CAST (halfvec AS real[]) WITH FUNCTION halfvec_to_float4(halfvec, int, bool) AS ASSIGNMENT;
CREATE FUNCTION half_distance(halfvec, halfvec) RETURNS float8 AS '$libdir/vector', 'cosine_distance' LANGUAGE C STRICT;
CREATE OPERATOR <=> (LEFTARG = halfvec, RIGHTARG = halfvec, PROCEDURE = half_distance, COMMUTATOR = '<=>');
"""


class Half(LocalEmbedding):
    """What a column of 16 bits makes of the vectors of nodes, as LlamaIndex has it send them."""

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        kept = np.array([self._get_text_embedding(text) for text in texts], np.float16)
        return kept.tolist()  # type: ignore[no-any-return]


def test_a_column_of_half_precision_is_read_like_any_other() -> None:
    import psycopg

    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        if not connection.execute("SELECT 1 FROM pg_type WHERE typname = 'halfvec'").fetchone():
            connection.execute(HALFVEC)
    with store_of(use_halfvec=True, use_jsonb=True) as store:
        plain = index_of(store, Half(model())).as_retriever()
        engine = engine_of_retriever(plain)
        assert engine is not None
        assert engine.vectors(IDS).keys() == set(IDS)
        for node, explanation in held(plain):
            assert explanation.surrogate is None
            assert 0 < abs(node.hit.gap or 0) < 1e-3
        assert ExplainingRetriever(plain).precompute(progress=False).kept == len(CORPUS)
