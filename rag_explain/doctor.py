"""What this library can and cannot do with a model, measured on the spot."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rag_explain import models
from rag_explain.encoder import Encoder, quiet_torch
from rag_explain.errors import RagExplainError
from rag_explain.explainer import as_encoder
from rag_explain.linear import JACOBIAN, LRP, AffineMap
from rag_explain.methods.base import tolerance
from rag_explain.methods.bilrp import freeze

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

_TEXT = "The quick brown fox jumps over the lazy dog, and nobody can say why it was found."


@dataclass(frozen=True)
class Finding:
    """One line of a diagnosis: what was looked at, what was seen, and whether it is as it should be."""

    subject: str
    seen: str
    ok: bool = True


def examine(model: str | Path | SentenceTransformer, device: str | None = None) -> list[Finding]:
    """Load a model, push and pull a short text through it, compare with autograd, and say what was seen."""
    loaded, name = models.load(model, device)
    try:
        encoder = as_encoder(loaded, name, device)
    except RagExplainError as error:
        return [Finding("supported", str(error), ok=False)]
    architecture = type(encoder.transformer).__name__
    findings = [
        Finding("architecture", f"{architecture}, {encoder.blocks} blocks, {encoder.modules}"),
        Finding("score", f"{encoder.metric}" + (f" ({encoder.surrogate})" if encoder.surrogate else "")),
        Finding("prompts", f"query {encoder.prompt('query')!r}, document {encoder.prompt('document')!r}"),
        Finding("computes on", f"{encoder.device}, {str(encoder.dtype).removeprefix('torch.')}"),
    ]
    if encoder.is_multivector:
        return [*findings, Finding("supported", "alignment: its own score, token by token")]
    with quiet_torch(encoder):
        try:
            findings += _measure(encoder)
        except RagExplainError as error:
            findings.append(Finding("supported", str(error), ok=False))
    return findings


def _measure(encoder: Encoder) -> list[Finding]:
    batch = encoder.tokenize([_TEXT], "document")
    plain = encoder.run(batch)
    frozen = freeze(encoder, batch, 0, LRP)
    rows, rest = frozen.push_rows()
    share = float(rest.norm() / frozen.embedding.norm())
    relevance, _ = frozen.relevance(torch.eye(rows.shape[-1]).to(rows)[:8, None, :])
    derivative = freeze(encoder, batch, 0, JACOBIAN)
    seconds, per_encode = _seconds(frozen.rows), _seconds(lambda: encoder.run(batch))
    tokens = len(batch.tokens[0])
    checks = [
        ("embedding as encoded", _relative(frozen.embedding, plain)),
        ("rows + rest = embedding", _relative(rows.sum(dim=1) + rest, frozen.embedding)),
        ("push = pull", _relative(relevance.permute(1, 2, 0), rows[..., :8])),
    ]
    findings = []
    try:
        own = _autograd(encoder, batch, derivative)
        checks.append(("derivative = autograd", _relative(derivative.rows()[0][..., :8], own)))
    except RuntimeError as error:  # a module that keeps tensors of an earlier pass: autograd will not have them
        findings.append(Finding("derivative = autograd", f"not compared: {str(error).splitlines()[0]}"))
    return [
        Finding("supported", "bilrp and hxp: every operation has a rule"),
        *(Finding(name, f"off by {miss:.1e}", ok=miss <= tolerance(encoder.dtype)) for name, miss in checks),
        *findings,
        Finding("rest's share", f"|rest| / |embedding| = {share:.2f}: what the biases contribute and no token owns"),
        Finding("time per token", f"{seconds / tokens * 1e3:.2f} ms for factors of {tokens} tokens"),
        Finding("cost", f"{seconds / per_encode:.1f} plain encodes for the factors of this text"),
    ]


def _autograd(encoder: Encoder, batch: Any, frozen: AffineMap) -> torch.Tensor:
    """(D, n, 8): gradient times input of the first dimensions, by torch's own reverse mode."""
    caught: list[torch.Tensor] = []

    def visit(block: int, hidden: torch.Tensor) -> torch.Tensor:
        if block == 0:
            hidden = hidden.detach().requires_grad_()
            caught.append(hidden)
        return hidden

    with torch.enable_grad():
        embedding = encoder.run(batch, visit)
        gradients = [
            torch.autograd.grad(embedding[:, dimension].sum(), caught[0], retain_graph=True)[0]
            for dimension in range(min(8, embedding.shape[1]))
        ]
    return torch.stack([(gradient * frozen.hidden).sum(dim=-1) for gradient in gradients], dim=-1)


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def _seconds(run: Callable[[], object], repeats: int = 5) -> float:
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return sorted(times)[repeats // 2]
