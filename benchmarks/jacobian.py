"""`ij` against the papers' way of computing integrated Jacobians, on one pair of short sentences, in one run.

    python benchmarks/jacobian.py [--json benchmarks/results/jacobian.json]

The papers' way: a right Riemann sum of N = 100 nodes in one batch, and one backward pass through it for every
dimension of the embedding, for each of the two texts. Ours: Gauss-Legendre nodes chosen to a tolerance, one
tangent per token of the query, and the query's rows pulled back through the document. Both give the same
matrix of token pairs (`along_reference="pairs"`: equation 2). The error is that of the identity both rest on,

    |sum of pairs - (f(a, b) - f(a, r_b) - f(r_a, b) + f(r_a, r_b))|.

With `--norm-inside` what section 3.2 of Moeller et al. (2024) says of exact attributions, the cosine of shifted
embeddings inside the path, would give: what the pairs sum to beside that cosine, at every block, and for other pairs at
the last one. `ij-exact` divides by the norms after
the integral.

Times are processor seconds of one thread, the same for both, so that what else the machine does plays a small part;
wall times are in the file, too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor

from rag_explain import Explainer, Explanation
from rag_explain.encoder.loading import load
from rag_explain.encoder.reference import reference_features

QUERY, DOCUMENT = "a dog runs in the park today", "the small dog is running over green grass outside"
OTHERS = (
    ("A man is playing a guitar.", "A man plays the guitar."),
    ("What is the capital of France?", "Paris is the capital and largest city of France."),
    ("How do bees find their way home?", "Honeybees find their way back to the hive by the position of the sun."),
)
NODES = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="all-MiniLM-L6-v2")
    parser.add_argument("--runs", type=int, default=7, help="runs of ours; the papers' way runs once")
    parser.add_argument("--papers-at-input", action="store_true", help="the papers' way at block 0, too: minutes")
    parser.add_argument("--norm-inside", action="store_true", help="only what the norm inside the path would give")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()

    torch.set_num_threads(1)
    model, name = load(options.model, "cpu")
    assert isinstance(model, SentenceTransformer)
    blocks = Explainer(model, "ij").scorer.encoder.n_blocks
    if options.norm_inside:
        shifted(model, name, blocks, options.json)
        return
    rows = []
    for layer in (blocks - 1, 0):
        explainer = Explainer(model, "ij", layer=layer, along_reference="pairs")
        explanation = explainer.explain(QUERY, DOCUMENT)
        ours, walls = [], []
        for _ in range(options.runs):
            explainer = Explainer(explainer.scorer, "ij", layer=layer, along_reference="pairs")  # knows neither text
            wall, start = time.perf_counter(), time.process_time()
            explanation = explainer.explain(QUERY, DOCUMENT)
            ours.append(time.process_time() - start)
            walls.append(time.perf_counter() - wall)
        wanted = identity(explanation)
        found = explanation.references or {}
        row: dict[str, Any] = {
            "block": layer,
            "tokens": list(explanation.pairs.shape),
            "ours_seconds": statistics.median(ours),
            "ours_wall_seconds": statistics.median(walls),
            "ours_error": abs(float(explanation.pairs.sum(dtype=np.float64)) - wanted),
            "ours_nodes": [found["query_nodes"], found["document_nodes"]],
            "ours_relative_errors": [found["query_error"], found["document_error"]],
            "largest_pair": float(np.abs(explanation.pairs).max()),
        }
        rows.append(row)
        print(
            f"block {layer}, {row['tokens'][0]} x {row['tokens'][1]} tokens: "
            f"ours {row['ours_seconds']:.3f} s, error {row['ours_error']:.1e} with {row['ours_nodes']} nodes"
        )
        if layer == 0 and not options.papers_at_input:
            continue
        wall, start = time.perf_counter(), time.process_time()
        theirs = papers_way(model, layer)
        seconds = time.process_time() - start
        row |= {
            "papers_seconds": seconds,
            "papers_wall_seconds": time.perf_counter() - wall,
            "papers_error": abs(float(theirs.sum()) - wanted),
            "papers_nodes": NODES,
            "faster": seconds / row["ours_seconds"],
            "largest_difference_of_a_pair": float(np.abs(theirs - explanation.pairs).max()),
        }
        print(
            f"    papers' way {seconds:.1f} s, error {row['papers_error']:.1e} with {NODES} nodes: "
            f"{row['faster']:.0f} times faster"
        )
    if options.json:
        data = {
            "command": "python benchmarks/jacobian.py",
            "model": name,
            "torch": torch.__version__,
            "cores": os.cpu_count(),
            "rows": rows,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def shifted(model: SentenceTransformer, name: str, blocks: int, path: Path | None) -> None:
    """The pairs' sum at every block with the norm inside the path."""
    model[0].auto_model.set_attn_implementation("eager")  # the others have no second derivatives
    rows = [norm_inside(model, layer, (QUERY, DOCUMENT)) for layer in range(blocks)]
    rows += [norm_inside(model, blocks - 1, pair) for pair in OTHERS]
    for row in rows:
        print("{texts}, block {block}: pairs sum to {pairs:.3f} where the score is {score:.3f}".format(**row))
    if path:
        data = {"command": "python benchmarks/jacobian.py --norm-inside", "model": name, "rows": rows}
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def identity(explanation: Explanation) -> float:
    """What the pairs must sum to."""
    found = explanation.references or {}
    return explanation.score - found["f(a, r_b)"] - found["f(r_a, b)"] + found["f(r_a, r_b)"]


