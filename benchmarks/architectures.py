"""Writes docs/architectures.md: every architecture that the tests build, measured against its oracle.

python benchmarks/architectures.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[1]))
from rag_explain.encoder.model import Encoder
from rag_explain.linear import LRP
from rag_explain.methods.frozen import freeze
from tests.support.models import ARCHITECTURES, TEXTS, tiny
from tests.support.references import lrp_rows

TARGET = Path(__file__).parents[1] / "docs" / "architectures.md"
HEAD = """# Architectures

Made by `python benchmarks/architectures.py`, on small random weights in float64. "Push against the oracle" compares
with one backward pass per embedding dimension through a copy of the model in which every module follows the rules;
"conservation" is |sum of rows + rest - embedding| / |embedding|. Where a model itself computes a part in float32,
agreement ends at about 1e-7.

Any model that transformers can run is tried in the same way, by what its tensor operations are; an operation without a
rule is refused by name. `rag-explain doctor MODEL` says what is true of yours.

| architecture | class | gated MLP | tokenizer | poolings | push against the oracle | conservation | transformers |
|---|---|---|---|---|---|---|---|
"""
POOLINGS = ("mean", "cls", "lasttoken", "weightedmean", "mean_sqrt_len_tokens", "max")


@torch.no_grad()
def measure(name: str) -> str:
    architecture = ARCHITECTURES[name]
    worst, lost = 0.0, 0.0
    for pooling in POOLINGS:
        model = tiny(name, pooling)
        encoder = Encoder(model)
        for text in TEXTS:
            batch = encoder.read([text], "document")
            frozen = freeze(encoder, batch, 0, LRP)[0]
            rows, rest = frozen.push_rows()
            with torch.enable_grad():
                oracle = lrp_rows(model, batch.features, 0, gated=architecture.gated)
            worst = max(worst, float((rows - oracle).norm() / oracle.norm()))
            miss = rows.sum(dim=1) + rest - frozen.embedding
            lost = max(lost, float(miss.norm() / frozen.embedding.norm()))
    gated, version = "yes" if architecture.gated else "no", transformers.__version__
    return (
        f"| {name} | {architecture.model} | {gated} | {architecture.tokenizer} | {', '.join(POOLINGS)} "
        f"| {worst:.0e} | {lost:.0e} | {version} |"
    )


def main() -> None:
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    rows = []
    for name in ARCHITECTURES:
        rows.append(measure(name))
        print(rows[-1])
    TARGET.write_text(HEAD + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
