"""LanceDB: a `lancedb.table.LanceTable`, in a folder or an object store. Not a table in LanceDB's cloud."""

from collections.abc import Iterator, Sequence
from typing import Any

from rag_explain.results.metric import UNKNOWN, Metric
from rag_explain.retrieval.engines.base import TOLERANCE, Engine, Kept, Place

_METRICS = {"l2": Metric("squared L2"), "cosine": Metric("cosine distance"), "dot": Metric("1 - inner product")}
_CODED_COSINE = Metric("twice the cosine distance")
# How far a similarity may be off that is estimated from coded vectors, by the end of the index's kind.
_LOSSES = {"SQ": 0.05, "PQ": 0.5, "RQ": 0.5}
_PAGE = 500


class LanceDBEngine(Engine):
    """The vectors of one column."""

    handles = ("lancedb.table", "LanceTable")
    gives_originals = True

    def __init__(self, handle: Any, place: Place | None = None) -> None:
        super().__init__(handle, place)
        self._known: tuple[Any, Any] | None = None

    @property
    def _index(self) -> Any:
        """What the index of the vectors tells; None without one. Looked up again in a new version of the table."""
        version = self.handle.version
        if self._known is None or self._known[0] != version:
            names = [one.name for one in self.handle.list_indices() if one.columns == [self._vector]]
            self._known = version, self.handle.index_stats(names[0]) if names else None
        return self._known[1]

    @property
    def _vector(self) -> str:
        if self.place.vector is not None:
            return self.place.vector
        (name,) = (one.name for one in self.handle.schema if str(one.type).startswith("fixed_size_list"))
        return str(name)

    def told_metric(self) -> Metric:
        index = self._index
        if index is None:
            return _METRICS["l2"]
        metric = _METRICS.get(str(index.distance_type).lower(), UNKNOWN)
        # Distances are computed again from the vectors themselves where some rows are not in the index yet.
        is_coded = self.tolerance > TOLERANCE and not self.place.is_refined and not index.num_unindexed_rows
        return _CODED_COSINE if is_coded and metric == _METRICS["cosine"] else metric

    @property
    def tolerance(self) -> float:
        index = self._index
        return TOLERANCE if index is None else _LOSSES.get(index.index_type[-2:].upper(), TOLERANCE)

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
