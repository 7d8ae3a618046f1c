"""LanceDB: a `lancedb.table.Table`, in a folder, an object store or LanceDB's cloud."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any, Self

from rag_explain.results.metric import UNKNOWN, Metric
from rag_explain.retrieval.engines.base import TOLERANCE, Engine, Kept, Place

_METRICS = {"l2": Metric("squared L2"), "cosine": Metric("cosine distance"), "dot": Metric("1 - inner product")}
_WITHOUT_INDEX = ("flat", "l2")  # how a table compares that has no index
_ESTIMATES = ("PQ", "SQ", "RQ")  # indexes that code vectors: their scores are estimates, unless they are refined
_ESTIMATE_TOLERANCE = 0.25
_PAGE = 500


class LanceDBEngine(Engine):
    """The vectors of one column."""

    gives_originals = True

    def __init__(self, handle: Any, place: Place | None = None) -> None:
        super().__init__(handle, place)
        self._known: tuple[Any, tuple[str, str]] | None = None

    @classmethod
    def of(cls, handle: object, place: Place) -> Self | None:
        module = sys.modules.get("lancedb.table")  # a table cannot be there before its library is loaded
        return cls(handle, place) if module is not None and isinstance(handle, module.Table) else None

    @property
    def _index(self) -> tuple[str, str]:
        """The kind of index and its distance: looked up again in a new version of the table, which an index makes."""
        is_local = isinstance(self.handle, sys.modules["lancedb.table"].LanceTable)
        version = self.handle.version if is_local else None  # a cloud would be asked for it each time
        if self._known is None or self._known[0] != version:
            self._known = version, self._looked_up()
        return self._known[1]

    def _looked_up(self) -> tuple[str, str]:
        found = [one.name for one in self.handle.list_indices() if one.columns == [self._vector]]
        told = self.handle.index_stats(found[0]) if found else None
        return _WITHOUT_INDEX if told is None else (told.index_type, told.distance_type or "")

    @property
    def _vector(self) -> str:
        if self.place.vector is not None:
            return self.place.vector
        (name,) = (one.name for one in self.handle.schema if str(one.type).startswith("fixed_size_list"))
        return str(name)

    def told_metric(self) -> Metric:
        return _METRICS.get(self._index[1].lower(), UNKNOWN)

    @property
    def tolerance(self) -> float:
        return _ESTIMATE_TOLERANCE if self._index[0].endswith(_ESTIMATES) else TOLERANCE

    def vectors(self, ids: Sequence[str]) -> dict[str, Any]:
        key, vector = self.place.key, self._vector
        wanted = ", ".join("'" + name.replace("'", "''") + "'" for name in dict.fromkeys(ids))
        is_text = "string" in str(self.handle.schema.field(key).type)
        condition = f"{key if is_text else f'cast({key} as string)'} in ({wanted})"
        rows = self.handle.search().where(condition).select([key, vector]).limit(None).to_list()
        names = [str(row[key]) for row in rows]
        # Nothing keeps a table from having rows of the same id: which one was found is not known.
        return {name: row[vector] for name, row in zip(names, rows, strict=True) if names.count(name) == 1}

    def documents(self) -> Iterator[Kept]:
        text = self.place.text or "text"
        names = [name for name in self.handle.schema.names if name != self._vector]
        for page in self.handle.search().select(names).limit(None).to_batches(_PAGE):
            yield from (Kept(str(row[self.place.key]), row.get(text), row) for row in page.to_pylist())