def papers_way(model: SentenceTransformer, layer: int) -> np.ndarray[Any, Any]:
    """(n_q, n_d): the token pairs from two integrated Jacobians, (e, n * h) each."""
    (a, one), (b, other) = (integrated(model, text, layer) for text in (QUERY, DOCUMENT))
    left, right = (one * a).sum(dim=-1), (other * b).sum(dim=-1)  # (e, n): summed over each token's features
    pairs: np.ndarray[Any, Any] = (left.T @ right).numpy()
    return pairs


def integrated(model: SentenceTransformer, text: str, layer: int) -> tuple[Tensor, Tensor]:
    """a - r (n, h), and the Jacobian of the unit embedding (e, n, h), averaged over N nodes."""
    features: dict[str, Any] = dict(model.preprocess([text]))
    with torch.no_grad():
        start, _ = forward(model, reference_features(features, model[0]), layer, None)
        end, _ = forward(model, features, layer, None)
    alphas = torch.arange(1, NODES + 1)[:, None, None] / NODES
    nodes = (start + alphas * (end - start)).requires_grad_()
    copies = {key: value.expand(NODES, -1) for key, value in features.items() if isinstance(value, Tensor)}
    _, embedding = forward(model, copies, layer, nodes)
    unit = torch.nn.functional.normalize(embedding, dim=-1)
    rows = []
    for dimension in range(unit.shape[1]):
        (gradient,) = torch.autograd.grad(unit[:, dimension].sum(), nodes, retain_graph=True)
        rows.append(gradient.mean(dim=0))
    return (end - start)[0], torch.stack(rows)


def norm_inside(model: SentenceTransformer, layer: int, texts: tuple[str, str]) -> dict[str, Any]:
    """Rows of (e(x) - e(r)) / |e(x) - e(r)| by the right Riemann sum, which never comes to r; only their sums."""
    sums, ends = [], []
    for text in texts:
        features: dict[str, Any] = dict(model.preprocess([text]))
        with torch.no_grad():
            start, reference = forward(model, reference_features(features, model[0]), layer, None)
            end, embedding = forward(model, features, layer, None)
        total = torch.zeros_like(embedding)
        for n in range(1, NODES + 1):
            at = start + n / NODES * (end - start)
            unit = partial(_unit_shifted, model, features, layer, reference)
            total += torch.autograd.functional.jvp(unit, at, end - start)[1] / NODES
        sums.append(total[0])
        ends.append(torch.nn.functional.normalize(embedding - reference, dim=-1)[0])
    return {"texts": texts, "block": layer, "pairs": float(sums[0] @ sums[1]), "score": float(ends[0] @ ends[1])}


def _unit_shifted(
    model: SentenceTransformer, features: dict[str, Any], layer: int, reference: Tensor, at: Tensor
) -> Tensor:
    return torch.nn.functional.normalize(forward(model, features, layer, at)[1] - reference, dim=-1)


def forward(
    model: SentenceTransformer, features: dict[str, Any], layer: int, replacement: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The input of block `layer`, and the embedding before normalisation; the input replaced where one is given."""
    caught: list[Tensor] = []

    def enter(_module: Any, args: tuple[Any, ...]) -> Any:
        caught.append(args[0])
        return None if replacement is None else (replacement, *args[1:])

    handle = model[0].auto_model.encoder.layer[layer].register_forward_pre_hook(enter)
    try:
        out = dict(features)
        for module in model:
            if type(module).__name__ != "Normalize":
                out = module(out)
    finally:
        handle.remove()
    return caught[0], out["sentence_embedding"]


if __name__ == "__main__":
    main()
