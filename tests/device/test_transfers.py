"""What crosses to the device and back, counted; a wait inside push, pull or product names the line that makes it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from rag_explain import Explainer
from rag_explain.devices import BatchSize, Device
from tests.support import device
from tests.support.device.__main__ import DOCUMENTS, QUERIES, counted
from tests.support.models import tiny

QUERY = "Where did the cat look?"
WAITS = ("out", "scalar", "size")
FEATURES = 2  # the tokens and the mask


def own(seen: device.Seen) -> dict[str, int]:
    """The waits and moves that are not the model's own."""
    return {line: count for line, count in seen.at("in", *WAITS).items() if "the model's own" not in line}


def blocks(explainer: Explainer) -> list[torch.Tensor]:
    """What memory holds on the device."""
    memory = explainer.store._memory
    return [one.block for _, one in sorted(memory.get(list(memory._slots), "toy:0").items())]


@pytest.fixture(scope="module")
def explainer(toy: str) -> Iterator[Explainer]:
    with Explainer(tiny("bert", dtype=torch.float32).to(toy)) as one:
        yield one


@pytest.fixture(scope="module")
def seen(toy: str) -> dict[str, device.Seen]:
    return counted(Explainer(tiny("bert", dtype=torch.float32).to(toy)))


def test_a_warm_top_ten_moves_one_block_there_and_one_product_back(seen: dict[str, device.Seen]) -> None:
    warm = seen["warm top ten"]
    assert [(kind, line.partition(":")[0]) for kind, line, _ in warm.lines] == [
        ("in", "pairing.py"),
        ("out", "pairing.py"),
    ]
    assert warm["operation"] == 2  # the blocks side by side, and their product


def test_a_new_querys_warm_top_ten_adds_the_query_in_once_and_its_rows_out_once(seen: dict[str, device.Seen]) -> None:
    warm = seen["warm top ten, new query"]
    assert (warm["in"], warm["out"]) == (FEATURES + 2 + 1, 1 + 1)  # its groups and their index; then as above
    assert (warm["scalar"], warm["size"], warm["across"]) == (0, 0, 0)


def test_a_cold_top_ten_moves_each_feature_in_once_and_the_matrices_out_once(seen: dict[str, device.Seen]) -> None:
    cold, query = seen["cold top ten"], FEATURES + 2
    batches = 1
    assert cold["in"] == query + batches * (FEATURES + 1)  # and the query's block for each batch
    assert cold["out"] == 1 + batches
    assert cold["size"] == 0
    assert not any("scalar" in line for line in own(cold))
    assert cold["scalar"] == batches  # transformers asks whether a mask masks anything


def test_precompute_moves_each_batch_in_once_and_its_factors_out_once(seen: dict[str, device.Seen]) -> None:
    built = seen["precompute ten"]
    assert built["in"] == FEATURES + 2 + 1  # groups and index; the blocks that are kept on the device, all together
    assert (built["out"], built["size"]) == (1, 0)
    assert not any("scalar" in line for line in own(built))


@pytest.mark.parametrize("what", ["push", "pull"])
def test_nothing_waits_inside_push_and_pull(seen: dict[str, device.Seen], what: str) -> None:
    assert dict(seen[what].at(*WAITS)) == {}
    assert seen[what]["operation"] < 2 * 53  # operations of the map: two launches each, and not one more


def test_a_hidden_wait_is_named_by_its_line(explainer: Explainer, monkeypatch: pytest.MonkeyPatch) -> None:
    from rag_explain.linear.operations import Linear

    original = Linear.run

    def run(self: Linear, *arguments: object) -> torch.Tensor:
        found = original(self, *arguments)
        assert bool(found.isfinite().all())  # a forgotten look
        return found

    monkeypatch.setattr(Linear, "run", run)
    with device.watched() as seen:
        explainer.factor(DOCUMENTS[:1], unit="sentence")
    lines = seen.at("scalar")
    assert any("affine_map.py" in line and "in _run" in line for line in lines), lines


def test_document_blocks_stay_where_they_are(explainer: Explainer) -> None:
    explainer.precompute(DOCUMENTS, progress=False)
    held = blocks(explainer)
    for query in QUERIES:
        with device.watched() as seen:
            explainer.explain_many(query, DOCUMENTS, unit="sentence")
        assert max(size for kind, _, size in seen.lines if kind == "in") < 4096  # a query, never a document
    assert all(one is other for one, other in zip(held, blocks(explainer), strict=True))


def test_a_store_on_disk_is_moved_to_the_device_in_one_go(toy: str, tmp_path: object) -> None:
    model = tiny("bert", dtype=torch.float32).to(toy)
    with Explainer(model, store=str(tmp_path)) as first:
        first.precompute(DOCUMENTS, progress=False)
    with Explainer(model, store=str(tmp_path)) as second:
        second.explain("the query", "itself", unit="sentence")
        with device.watched() as seen:
            found = second.explain_many("the query", DOCUMENTS, unit="sentence")
    assert {one.provenance["path"] for one in found} == {"disk"}
    assert (seen["in"], seen["out"]) == (2, 1)


def test_half_precision_storage_halves_the_room_and_is_multiplied_in_float32(toy: str) -> None:
    from rag_explain.store import Store

    model = tiny("bert", dtype=torch.float32).to(toy)
    stores = [Store(), Store(device_precision="fp16")]
    explainers = [Explainer(model, store=store) for store in stores]
    for explainer in explainers:
        explainer.precompute(DOCUMENTS, progress=False)
    plain, half = ({block.dtype for block in blocks(explainer)} for explainer in explainers)
    assert (plain, half) == ({torch.float32}, {torch.float16})
    one, other = (explainer.explain_many(QUERY, DOCUMENTS, unit="sentence") for explainer in explainers)
    off = max(float(np.abs(a.matrix - b.matrix).max()) for a, b in zip(one, other, strict=True))
    assert 0 < off < 2e-3
    assert other[0].matrix.dtype == np.float32


def test_batches_made_for_a_device_need_fewer_launches(explainer: Explainer, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"{text} {number}" for number, text in enumerate(DOCUMENTS * 3)]
    with device.watched(lines=False) as large:
        explainer.precompute(texts, progress=False)
    monkeypatch.setattr(Device, "size", lambda self, positions=2048: BatchSize(positions))
    with device.watched(lines=False) as small:
        explainer.precompute([f"{text} again" for text in texts], progress=False)
    assert 2 * large["operation"] < small["operation"]


def test_a_batch_is_as_large_as_the_room(toy: str) -> None:
    assert Device(lambda: "cpu").size() == BatchSize(2048)
    assert Device(lambda: toy).size().positions == 2**16
    with device.limited(2**32):
        assert 2048 < Device(lambda: toy).size().positions < 2**16
    with device.limited(2**20):
        assert Device(lambda: toy).size().positions == 2048
