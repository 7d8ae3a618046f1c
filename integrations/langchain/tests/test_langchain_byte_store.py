"""A LangChain byte store as the remote tier of a factor store."""

from __future__ import annotations

import torch
from langchain_core.stores import InMemoryByteStore
from langchain_rag_explain import ByteStoreObjects

from rag_explain import Explainer
from rag_explain.store import Store
from tests.support.models import CORPUS, tiny


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


def test_machines_share_factors_through_a_byte_store_and_can_forget_them() -> None:
    shared, model = InMemoryByteStore(), tiny(dtype=torch.float32)
    with Store(remote=ByteStoreObjects(shared)) as store, Explainer(model, store=store) as first:
        assert first.precompute(
            CORPUS, unit="token", progress=False, ids=[f"d{n}" for n in range(len(CORPUS))]
        ).built == len(CORPUS)
    with Store(remote=ByteStoreObjects(shared)) as store, Explainer(model, store=store) as second:
        found = second.explain_many("where is the cat?", CORPUS)
        assert [one.provenance["path"] for one in found] == ["remote"] * len(CORPUS)
        store.forget(["d0"])
    assert len(list(ByteStoreObjects(shared).names("factors/"))) == len(CORPUS) - 1
