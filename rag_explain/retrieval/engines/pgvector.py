"""Postgres with pgvector: a SQLAlchemy `Engine` or `AsyncEngine` or a `psycopg.Connection`, and the name of a table."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Self

from rag_explain.results.metric import UNKNOWN, Metric
from rag_explain.retrieval.engines.base import Engine, Kept, Place
from rag_explain.retrieval.engines.postgres import Row, quoted, reading, would_block_loop

# What an id looks like in a column of this type, where asking for anything else is an error; others are asked as text.
_IDS = {
    "uuid": re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"),
    "integer": re.compile("-?[0-9]{1,9}"),
    "bigint": re.compile("-?[0-9]{1,18}"),
    "text": re.compile("[^\x00\ud800-\udfff]*"),
}


class PgvectorEngine(Engine):
    """The vectors in one column of a table, which does not know by which operator it is searched: the place tells."""

    @classmethod
    def of(cls, handle: object, place: Place) -> Self | None:
        is_told = place.collection is not None and place.vector is not None
        return cls(handle, place) if is_told and reading(handle) is not None else None

    def told_metric(self) -> Metric:
        return self.place.metric or UNKNOWN

    def vectors(self, ids: Sequence[str]) -> dict[str, Any]:
        if would_block_loop(self.handle):
            return {}
        known = self._columns[self.place.key]
        kind = known if known in _IDS else "text"
        wanted = [name for name in dict.fromkeys(ids) if _IDS[kind].fullmatch(name)]
        key, vector = quoted(self.place.key), quoted(self.place.vector)
        condition = f"{key}::{kind} = ANY(%s::text[]::{kind}[]) AND {vector} IS NOT NULL"
        rows = self._rows(f"{key}::text, {vector}::real[]", condition, wanted)
        times = Counter(name for name, _ in rows)  # an id that is there twice does not tell which of them was found
        return {name: kept for name, kept in rows if times[name] == 1}

    def documents(self) -> list[Kept]:
        place = self.place
        others = [name for name in self._columns if name not in (place.key, place.vector, place.text)]
        row = f'(SELECT "rag_explain" FROM (SELECT {", ".join(map(quoted, others))}) AS "rag_explain")'
        text = "NULL" if place.text is None else f"{quoted(place.text)}::text"
        rows = self._rows(f"{quoted(place.key)}::text, {text}, to_jsonb({row})::text")
        return [Kept(name, text, json.loads(fields)) for name, text, fields in rows if name is not None]

    @property
    def _table(self) -> str:
        return ".".join(quoted(name) for name in (self.place.schema, self.place.collection) if name is not None)

    @cached_property
    def _columns(self) -> dict[str, str]:
        """The type of each."""
        sql = "SELECT attname::text, format_type(atttypid, NULL) FROM pg_catalog.pg_attribute "
        sql += "WHERE attrelid = %s::text::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum"
        return dict(self._read(sql, self._table % ()))

    def _rows(self, columns: str, condition: str = "true", *values: Any) -> list[Row]:
        """These columns of every row that is a document of the place."""
        own, value = self.place.condition or ("%s", True)
        return self._read(f"SELECT {columns} FROM {self._table} WHERE {condition} AND {own}", *values, value)

    def _read(self, sql: str, *values: Any) -> list[Row]:
        read = reading(self.handle)
        assert read is not None
        return read(self.handle, sql, values)
