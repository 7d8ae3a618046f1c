"""Frozen encoders made with other passes than all of them."""

from __future__ import annotations

from torch import Tensor

from rag_explain.encoder import Batch, Encoder
from rag_explain.linear import AffineMap, Recorder, Rules
from rag_explain.linear.fusion import Fusion


def freeze_with(fusion: Fusion, encoder: Encoder, batch: Batch, rules: Rules) -> AffineMap:
    """The map from the first block's input, after these fused passes alone."""
    with Recorder(rules) as recorder:

        def visit(block: int, hidden: Tensor) -> Tensor:
            if block == 0:
                hidden = hidden.clone()
                recorder.mark(hidden)
            return hidden

        embedding = encoder.run(batch, visit, recorder.enter)
    return recorder.freeze(embedding, fusion)
