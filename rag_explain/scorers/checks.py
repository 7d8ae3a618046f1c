"""Is a model read and run as a method needs it? Checked when an Explainer is made, and by the doctor."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from rag_explain.encoder.model import Encoder
from rag_explain.errors import UnsupportedModel

PROBE = "Why was this short text found?"


@dataclass(frozen=True)
class Finding:
    """One line of a diagnosis: what was looked at, what was seen, and whether it is as it should be."""

    subject: str
    seen: str
    ok: bool = True


def tolerance(dtype: torch.dtype) -> float:
    """What may be rounding in this precision, as a share of an embedding; a wrong rule misses by far more."""
    return 1e-4 if dtype in (torch.float32, torch.float64) else 5e-2


def check_route(encoder: Encoder, layer: int) -> None:
    """Refuse an encoder in which a text reaches the embedding past the block that it is attributed to.

    What goes past would be counted as a constant, and no sum would show it. So the block is given the hidden state of
    one text while the model reads another: the embedding must not move. It must not depend on padding either, or
    factors would depend on which texts shared a batch.
    """
    batch = encoder.read([PROBE, f"{PROBE} {PROBE}"], "document")
    alone, together = batch.select([0]), encoder.run(batch)[:1]
    hidden, plain = encoder.hidden(alone, layer)
    ids = alone.features["input_ids"].clone()
    words = [index for index, token in enumerate(alone.tokens[0]) if token.part == "text"]
    ids[0, alone.positions(0)[words]] = int(ids[0, alone.positions(0)[words[0]]])  # one word, again and again
    other = replace(alone, features={**alone.features, "input_ids": ids})
    moved = encoder.run(other, lambda block, value: hidden if block == layer else value)
    allowed = tolerance(encoder.dtype) * plain.norm()
    if not (moved - plain).norm() <= allowed:
        raise UnsupportedModel(
            f"in this model a text reaches the embedding past the input of block {layer}, so that it cannot "
            "be attributed there" + ("" if layer == 0 else ": try layer=0")
        )
    if not (together - plain).norm() <= allowed:
        raise UnsupportedModel(
            "the embeddings of this model depend on padding, so that a text has no embedding of its own: "
            "pad on the other side, or use another model"
        )
