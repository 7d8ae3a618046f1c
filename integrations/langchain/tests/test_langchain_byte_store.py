"""A LangChain byte store as the remote tier of a factor store."""

from __future__ import annotations

from langchain_core.stores import InMemoryByteStore
from langchain_rag_explain import ByteStoreObjects


def test_objects_are_named_bytes_under_a_prefix() -> None:
    store = InMemoryByteStore()
    store.mset([("other", b"x")])
    objects = ByteStoreObjects(store)
    objects.put({"factors/a": b"1", "factors/b": b"2", "documents/c/a": b""})
    objects.put({"factors/a": b"3"})
    assert objects.get(["factors/a", "factors/none", "documents/c/a"]) == {"factors/a": b"3", "documents/c/a": b""}
    assert sorted(objects.names("factors/")) == ["factors/a", "factors/b"]
    objects.delete(["factors/a", "factors/none"])
    assert list(objects.names("factors/")) == ["factors/b"]
    assert store.mget(["other"]) == [b"x"]
