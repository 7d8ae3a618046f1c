"""Milvus: a `pymilvus.MilvusClient` and the name of a collection, in a file (Milvus Lite) or on a server."""

import json
import sys
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Self

from rag_explain.results.metric import UNKNOWN, Metric
from rag_explain.retrieval.engines.base import TOLERANCE, Engine, Kept, Place

_METRICS = {"COSINE": Metric("cosine"), "IP": Metric("inner product"), "L2": Metric("squared L2")}
_DENSE = ("FLOAT_VECTOR", "FLOAT16_VECTOR", "BFLOAT16_VECTOR")
# Indexes whose scores are those of the vectors that they were given. All others are taken to estimate.
_EXACT = frozenset(("FLAT", "AUTOINDEX", "IVF_FLAT", "HNSW", "DISKANN", "GPU_BRUTE_FORCE", "GPU_IVF_FLAT", "GPU_CAGRA"))
_ESTIMATE_TOLERANCE = 0.25
_PAGE = 500
_SECONDS = 10  # a server that is gone is asked again and again for minutes otherwise
# What pymilvus's own iterator asks for pages with. That one writes ids into its conditions as they are: quotes and
# backslashes in them end, or change, what is listed.
_IN_ORDER = {"iterator": "True", "reduce_stop_for_best": "True"}


class MilvusEngine(Engine):
    """The vectors of one field of a collection."""

    gives_originals = True

    @classmethod
    def of(cls, handle: object, place: Place) -> Self | None:
        module = sys.modules.get("pymilvus")  # a client cannot be there before its library is loaded
        is_client = module is not None and isinstance(handle, module.MilvusClient)
        return cls(handle, place) if is_client and place.collection is not None else None

    @cached_property
    def _fields(self) -> list[dict[str, Any]]:
        name = self.place.collection
        if not self.handle.has_collection(name, timeout=_SECONDS):  # pymilvus logs an error where it is asked for more
            raise LookupError(f"there is no collection {name!r} yet")
        fields: list[dict[str, Any]] = self.handle.describe_collection(name, timeout=_SECONDS)["fields"]
        return fields

    @cached_property
    def _key(self) -> tuple[str, bool]:
        """The field of the ids, and whether they are texts: else they are numbers."""
        field = next(field for field in self._fields if field.get("is_primary"))
        return field["name"], field["type"].name == "VARCHAR"

    @cached_property
    def _vector(self) -> tuple[str, str]:
        """The field of the vectors, and its type."""
        dense = {field["name"]: field["type"].name for field in self._fields if field["type"].name in _DENSE}
        (name,) = (self.place.vector,) if self.place.vector is not None else dense
        return name, dense[name]

    @cached_property
    def _index(self) -> dict[str, Any]:
        collection, field = self.place.collection, self._vector[0]
        (name,) = self.handle.list_indexes(collection, field_name=field, timeout=_SECONDS)
        index: dict[str, Any] = self.handle.describe_index(collection, name, timeout=_SECONDS)
        return index

    def told_metric(self) -> Metric:
        return _METRICS.get(self._index["metric_type"].upper(), UNKNOWN)

    @property
    def tolerance(self) -> float:
        return TOLERANCE if self._index["index_type"] in _EXACT else _ESTIMATE_TOLERANCE

    def vectors(self, ids: Sequence[str]) -> dict[str, Any]:
        (key, _), (field, kind) = self._key, self._vector
        wanted = ", ".join(literal for name in dict.fromkeys(ids) if (literal := self._literal(name)) is not None)
        if not wanted or kind != "FLOAT_VECTOR":
            return {}
        condition, fields = f"{key} in [{wanted}]", [key, field]
        found = self.handle.query(self.place.collection, filter=condition, output_fields=fields, timeout=_SECONDS)
        return {str(row[key]): row[field] for row in found}

    def _literal(self, name: object) -> str | None:
        """An id as it is written in a condition; None for one that can be in no such field."""
        if self._key[1]:
            return json.dumps(name, ensure_ascii=False)
        return str(name) if str(name).removeprefix("-").isdecimal() else None

    def documents(self) -> Iterator[Kept]:
        key, text = self._key[0], self.place.text or "text"
        vectors = {field["name"] for field in self._fields if field["type"].name.endswith("VECTOR")}
        condition = ""
        while True:
            page = self.handle.query(
                self.place.collection, filter=condition, output_fields=["*"], limit=_PAGE, **_IN_ORDER
            )
            for row in page:
                fields = {name: value for name, value in row.items() if name not in vectors}
                yield Kept(str(row[key]), fields.get(text), fields)
            if len(page) < _PAGE:
                return
            condition = f"{key} > {self._literal(page[-1][key])}"
