from __future__ import annotations

import threading
import weakref

import numpy as np
import pytest
import torch

from rag_explain.store.memory import Memory
from tests.support.samples import truncation
from tests.support.synthetic import make_factors, make_key

SIZE = Memory().put(b"k", make_factors()).nbytes


def fill(memory: Memory, seeds: range, device: str = "cpu") -> None:
    for seed in seeds:
        memory.put(make_key(seed), make_factors(seed), device=device)


def test_placed_factors_share_their_block_with_the_tensor() -> None:
    factors = make_factors(notices=(truncation("document"),), error=1e-5, references={"a": 1})
    placed = Memory().put(b"k", factors)
    np.testing.assert_array_equal(placed.block.numpy(), np.vstack([factors.rows, factors.rest]))
    assert placed.factors is factors
    assert placed.block.data_ptr() == factors.rows.ctypes.data  # kept once, not twice
    assert not factors.block.flags.writeable


def test_the_least_recently_used_goes_first() -> None:
    memory = Memory(3 * SIZE)
    fill(memory, range(3))
    memory.get([make_key(0)])
    fill(memory, range(3, 4))
    assert memory.has(map(make_key, range(4))) == {make_key(0), make_key(2), make_key(3)}
    assert memory.info()["cpu"] == {"documents": 3, "bytes": 3 * SIZE, "max_bytes": 3 * SIZE}


def test_what_is_larger_than_the_limit_is_served_but_not_kept() -> None:
    memory = Memory(SIZE - 1)
    assert memory.put(b"k", make_factors()).nbytes == SIZE
    assert memory.get([b"k"]) == {}


def test_putting_a_key_again_does_not_count_it_twice() -> None:
    memory = Memory()
    for _ in range(5):
        memory.put(b"k", make_factors())
    assert memory.info()["cpu"]["bytes"] == SIZE


def test_each_device_has_its_own_limit() -> None:
    memory = Memory({"cpu": 2 * SIZE, "meta": SIZE, "cuda": 7})
    fill(memory, range(5), "meta")
    fill(memory, range(5, 10), "cpu")
    info = memory.info()
    assert (info["meta"]["documents"], info["cpu"]["documents"]) == (1, 2)
    assert memory.max_bytes("cuda:1") == 7
    assert memory.get([make_key(4)], "meta")[make_key(4)].block.device.type == "meta"


class SmallDevice:
    """Stands for a device with room for `room` blocks, wherever they really are."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.held: list[weakref.ref[torch.Tensor]] = []

    def place(self, block: torch.Tensor) -> torch.Tensor:
        self.held = [ref for ref in self.held if ref() is not None]
        if len(self.held) >= self.room:
            raise torch.OutOfMemoryError("no room")
        moved = block.clone()
        self.held.append(weakref.ref(moved))
        return moved


def test_a_device_without_memory_evicts_and_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SmallDevice(4)
    monkeypatch.setattr(torch.Tensor, "to", lambda block, name: device.place(block))
    memory = Memory(100 * SIZE)
    fill(memory, range(10), "cuda")
    info = memory.info()
    assert info["cuda"]["documents"] >= 2
    assert info["cuda"]["documents"] + info["cpu"]["documents"] == 10  # what had to leave is in main memory
    assert make_key(9) in memory.get([make_key(9)], "cuda")


def test_a_device_that_stays_without_memory_leaves_it_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SmallDevice(0)
    monkeypatch.setattr(torch.Tensor, "to", lambda block, name: device.place(block))
    memory = Memory(100 * SIZE)
    fill(memory, range(3), "cuda")
    assert memory.info()["cpu"]["documents"] == 3
    assert memory.get([make_key(1)], "cuda")[make_key(1)].block.device.type == "cpu"


def test_forgetting_a_document_drops_all_it_owns() -> None:
    memory = Memory()
    memory.put(b"1", make_factors(1), owners=[b"a"])
    memory.put(b"2", make_factors(2), owners=[b"a", b"b"])
    memory.put(b"3", make_factors(3))
    assert memory.link(b"3", [b"c"])
    assert not memory.link(b"3", [b"c"])
    assert memory.link(b"absent", [b"c"])
    assert memory.forget([b"b"]) == {b"2"}
    assert memory.forget([b"a", b"c", b"unknown"]) == {b"1", b"3"}
    assert memory.info()["cpu"] == {"documents": 0, "bytes": 0, "max_bytes": 2**29}


def test_what_was_evicted_leaves_no_owner_behind() -> None:
    memory = Memory(SIZE)
    for seed in range(4):
        memory.put(make_key(seed), make_factors(seed), owners=[bytes([seed])])
    assert memory.forget([b"\0", b"\1", b"\2"]) == set()
    assert memory.forget([b"\3"]) == {make_key(3)}


def test_many_threads_keep_the_books() -> None:
    memory = Memory(5 * SIZE)

    def work(base: int) -> None:
        for step in range(200):
            seed = (base + step) % 17
            memory.put(make_key(seed), make_factors(seed), owners=[bytes([seed])])
            memory.get([make_key(seed)])
            memory.forget([bytes([(seed + 3) % 17])])

    threads = [threading.Thread(target=work, args=(base,)) for base in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    info = memory.info()["cpu"]
    assert info["bytes"] == info["documents"] * SIZE <= 5 * SIZE
