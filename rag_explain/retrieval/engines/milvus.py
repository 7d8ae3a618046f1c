"""Milvus: a `pymilvus.MilvusClient` and the name of a collection, in a file (Milvus Lite) or on a server."""

import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from rag_explain.results.metric import UNKNOWN, Metric
from rag_explain.retrieval.engines.base import TOLERANCE, Engine, Kept

_METRICS = {"COSINE": Metric("cosine"), "IP": Metric("inner product"), "L2": Metric("squared L2")}
_DENSE = ("FLOAT_VECTOR", "FLOAT16_VECTOR", "BFLOAT16_VECTOR")
# Indexes that compare the vectors that they were given; the scores of all others are taken for estimates.
_EXACT = frozenset(("FLAT", "AUTOINDEX", "IVF_FLAT", "HNSW", "DISKANN", "GPU_BRUTE_FORCE", "GPU_IVF_FLAT", "GPU_CAGRA"))
_LIMIT = {"timeout": 10}  # seconds: pymilvus asks a server that is gone for minutes otherwise
# As pymilvus's own iterator asks, which writes ids into conditions as they are: quotes in them would end the listing.
_IN_ORDER = {"iterator": "True", "reduce_stop_for_best": "True"}
_PAGE = 500


class MilvusEngine(Engine):
    """The vectors of one field of a collection."""

    handles = ("pymilvus", "MilvusClient")
    is_client = True
    gives_originals = True

    @cached_property
    def _types(self) -> dict[str, str]:
        if not self.handle.has_collection(self.place.collection, **_LIMIT):  # asked for more, pymilvus logs an error
            raise LookupError(f"there is no collection {self.place.collection!r} yet")
        fields = self.handle.describe_collection(self.place.collection, **_LIMIT)["fields"]
        return {field["name"]: field["type"].name for field in fields}

    @property
    def _vector(self) -> str:
        dense = [name for name, kind in self._types.items() if kind in _DENSE]
        (name,) = (name for name in dense if self.place.vector in (None, name))
        return name

    @cached_property
    def _index(self) -> Any:
        (name,) = self.handle.list_indexes(self.place.collection, field_name=self._vector, **_LIMIT)
        return self.handle.describe_index(self.place.collection, name, **_LIMIT)

    def told_metric(self) -> Metric:
        return _METRICS.get(self._index["metric_type"].upper(), UNKNOWN)

    @property
    def tolerance(self) -> float:
        return TOLERANCE if self._index["index_type"] in _EXACT else 0.25

    def vectors(self, ids: Sequence[str]) -> dict[str, Any]:
        key, vector = self.place.key, self._vector
        wanted = [one for name in dict.fromkeys(ids) if (one := self._literal(name)) is not None]
        if not wanted or self._types[vector] != "FLOAT_VECTOR":
            return {}
        found = self.handle.query(self.place.collection, f"{key} in [{', '.join(wanted)}]", [key, vector], **_LIMIT)
        return {str(row[key]): row[vector] for row in found}

    def _literal(self, name: object) -> str | None:
        """An id as it is written in a condition; None for one that cannot be in this field."""
        if self._types[self.place.key] == "VARCHAR":
            return json.dumps(name, ensure_ascii=False)
        return str(name) if str(name).removeprefix("-").isdecimal() else None

    def documents(self) -> Iterator[Kept]:
        key, condition, page = self.place.key, "", None
        while page is None or len(page) == _PAGE:
            page = self.handle.query(self.place.collection, condition, ["*"], limit=_PAGE, **_IN_ORDER)
            for row in page:
                fields = {name: row[name] for name in row if not self._types.get(name, "").endswith("VECTOR")}
                yield Kept(str(row[key]), fields.get(self.place.text or "text"), fields)
                condition = f"{key} > {self._literal(row[key])}"
