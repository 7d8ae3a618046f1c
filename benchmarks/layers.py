"""At which block should `ij` look? A perturbation test on pairs of STS benchmark sentences.

    python benchmarks/layers.py --data FOLDER_WITH_STSBENCHMARK [--pairs 60] [--json layers.json]

For each pair of sentences the word pairs are ranked by an explanation. The words of the best pair are deleted from
their sentences, then those of the next pair with a word left, and so on until a sentence is empty. The encoder scores
every step. A faithful ranking makes the score fall fast: the figure is the mean of score / first score over the steps,
lower is better. `random` and `bilrp` stand beside the layers of `ij`. Deleting words takes sentences away from what the
encoder was trained on, as in every test of this kind; the comparison is between rankings under the same deletions.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from rag_explain import Explainer, Explanation, Token
from rag_explain.models import load


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder that holds sts-dev.csv")
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--model", default="all-MiniLM-L6-v2")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()

    model, name = load(options.model)
    assert isinstance(model, SentenceTransformer)
    pairs = read_pairs(options.data / "sts-dev.csv", options.pairs)
    blocks = Explainer(model, "ij").encoder.blocks
    runs = {f"ij, block {layer}": Explainer(model, "ij", layer=layer) for layer in range(blocks)}
    runs |= {"bilrp": Explainer(model, "bilrp"), "random": Explainer(model, "random")}
    areas: dict[str, list[float]] = {run: [] for run in runs}
    seconds = dict.fromkeys(runs, 0.0)
    for query, document in pairs:
        for run, explainer in runs.items():
            start = time.perf_counter()
            explanation = explainer.explain(query, document).by_word()
            seconds[run] += time.perf_counter() - start
            areas[run].append(area(model, explanation))
    best = min(areas, key=lambda run: float(np.mean(areas[run])))
    print(f"{len(pairs)} pairs of STSb dev, {name}; area under the perturbation curve, lower is better")
    print(f"{'ranking':<14} {'area':>6} {'± s.e.':>7} {'minus best':>11} {'± s.e.':>7} {'s / pair':>9}")
    rows = []
    for run, values in areas.items():
        difference = np.array(values) - np.array(areas[best])
        row = {
            "ranking": run,
            "area": float(np.mean(values)),
            "standard_error": spread(values),
            "minus_best": float(difference.mean()),
            "minus_best_standard_error": spread(difference),
            "seconds_per_pair": seconds[run] / len(pairs),
        }
        rows.append(row)
        print("{:<14} {:6.3f} {:7.3f} {:11.3f} {:7.3f} {:9.2f}".format(*row.values()))
    if options.json:
        data = {"model": name, "pairs": len(pairs), "rows": rows}
        options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def read_pairs(path: Path, count: int) -> list[tuple[str, str]]:
    """Similar pairs (gold score of at least 3 of 5), spread evenly over the file, so that there is a score to lose."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE) if float(row[4]) >= 3]
    kept = rows[:: max(1, len(rows) // count)][:count]
    return [(row[5], row[6]) for row in kept]


def area(model: SentenceTransformer, explanation: Explanation) -> float:
    """The mean of score / first score while the words of the best pairs are deleted, step by step."""
    assert explanation.query is not None
    assert explanation.document is not None
    order = np.argsort(-explanation.pairs, axis=None, kind="stable")
    left: set[int] = set()
    right: set[int] = set()
    texts = [explanation.query, explanation.document]
    for flat in order:
        i, j = divmod(int(flat), explanation.pairs.shape[1])
        if i in left and j in right:
            continue
        left.add(i)
        right.add(j)
        if len(left) == len(explanation.query_tokens) or len(right) == len(explanation.document_tokens):
            break
        texts.append(without(explanation.query, [explanation.query_tokens[k] for k in left]))
        texts.append(without(explanation.document, [explanation.document_tokens[k] for k in right]))
    vectors = model.encode(texts, normalize_embeddings=True)
    scores = (vectors[::2] * vectors[1::2]).sum(axis=1)
    return float((scores / scores[0]).mean())


def without(text: str, words: list[Token]) -> str:
    """`text` with some of its words cut out."""
    for word in sorted(words, key=lambda token: -token.start):
        text = text[: word.start] + text[word.end :]
    return " ".join(text.split())


def spread(values: Sequence[float] | NDArray[np.float64]) -> float:
    """The standard error of the mean."""
    array = np.asarray(values)
    return float(array.std(ddof=1) / math.sqrt(len(array)))


if __name__ == "__main__":
    main()
