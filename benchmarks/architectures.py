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
from rag_explain import Explainer
from rag_explain.encoder.model import Encoder
from rag_explain.linear import LRP
from rag_explain.methods.frozen import freeze
from rag_explain.texts.passage import Passage
from tests.support import references_cross
from tests.support.cross_encoders import HEADS, cross
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
CROSS = """
## Cross-encoders

The same for heads that read both texts at once, with `lrp`: "against the oracle" compares all that an explanation is
made of, the relevance of every token and what tokens of one text read of the other at the cut, with backward passes
through a copy in which every module follows the rules; "conservation" is |matrix.sum() - logit| / sum of |relevance|.
The last one is read through a chat template and scores by its logits of "yes" and "no" (`LogitScore`). Explanations
hold float32, which ends the comparison at about 1e-8.

| architecture | class | tokenizer | against the oracle | conservation | transformers |
|---|---|---|---|---|---|
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


def measure_cross(name: str) -> str:
    model = cross(name)
    explainer = Explainer(model)
    head, architecture = model[0].auto_model, ARCHITECTURES.get(name.removesuffix("-chat"))
    gated = architecture is not None and architecture.gated
    worst, lost = 0.0, 0.0
    for query, document in (TEXTS, TEXTS[::-1]):
        explanation = explainer.explain(query, document)
        pairs = explainer.scorer.pair_encoder.read_pairs(Passage(query), [Passage(document)])
        cut = explainer.method.settings["cut"]
        *found, logit = references_cross.relevance(model, pairs.features, cut, gated=gated)
        oracle = references_cross.matrix(*found, *(pairs.text(0, side)[1].tolist() for side in (0, 1)))
        miss = torch.as_tensor(explanation.matrix.copy()).double() - oracle
        worst = max(worst, float(miss.norm() / oracle.norm()))
        lost = max(lost, abs(explanation.matrix.sum(dtype="float64") - float(logit)) / float(found[0].abs().sum()))
    kind = "wordpiece" if architecture is None else architecture.tokenizer
    return f"| {name} | {type(head).__name__} | {kind} | {worst:.0e} | {lost:.0e} | {transformers.__version__} |"


def main() -> None:
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    rows = []
    for name in ARCHITECTURES:
        rows.append(measure(name))
        print(rows[-1])
    crossed = []
    for name in HEADS:
        crossed.append(measure_cross(name))
        print(crossed[-1])
    TARGET.write_text(HEAD + "\n".join(rows) + "\n" + CROSS + "\n".join(crossed) + "\n")


if __name__ == "__main__":
    main()
