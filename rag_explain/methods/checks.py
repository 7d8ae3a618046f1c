"""Do the numbers hold on this model? The check at load, and everything that the doctor measures."""

import statistics
import timeit
from collections.abc import Callable

import numpy as np
import torch

from rag_explain.encoder.batch import Batch
from rag_explain.encoder.model import Encoder
from rag_explain.encoder.probing import tolerance
from rag_explain.errors import CheckFailed, RagExplainError
from rag_explain.linear import JACOBIAN, LRP
from rag_explain.methods.base import to_numpy
from rag_explain.methods.frozen import FrozenMethod, freeze
from rag_explain.scorers.base import Scorer
from rag_explain.scorers.checks import PROBE, Finding
from rag_explain.texts.tokens import Role

_TEXT = "The quick brown fox jumps over the lazy dog, and nobody can say why it was found."
_DIMENSIONS = 8  # that push is compared with pull, and the derivative with autograd


def check_sum(method: FrozenMethod) -> None:
    """Refuse an encoder whose rows and rest miss its embedding, or whose recorded embedding is not its own."""
    encoder = method.encoder
    for role in encoder.roles:
        batch = encoder.read([PROBE], role)
        (factors,) = method.factor(batch, "token")
        plain = to_numpy(encoder.run(batch)[0])
        error = float(np.linalg.norm(plain - factors.embedding) / np.linalg.norm(plain))
        if method.dtype is None:  # a lower precision that was asked for is measured for each text
            error = max(factors.error, error)
        if not error <= tolerance(encoder.dtype):
            raise CheckFailed(
                f"sum of rows + rest misses the embedding of {encoder.name} by {error:.1%}: "
                "an operation of this encoder is treated wrongly, and it is not explained; please report the model"
            )


def examine(scorer: Scorer) -> list[Finding]:
    """Everything that the doctor says of a scorer."""
    described = [Finding(name, seen) for name, seen in scorer.describe().items()]
    off = scorer.probes.distance(scorer.own_probes)
    described.append(Finding("as the model encodes", f"off by {off:.1e} in both roles", ok=off <= scorer.tolerance))
    try:
        encoder = scorer.encoder
    except RagExplainError:  # nothing to be taken apart: its own score is explained, unit by unit
        return [*described, Finding("supported", f"{scorer.methods[0]}: its own score, part by part")]
    try:
        with encoder.computing():
            measured = [one for role in encoder.roles for one in _measured(encoder, role)]
            return [*described, *measured]
    except RagExplainError as error:
        return [*described, Finding("supported", str(error), ok=False)]


def _measured(encoder: Encoder, role: Role) -> list[Finding]:
    """Push and pull a short text through an encoder, compare with autograd, and say what was seen."""
    batch = encoder.read([_TEXT], role)
    plain = encoder.run(batch)
    frozen, embedding = freeze(encoder, batch, 0, LRP)
    rows, rest = frozen.push_rows()
    relevance, _ = frozen.relevance(torch.eye(min(_DIMENSIONS, rows.shape[-1]), rows.shape[-1]).to(rows)[:, None, :])
    seconds, per_encode = _seconds(frozen.rows), _seconds(lambda: encoder.run(batch))
    tokens = len(batch.tokens[0])
    misses = {
        "embedding as encoded": _relative(embedding, plain),
        "rows + rest = embedding": _relative(rows.sum(dim=1) + rest, embedding),
        "push = pull": _relative(relevance.permute(1, 2, 0), rows[..., :_DIMENSIONS]),
    }
    findings = []
    derivative, _ = freeze(encoder, batch, 0, JACOBIAN)
    try:
        own = _autograd(encoder, batch, derivative.hidden)
        misses["derivative = autograd"] = _relative(derivative.rows()[0][..., :_DIMENSIONS], own)
    except RuntimeError as error:  # a module that keeps tensors of an earlier pass, which autograd refuses
        findings.append(Finding("derivative = autograd", f"not compared: {str(error).splitlines()[0]}"))
    share = float(rest.norm() / embedding.norm())
    return [
        Finding("supported", "bilrp and hxp: every operation has a rule"),
        *(Finding(name, f"off by {miss:.1e}", ok=miss <= tolerance(encoder.dtype)) for name, miss in misses.items()),
        *findings,
        Finding("rest's share", f"|rest| / |embedding| = {share:.2f}: what the biases contribute and no token owns"),
        Finding("time per token", f"{seconds / tokens * 1e3:.2f} ms for factors of {tokens} tokens"),
        Finding("cost", f"{seconds / per_encode:.1f} plain encodes for the factors of this text"),
    ]


def _autograd(encoder: Encoder, batch: Batch, hidden: torch.Tensor) -> torch.Tensor:
    """(D, n, 8): gradient times input of the first dimensions, by torch's own reverse mode."""
    leaves: list[torch.Tensor] = []

    def visit(block: int, value: torch.Tensor) -> torch.Tensor:
        if block == 0:
            value = value.detach().requires_grad_()
            leaves.append(value)
        return value

    with torch.enable_grad():
        embedding = encoder.run(batch, visit)
        gradients = [
            torch.autograd.grad(embedding[:, dimension].sum(), leaves[0], retain_graph=True)[0]
            for dimension in range(min(_DIMENSIONS, embedding.shape[1]))
        ]
    return torch.stack([(gradient * hidden).sum(dim=-1) for gradient in gradients], dim=-1)


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def _seconds(run: Callable[[], object]) -> float:
    run()
    return statistics.median(timeit.repeat(run, number=1, repeat=5))
