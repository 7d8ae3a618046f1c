"""The stores of langchain-postgres over a real Postgres, as they are searched beside the plain way."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import NAMESPACE_URL, uuid4, uuid5

import pytest
from langchain_core.vectorstores import VectorStoreRetriever
from langchain_rag_explain import ExplainedDocument, ExplainingRetriever
from langchain_rag_explain._internals import distance_strategy, store_inside
from langchain_rag_explain.stores import engine_of_store

from integrations.langchain.tests.conftest import LocalEmbeddings
from integrations.langchain.tests.test_langchain_retrievers import model
from rag_explain.results.explanation import Explanation
from rag_explain.results.notices import UNCHECKED
from tests.support import postgres
from tests.support.models import CORPUS

langchain_postgres = pytest.importorskip("langchain_postgres")

QUERY = "why did the dog look at the moon?"
IDS = [str(uuid5(NAMESPACE_URL, text)) for text in CORPUS]


class Filling(LocalEmbeddings):
    """Embeds other texts than it is given as long as it has a header."""

    header = ""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return super().embed_documents([self.header + text for text in texts])


def texts() -> dict[str, Any]:
    return {"texts": CORPUS, "ids": IDS, "metadatas": [{"number": at} for at in range(len(CORPUS))]}


@contextmanager
def classic(ids: list[str] = IDS, header: str = "", **options: Any) -> Iterator[Any]:
    with postgres.engine() as engine:
        embeddings = Filling(model())
        options = {"collection_name": uuid4().hex, **options}
        store = langchain_postgres.PGVector(embeddings, connection=engine, **options)
        embeddings.header = header
        store.add_texts(**{**texts(), "ids": ids})
        embeddings.header = ""
        try:
            yield store
        finally:
            store.delete_collection()


@contextmanager
def newer(**options: Any) -> Iterator[Any]:
    from sqlalchemy import NullPool

    engine = langchain_postgres.PGEngine.from_connection_string(postgres.url("asyncpg"), poolclass=NullPool)
    table = uuid4().hex
    try:
        embeddings = LocalEmbeddings(model())
        shape = {name: value for name, value in options.items() if name == "hybrid_search_config"}
        engine.init_vectorstore_table(table, len(embeddings.embed_query("a")), **shape)
        store = langchain_postgres.PGVectorStore.create_sync(engine, embeddings, table, **options)
        store.add_texts(**texts())
        yield store
    finally:
        engine._run_as_sync(engine.close())


def explained(wrapped: ExplainingRetriever, query: str = QUERY) -> list[tuple[ExplainedDocument, Explanation]]:
    found = []
    for document in wrapped.invoke(query):
        assert isinstance(document, ExplainedDocument)
        assert document.explanation is not None, document.hit.reason
        found.append((document, document.explanation))
    return found


def held(retriever: VectorStoreRetriever) -> list[tuple[ExplainedDocument, Explanation]]:
    """What the wrapped retriever finds, which is what the retriever itself finds."""
    plain = retriever.invoke(QUERY)
    found = explained(ExplainingRetriever(retriever=retriever))
    assert plain
    assert [document for document, _ in found] == plain
    return found


def waiting() -> int:
    """How many connections of the server are in a transaction that waits for its client."""
    import psycopg

    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        rows = connection.execute("SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in%'").fetchall()
    return int(rows[0][0])


@pytest.mark.parametrize("made", [classic, newer])
def test_filters_and_options_leave_results_as_they_are_and_scores_explained(made: Any) -> None:
    with made() as store:
        # The plain search of PGVector takes options that its scored one does not know.
        options = {"k": 2, "filter": {"number": {"$gte": 2}}, "fetch_k": 7}
        for document, explanation in held(store.as_retriever(search_kwargs=options)):
            assert document.metadata["number"] >= 2
            assert document.hit.metric == "cosine distance"
            assert document.hit.gap == pytest.approx(0, abs=1e-4)
            assert explanation.surrogate is None
        assert waiting() == 0


@pytest.mark.parametrize("made", [classic, newer])
def test_a_search_for_diversity_says_so_and_its_vectors_are_compared(made: Any) -> None:
    with made() as store:
        for document, explanation in held(store.as_retriever(search_type="mmr", search_kwargs={"k": 3})):
            assert "(MMR)" in (explanation.surrogate or "")
            assert document.hit.metric == "unknown"
            assert UNCHECKED not in {notice.code for notice in explanation.notices}


@pytest.mark.parametrize("made", [classic, newer])
def test_a_threshold_leaves_out_what_it_leaves_out_and_vectors_are_compared(made: Any) -> None:
    with made() as store:
        scores = sorted(score for _, score in store.similarity_search_with_relevance_scores(QUERY, k=5))
        options = {"k": 5, "score_threshold": scores[2]}
        found = held(store.as_retriever(search_type="similarity_score_threshold", search_kwargs=options))
        assert len(found) == 3
        for _, explanation in found:
            assert explanation.surrogate is None
            assert UNCHECKED not in {notice.code for notice in explanation.notices}


@pytest.mark.parametrize("when", ["of the store", "of the search", "not in this search"])
def test_hybrid_search_says_so_and_its_scores_are_no_similarity(when: str) -> None:
    from langchain_postgres.v2.hybrid_search_config import HybridSearchConfig, reciprocal_rank_fusion

    config = HybridSearchConfig(fusion_function=reciprocal_rank_fusion)
    with newer(**({} if when == "of the search" else {"hybrid_search_config": config})) as store:
        options = {"of the store": {}, "of the search": {"hybrid_search_config": config}}
        wanted = options.get(when, {"hybrid_search_config": None})
        for document, explanation in held(store.as_retriever(search_kwargs=wanted)):
            if when == "not in this search":
                assert explanation.surrogate is None
                assert document.hit.metric == "cosine distance"
            else:
                assert "hybrid mode" in (explanation.surrogate or "")
                assert document.hit.metric == "unknown"
        direct = ExplainingRetriever(vectorstore=store)
        found = direct.invoke(QUERY, **wanted)
        assert found == [document for document, _ in store.similarity_search_with_score(QUERY, **wanted)]
        assert {one.hit.metric for one in found} == {"cosine distance" if "not" in when else "unknown"}  # type: ignore[attr-defined]


def test_only_the_documents_of_its_collection_are_those_of_a_store() -> None:
    others = [str(uuid4()) for _ in CORPUS]
    with classic() as store, classic(others) as other:
        engine, beside = engine_of_store(store), engine_of_store(other)
        assert engine is not None
        assert beside is not None
        assert set(engine.vectors([*IDS, *others])) == set(IDS)
        assert {one.id for one in engine.documents() or []} == set(IDS)
        assert set(beside.vectors([*IDS, *others])) == set(others)
        built = ExplainingRetriever(retriever=store.as_retriever()).precompute(progress=False)
        assert built.built == len(CORPUS)
        name, store.collection_name = store.collection_name, "it's; DROP TABLE langchain_pg_embedding --"
        empty = engine_of_store(store)
        assert empty is not None
        assert (empty.vectors(IDS), empty.documents()) == ({}, [])
        store.collection_name = name


def test_a_row_without_a_vector_is_found_last_and_has_no_score() -> None:
    import psycopg

    with classic() as store:
        with psycopg.connect(postgres.url()) as connection:
            connection.execute("UPDATE langchain_pg_embedding SET embedding = NULL WHERE id = %s", [IDS[0]])
        *found, (last, explanation) = held(store.as_retriever(search_kwargs={"k": 5}))
        assert last.hit.score is None
        assert explanation.surrogate is None
        assert UNCHECKED in {notice.code for notice in explanation.notices}
        assert all(document.hit.gap == pytest.approx(0, abs=1e-4) for document, _ in found)


def asynchronous(engine: Any) -> Any:
    options: dict[str, Any] = {"collection_name": uuid4().hex, "create_extension": False}
    return langchain_postgres.PGVector(Filling(model()), connection=engine, **options)


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
def test_an_asynchronous_store_is_compared_in_the_loop_by_its_scores_and_outside_of_it_by_its_vectors(
    driver: str,
) -> None:
    from sqlalchemy.ext.asyncio import create_async_engine

    async def run() -> None:
        engine = create_async_engine(postgres.url(driver), pool_size=1, max_overflow=0)
        try:
            store = asynchronous(engine)
            store.embeddings.header = "honeybees, "
            await store.aadd_texts(**texts())
            store.embeddings.header = ""
            plain = store.as_retriever(search_kwargs={"k": 3})
            expected = await plain.ainvoke(QUERY)
            for mode in ("lazy", "eager"):
                found: Any = await ExplainingRetriever(retriever=plain, explain=mode).ainvoke(QUERY)
                assert found == expected
                for document in found:
                    assert document.hit.metric == "cosine distance"
                    reasons = " ".join(one.text for one in document.explanation.notices)
                    assert "the index's score implies" in reasons
                    assert ("the index's vector of" in reasons) == (mode == "eager")
            assert waiting() == 0
            await store.adelete_collection()
        finally:
            await engine.dispose()

    asyncio.run(run())


def test_a_newer_store_is_searched_in_a_loop_and_out_of_it() -> None:
    with newer() as store:
        plain = store.as_retriever()

        async def run() -> Any:
            found: Any = await ExplainingRetriever(retriever=plain).ainvoke(QUERY)
            assert found == await plain.ainvoke(QUERY)
            return found, [document.explanation.surrogate for document in found]

        found, reasons = asyncio.run(run())
        assert set(reasons) == {None}
        assert {document.hit.metric for document in found} == {"cosine distance"}
        inner = store_inside(store)
        assert inner is not None
        direct: Any = asyncio.run(ExplainingRetriever(retriever=inner.as_retriever()).ainvoke(QUERY))
        assert direct == found
        assert {document.hit.metric for document in direct} == {"cosine distance"}


def test_a_server_that_is_gone_fails_no_explanation() -> None:
    from sqlalchemy import create_engine

    with classic() as store:
        wrapped = ExplainingRetriever(retriever=store.as_retriever())
        found: Any = wrapped.invoke(QUERY)
        there, store._engine = store._engine, create_engine("postgresql+psycopg://@/none?host=/nowhere")
        later: Any = wrapped.invoke(QUERY)  # by its sessions, which still reach the server
        assert later == found
        for document in (*found, *later):
            assert document.explanation.surrogate is None
            assert document.hit.gap == pytest.approx(0, abs=1e-4)
        store._engine = there


def test_distance_strategy_and_the_store_inside() -> None:
    with classic(distance_strategy="l2") as store:
        assert distance_strategy(store) == "l2"
        assert engine_of_store(store).metric.name == "L2"  # type: ignore[union-attr]
        store._distance_strategy = "another"
        assert engine_of_store(store).metric.name == "unknown"  # type: ignore[union-attr]
    with newer() as store:
        inside: Any = store_inside(store)
        assert inside.embedding_service is store.embeddings
    assert store_inside(None) is None


def test_vectors_of_other_texts_are_marked_in_a_search_for_diversity_too() -> None:
    with classic(header="honeybees, ") as store:
        for _, explanation in held(store.as_retriever(search_type="mmr")):
            assert "the index's vector of" in " ".join(notice.text for notice in explanation.notices)
