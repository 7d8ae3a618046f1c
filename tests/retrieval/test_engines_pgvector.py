"""Postgres with pgvector, asked by the handles that people have, on tables of every shape; it is only ever read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from uuid import NAMESPACE_URL, UUID, uuid4, uuid5

import numpy as np
import pytest

from rag_explain.results.metric import UNKNOWN, Metric
from rag_explain.retrieval import Engine, Kept, Place, engine_of
from tests.support import postgres

psycopg = pytest.importorskip("psycopg")
pytest.importorskip("sqlalchemy")
pytest.importorskip("asyncpg")

VECTORS = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
IDS = ["a", "it's; DROP TABLE x --", "日本 %s", '\\ "d" :e ::f $1']
AWKWARD = 'a "b" %s %% :c $1 日本'


@pytest.fixture
def connection() -> Iterator[Any]:
    with psycopg.connect(postgres.url(), autocommit=True) as opened:
        yield opened


def table_of(connection: Any, kind: str = "text", ids: Sequence[Any] = IDS, name: str | None = None) -> Place:
    """A filled table whose columns are called awkwardly, and where it is."""
    place = Place(
        collection=name or f"{uuid4()} {AWKWARD}"[:40],
        key=f"key {AWKWARD}",
        vector=f"vector {AWKWARD}",
        text=f"text {AWKWARD}",
        metric=Metric("L2"),
    )
    column = psycopg.sql.Identifier
    names = [column(one) for one in (place.key, place.vector, place.text) if one is not None]
    shape = psycopg.sql.SQL("CREATE TABLE {} ({} " + kind + ", {} vector(8), {} text, more jsonb)")
    connection.execute(shape.format(column(str(place.collection)), *names))
    fill = f'INSERT INTO "{str(place.collection).replace(chr(34), 2 * chr(34))}" VALUES ({{}})'
    for at, one in enumerate(ids):
        row = [one, str(VECTORS[at].tolist()), f"text {at}", psycopg.types.json.Jsonb({"number": at})]
        literals = psycopg.sql.SQL(", ").join(map(psycopg.sql.Literal, row))
        connection.execute(psycopg.sql.SQL(fill).format(literals))
    return place


@contextmanager
def handle_of(kind: str) -> Iterator[Any]:
    with ExitStack() as stack:
        if kind == "connection":
            yield stack.enter_context(psycopg.connect(postgres.url(), row_factory=psycopg.rows.dict_row))
        elif kind.startswith("async "):
            yield postgres.async_engine(kind.removeprefix("async "))
        else:
            yield stack.enter_context(postgres.engine(kind))


HANDLES = ["connection", "psycopg", "psycopg2", "async psycopg", "async asyncpg"]


def asked(handle: object, place: Place) -> Engine:
    engine = engine_of(handle, place)
    assert engine is not None
    return engine


@pytest.mark.parametrize("kind", HANDLES)
def test_every_handle_gives_vectors_by_id_and_all_documents_whatever_things_are_called(
    kind: str, connection: Any
) -> None:
    place = table_of(connection)
    with handle_of(kind) as handle:
        engine = asked(handle, place)
        assert engine.metric == Metric("L2")
        found = engine.vectors([*IDS, "nowhere", IDS[0], "\x00", "\ud800", ""])
        assert set(found) == set(IDS)
        np.testing.assert_array_equal(np.float32([found[name] for name in IDS]), VECTORS)
        kept = sorted(engine.documents() or [], key=lambda one: one.text or "")
        assert kept == [Kept(name, f"text {at}", {"more": {"number": at}}) for at, name in enumerate(IDS)]
        assert engine.vectors([]) == {}
    assert connection.execute("SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in%'").fetchone() == (0,)


@pytest.mark.parametrize(
    ("kind", "ids"),
    [
        ("uuid", [uuid5(NAMESPACE_URL, str(at)) for at in range(4)]),
        ("integer", [1, -2, 30, 4]),
        ("bigint", [1, -2, 30, 10**15]),
        ("numeric", [1, -2, 30, 4]),
        ("varchar(40)", IDS),
    ],
)
def test_ids_of_any_type_are_asked_as_they_are_shown_and_others_are_not_there(
    kind: str, ids: Sequence[Any], connection: Any
) -> None:
    engine = asked(connection, table_of(connection, kind, ids))
    shown = list(map(str, ids))
    assert set(engine.vectors([*shown, "nowhere", str(UUID(int=7)), "9" * 30, "1.5", "12 "])) == set(shown)
    assert {one.id for one in engine.documents() or []} == set(shown)


@pytest.mark.parametrize("kind", HANDLES)
def test_nothing_can_be_written_by_what_is_asked(kind: str, connection: Any) -> None:
    told = table_of(connection)
    connection.execute("CREATE SEQUENCE IF NOT EXISTS counted")
    condition = ("setval('counted', %s::int) > 0", 7 if "asyncpg" in kind else "7")
    place = Place(told.collection, told.key, told.vector, condition=condition)
    with handle_of(kind) as handle, pytest.raises(Exception, match="in a read-only transaction"):
        asked(handle, place).documents()
    assert connection.execute("SELECT is_called FROM counted").fetchone() == (False,)


def test_ids_are_found_by_the_index_of_their_column(connection: Any) -> None:
    place = table_of(connection, "uuid PRIMARY KEY", [uuid5(NAMESPACE_URL, str(at)) for at in range(4)])
    with postgres.engine() as handle:
        statements = statements_of(handle)
        asked(handle, place).vectors([str(uuid5(NAMESPACE_URL, "0"))])
    sql, values = statements[-1]
    with psycopg.connect(postgres.url()) as other:
        other.execute("SET enable_seqscan = off")
        plan = "\n".join(row[0] for row in other.execute("EXPLAIN " + sql, values))
    assert "Index Scan" in plan


def statements_of(handle: Any) -> list[tuple[str, Any]]:
    """Every statement that goes through an Engine from now on, with its values."""
    from sqlalchemy import event

    seen: list[tuple[str, Any]] = []
    event.listen(handle, "before_cursor_execute", lambda c, cursor, sql, values, *_: seen.append((sql, values)))
    return seen


def test_rows_without_a_vector_are_listed_and_have_none(connection: Any) -> None:
    place = table_of(connection, ids=IDS[:2])
    column = psycopg.sql.Identifier
    table, key, text = (column(str(name)) for name in (place.collection, place.key, place.text))
    fill = psycopg.sql.SQL("INSERT INTO {} ({}, {}) VALUES ('empty', NULL), (NULL, 'no name')")
    connection.execute(fill.format(table, key, text))
    engine = asked(connection, place)
    assert set(engine.vectors([*IDS, "empty"])) == set(IDS[:2])
    assert [(one.id, one.text) for one in engine.documents() or []][2:] == [("empty", None)]


def test_an_id_that_is_there_twice_does_not_tell_its_vector(connection: Any) -> None:
    engine = asked(connection, table_of(connection, ids=["a", "b", "a"]))
    assert set(engine.vectors(["a", "b"])) == {"b"}
    assert len(list(engine.documents() or [])) == 3


def test_only_rows_that_fulfil_the_condition_of_the_place_are_its_documents(connection: Any) -> None:
    told = table_of(connection)
    condition = ("more->>'number' <> %s", "1")
    place = Place(told.collection, told.key, told.vector, told.text, schema="public", condition=condition)
    engine = asked(connection, place)
    assert set(engine.vectors(IDS)) == {IDS[0], IDS[2], IDS[3]}
    assert {one.id for one in engine.documents() or []} == {IDS[0], IDS[2], IDS[3]}
    assert engine.metric == UNKNOWN  # no table knows how it is searched


def test_a_place_that_is_made_to_do_harm_names_a_table_that_is_not_there(connection: Any) -> None:
    victim = table_of(connection)
    for harm in ('x"; DROP TABLE y; --', f'"; DROP TABLE "{victim.collection}"; --', "%s", "x' OR true --"):
        for place in (
            Place(harm, vector="v"),
            Place(victim.collection, harm, victim.vector),
            Place(victim.collection, victim.key, harm),
            Place(victim.collection, victim.key, victim.vector, victim.text, schema=harm),
        ):
            with pytest.raises((psycopg.Error, KeyError)):
                asked(connection, place).vectors(["a"])
    assert len(list(asked(connection, victim).documents() or [])) == len(IDS)


def test_a_transaction_that_the_host_is_in_is_left_as_it_was(connection: Any) -> None:
    place = table_of(connection)
    with psycopg.connect(postgres.url()) as host:
        host.execute("CREATE TABLE mine (number int)")  # not a temporary one, which may be written to when all is read
        engine = asked(host, place)
        assert len(engine.vectors(IDS)) == len(list(engine.documents() or [])) == len(IDS)
        assert host.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS
        host.execute("INSERT INTO mine VALUES (1)")
        assert host.execute("SELECT * FROM mine").fetchall() == [(1,)]
        host.commit()
        assert engine.vectors(IDS)
        assert host.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        host.execute("INSERT INTO mine VALUES (2)")
        with pytest.raises(psycopg.Error):
            host.execute("SELECT nothing")
        with pytest.raises(psycopg.Error):
            engine.vectors(IDS)
        assert host.info.transaction_status == psycopg.pq.TransactionStatus.INERROR
        host.rollback()
        host.execute("DROP TABLE mine")


@pytest.mark.parametrize("level", ["AUTOCOMMIT", "SERIALIZABLE"])
def test_an_engine_is_asked_in_transactions_that_only_read_and_is_the_same_afterwards(
    level: str, connection: Any
) -> None:
    from sqlalchemy import event, text

    place = table_of(connection)
    with postgres.engine(isolation_level=level, pool_size=1, max_overflow=0) as handle:
        is_reading: list[Any] = []

        @event.listens_for(handle, "before_cursor_execute")
        def look(one: Any, *_: Any) -> None:
            is_reading.append(one.connection.dbapi_connection.read_only)

        engine = asked(handle, place)
        assert len(engine.vectors(IDS)) == len(list(engine.documents() or [])) == len(IDS)
        assert is_reading == [True] * 3
        with handle.connect() as other:
            told = other.connection.dbapi_connection
            assert told is not None
            assert ("AUTOCOMMIT" if told.autocommit else other.get_isolation_level()) == level
            other.execute(text("CREATE TABLE mine (number int)"))
            other.execute(text("DROP TABLE mine"))
        assert handle.pool.checkedout() == 0


def test_documents_come_in_pages(connection: Any) -> None:
    from sqlalchemy import event

    place = table_of(connection, "integer", [])
    table = psycopg.sql.Identifier(str(place.collection))
    rows = "SELECT n, array_fill(n, ARRAY[8])::vector, n::text FROM generate_series(1, 1200) n"
    connection.execute(psycopg.sql.SQL("INSERT INTO {} " + rows).format(table))
    sizes: list[int] = []

    class Counting(psycopg.ServerCursor):  # type: ignore[misc, name-defined]
        def fetchmany(self, size: int = 0) -> Any:
            page = super().fetchmany(size)
            sizes.append(len(page))
            return page

        def fetchall(self) -> Any:
            raise AssertionError("all at once")

    with postgres.engine() as handle:
        event.listen(handle, "connect", lambda one, _: setattr(one, "server_cursor_factory", Counting))
        kept = list(asked(handle, place).documents() or [])
    assert sorted(int(one.id) for one in kept) == list(range(1, 1201))
    assert max(sizes) == 500


def in_a_loop(make: Callable[[], Any]) -> Any:
    async def run() -> Any:
        return make()

    return asyncio.run(run())


@pytest.mark.parametrize("kind", ["async psycopg", "async asyncpg"])
def test_an_asynchronous_engine_is_never_waited_for_in_a_loop_and_never_asked_in_its_own(
    kind: str, connection: Any
) -> None:
    from sqlalchemy import text

    place = table_of(connection)
    with handle_of(kind) as handle:
        engine = asked(handle, place)
        assert in_a_loop(lambda: engine.vectors(IDS)) == {}

        async def beside() -> Any:
            async with handle.connect() as open_beside:  # as it is while the host does something else
                await open_beside.execute(text("SELECT 1"))
                return await asyncio.to_thread(engine.vectors, IDS)

        assert set(asyncio.run(beside())) == set(IDS)
        assert len(in_a_loop(engine.documents)) == len(IDS)  # whoever lists documents waits for it


def test_a_database_that_is_gone_has_no_vectors_and_still_its_metric(connection: Any) -> None:
    place = table_of(connection)
    with psycopg.connect(postgres.url()) as host:
        engine = asked(host, place)
    assert engine.metric == Metric("L2")
    with pytest.raises(psycopg.OperationalError):
        engine.vectors(IDS)


def test_other_handles_and_places_that_do_not_tell_enough_are_no_engine(connection: Any) -> None:
    from sqlalchemy import create_engine

    place = Place(collection="documents", vector="embedding")
    lite = create_engine("sqlite://")
    assert [engine_of(one, place) for one in (lite, object(), "postgresql://", None)] == [None] * 4
    for short in (Place(), Place(collection="documents"), Place(vector="embedding")):
        assert engine_of(connection, short) is None
    known = engine_of(connection, place)
    assert engine_of(connection, place, known) is known
    assert engine_of(connection, Place(collection="others", vector="embedding"), known) is not known
