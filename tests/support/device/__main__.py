"""python -m tests.support.device: what crosses to the test device and back, as a table."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rag_explain import Explainer
from rag_explain.linear import LRP
from rag_explain.methods.frozen import freeze
from rag_explain.ski_rental import SkiRental
from tests.support import device
from tests.support.models import CORPUS, tiny

DOCUMENTS = [" ".join(CORPUS[number % 5 :])[: 60 + 17 * number] for number in range(10)]
QUERIES = [f"{word} did the cat look?" for word in ("where", "why", "what", "paris", "old")]


class AlwaysCold(SkiRental):
    """Builds nothing by itself: what has paid for itself is measured by the clock, and counts must not be."""

    def should_build(self, key: bytes, query_tokens: int, document_tokens: int, rows: int | None = None) -> bool:
        return False


def work(explainer: Explainer) -> dict[str, Callable[[], object]]:
    """What is counted, in an order in which each leaves what the next one needs."""
    explainer._planner._policy = AlwaysCold()
    encoder = explainer.scorer.encoder
    batch = encoder.read(DOCUMENTS, "document").to(encoder.device)
    groups = torch.arange(batch.features["input_ids"].shape[1]).expand(len(batch), -1) // 8
    with encoder.computing():
        frozen, embeddings = freeze(encoder, batch, 0, LRP, biases_by_position=True)
        for query in QUERIES[:3]:  # a structure is recorded twice
            explainer.explain_many(query, DOCUMENTS[:1], unit="sentence")
    explainer.store.forget([])
    return {
        "push": lambda: frozen.push_rows(groups=groups),
        "pull": lambda: frozen.relevance(embeddings[:1].expand(3, len(batch), -1)),
        "highlights of ten": lambda: explainer.highlight_many(QUERIES[0], DOCUMENTS),
        "cold top ten": lambda: explainer.explain_many(QUERIES[3], DOCUMENTS, unit="word"),
        "precompute ten": lambda: explainer.precompute(DOCUMENTS, progress=False),
        "warm top ten, new query": lambda: explainer.explain_many(QUERIES[4], DOCUMENTS, unit="sentence"),
        "warm top ten": lambda: explainer.explain_many(QUERIES[4], DOCUMENTS, unit="sentence"),
    }


def counted(explainer: Explainer) -> dict[str, device.Seen]:
    """What happens on the device in each piece of work."""
    found = {}
    for name, run in work(explainer).items():
        with explainer.scorer.computing(), device.watched() as found[name]:
            run()
    return found


def main() -> None:
    try:
        device.build()
    except device.NoDevice as reason:
        print(f"SKIPPED: the transfers of the test device: {reason}")
        return
    explainer = Explainer(tiny("bert", dtype=torch.float32).to(device.install()))
    rows = {name: seen.counts for name, seen in counted(explainer).items()}
    print(f"{'':26}" + "".join(f"{kind:>11}" for kind in device.COUNTS))
    for name, counts in rows.items():
        print(f"{name:26}" + "".join(f"{counts[kind]:>11}" for kind in device.COUNTS))
    print("in, out, across: tensors moved; scalar, size: waits for a number; operation: what a device launches")


if __name__ == "__main__":
    main()
