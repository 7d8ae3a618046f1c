"""Any LangChain byte store (Redis, files, memory) as the remote tier of a factor store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from langchain_core.stores import BaseStore


class ByteStoreObjects:
    """`rag_explain.store.Store(remote=ByteStoreObjects(byte_store))`"""

    def __init__(self, store: BaseStore[str, bytes], prefix: str = "rag_explain/") -> None:
        self._store = store
        self._prefix = prefix

    def get(self, names: Sequence[str]) -> dict[str, bytes]:
        """Those that exist."""
        found = self._store.mget([self._prefix + name for name in names])
        return {name: data for name, data in zip(names, found, strict=True) if data is not None}

    def put(self, items: Mapping[str, bytes]) -> None:
        """Write all, replacing what is there."""
        self._store.mset([(self._prefix + name, data) for name, data in items.items()])

    def delete(self, names: Sequence[str]) -> None:
        """Remove those that exist."""
        self._store.mdelete([self._prefix + name for name in names])

    def names(self, prefix: str) -> Iterable[str]:
        """The names that begin with `prefix`."""
        return [key[len(self._prefix) :] for key in self._store.yield_keys(prefix=self._prefix + prefix)]
